# SPDX-License-Identifier: Apache-2.0
"""Finds weights that are not finite, with one pass over their memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from paddle import Tensor

_INFINITY_BITS = {
    **{"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F7F8000, "float64": 0x47EFF << 44},
    "float8_e4m3fn": 0x7F,  # NaN: the type has no infinity
}
"""The smallest number that is infinite when it is rounded to bfloat16, for a type that has larger ones."""
_CHUNK_BYTES = 1 << 18  # both passes over a chunk stay within a core's cache
_PARALLEL_BYTES = 1 << 23  # smaller tensors are not worth waking threads for


def is_finite(tensor: Tensor) -> bool:
    """Return whether a contiguous host tensor has neither NaN nor numbers that are infinite in bfloat16.

    Their bits, read as an integer, are at least those of the smallest such number: as a signed number if the sign is
    positive, as an unsigned one if it is negative. So two maxima are enough, and no copy is made.
    """
    if not _has_infinity(tensor):
        return True
    chunks, infinity = _chunks_of(tensor)
    if len(chunks) * _CHUNK_BYTES < _PARALLEL_BYTES:
        return _are_finite(chunks, infinity)
    num_threads = len(os.sched_getaffinity(0))
    parts = [chunks[i::num_threads] for i in range(num_threads)]
    with ThreadPoolExecutor(num_threads) as threads:  # NumPy releases the global lock
        return all(threads.map(_are_finite, parts, [infinity] * num_threads))


def find_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of a tensor that `is_finite` denies, or None; several tensors are checked at a time."""

    def check(tensor: Tensor) -> bool:
        return not _has_infinity(tensor) or _are_finite(*_chunks_of(tensor))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        found = zip(tensors, threads.map(check, tensors.values()), strict=True)
        return next((name for name, is_valid in found if not is_valid), None)


def _has_infinity(tensor: Tensor) -> bool:
    """Return whether the type is one of floating-point numbers; integers are finite."""
    return tensor.dtype.name.lower() in _INFINITY_BITS


def _chunks_of(tensor: Tensor) -> tuple[list[NDArray[Any]], int]:
    """Return the bits of a tensor in parts, and the bits of infinity."""
    bits, infinity = bits_of(tensor), _INFINITY_BITS[tensor.dtype.name.lower()]
    size = _CHUNK_BYTES // bits.itemsize
    return [bits[begin : begin + size] for begin in range(0, bits.size, size)], infinity


def _are_finite(chunks: list[NDArray[Any]], infinity: int) -> bool:
    for chunk in chunks:
        sign_bit = 1 << (8 * chunk.itemsize - 1)
        if chunk.view(f"i{chunk.itemsize}").max() >= infinity or chunk.max() >= sign_bit + infinity:
            return False
    return True


def bits_of(tensor: Tensor) -> NDArray[Any]:
    """Return the tensor's memory as unsigned integers."""
    item = int(tensor.element_size())
    count = int(tensor.size)
    memory = (ctypes.c_byte * (count * item)).from_address(tensor.data_ptr())
    return np.frombuffer(memoryview(memory), dtype=np.dtype(f"u{item}"), count=count)
