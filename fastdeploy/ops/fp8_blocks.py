# SPDX-License-Identifier: Apache-2.0
"""Widens matrices of FP8 codes that share a scale per block, in native code and on all threads.

The codes are E4M3 without infinities: 0x7F and 0xFF are NaN, the other 254 are numbers up to 448.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from fastdeploy.ops.host import load_threaded_library

Codes = NDArray[np.uint8]
Wide = NDArray[np.float32] | NDArray[np.uint16]


class _Blocks(ctypes.Structure):
    """A matrix in memory, custom_ops/host/fp8_blocks.cc."""

    _fields_ = [
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("block_rows", ctypes.c_int64),
        ("block_inputs", ctypes.c_int64),
    ]


def num_blocks(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Return the number of blocks along rows and inputs; the last ones may be smaller."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def widen_blocks(codes: Codes, scales: NDArray[np.float32], block: tuple[int, int], out: Wide) -> bool:
    """Write code * scale of its block, computed in fp32 and rounded once more, ties to even, if out is bfloat16.

    Args:
        codes: [rows, inputs]; none is NaN.
        scales: [blocks of rows, blocks of inputs].
        block: rows and inputs of a block.
        out: [rows, inputs] float32, or uint16 for the bits of bfloat16.

    Returns:
        whether every value is finite in bfloat16.

    Raises:
        ValueError: the arrays do not fit together, or are not contiguous.
    """
    _check("codes", codes, np.uint8, codes.shape)
    shape = (codes.shape[0], codes.shape[1])
    _check("scales", scales, np.float32, num_blocks(shape, block))
    _check("out", out, np.uint16 if out.dtype == np.uint16 else np.float32, shape)
    blocks = _Blocks(codes.ctypes.data, scales.ctypes.data, *shape, *block)
    return bool(load_threaded_library().fd_fp8_widen(ctypes.byref(blocks), out.ctypes.data, out.itemsize == 2))


def _check(name: str, array: NDArray[np.generic], dtype: type, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.ndim != 2 or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(
            f"widen_blocks: {name}: expected contiguous {np.dtype(dtype)} {list(shape)} of two dimensions, got "
            f"{array.dtype} {list(array.shape)} with strides {list(array.strides)}"
        )
