# SPDX-License-Identifier: Apache-2.0
"""Codes [outputs, inputs] of quantized checkpoints, whose inputs form groups: unpacked, widened or converted.

A weight is (code - zero) * scale. Native code does the work on all threads.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastdeploy.ops.host import load_threaded_library

CONVERTED_GROUP = 32
_RUN_SIZES = (128, 64, 32)  # of the groups that operators have


@dataclass(frozen=True)
class GroupedCodes:
    """A weight as codes.

    Attributes:
        codes: [outputs, inputs] int8 or uint8.
        scales: [outputs, groups] float32.
        zeros: as scales, or None where they are 0.
        groups: [inputs] int32, to which group each input belongs.
    """

    codes: NDArray[np.int8] | NDArray[np.uint8]
    scales: NDArray[np.float32]
    zeros: NDArray[np.float32] | None
    groups: NDArray[np.int32]

    def __post_init__(self) -> None:
        """Check what native code relies on.

        Raises:
            ValueError: the arrays do not fit together, or a group is out of range.
        """
        shape = self.codes.shape[0], self.scales.shape[-1]
        arrays: list[tuple[str, NDArray[Any], tuple[type, ...], tuple[int, ...]]] = [
            ("codes", self.codes, (np.int8, np.uint8), (*self.codes.shape[:1], len(self.groups))),
            ("scales", self.scales, (np.float32,), shape),
            ("zeros", self.scales if self.zeros is None else self.zeros, (np.float32,), shape),
            ("groups", self.groups, (np.int32,), self.groups.shape[:1]),
        ]
        for name, array, types, expected in arrays:
            if array.dtype not in types or array.shape != expected or not array.flags.c_contiguous:
                found = f"{array.dtype} {list(array.shape)}"
                raise ValueError(f"grouped_codes: {name}: expected contiguous {list(expected)}, got {found}")
        if self.groups.size and not 0 <= self.groups.min() <= self.groups.max() < shape[1]:
            raise ValueError(f"grouped_codes: groups: expected 0..{shape[1] - 1}, got {self.groups.max()}")


class _GroupedCodes(ctypes.Structure):
    """custom_ops/host/grouped_codes.h."""

    _fields_ = [
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("groups", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("is_signed", ctypes.c_int64),
    ]


def run_size(groups: NDArray[np.int32]) -> int:
    """Return the largest number of inputs, 128, 64 or 32, by which inputs can be cut so that each part is of one group.

    Returns:
        0 if a part of 32 inputs has several groups. No part is larger than all inputs, unless these are below 32.
    """
    for size in (size for size in _RUN_SIZES if size <= max(len(groups), _RUN_SIZES[-1])):
        if np.array_equal(np.repeat(groups[::size], size)[: len(groups)], groups):
            return size
    return 0


def unpack_codes(
    packed: NDArray[np.uint8], num_inputs: int, bits: Literal[4, 8], is_signed: bool
) -> NDArray[np.int8] | NDArray[np.uint8]:
    """Return the codes [outputs, num_inputs] of rows that are packed along the inputs, the first in the lowest bits.

    Args:
        packed: contiguous [outputs, bytes]; the last bytes of a row may be unused.
        is_signed: whether codes are stored plus 8 or 128: they become int8 then, else uint8.

    Raises:
        ValueError: a row is too short.
    """
    if packed.ndim != 2 or not packed.flags.c_contiguous or packed.shape[1] * 8 < num_inputs * bits:
        found = f"{packed.dtype} {list(packed.shape)}"
        raise ValueError(f"unpack_codes: packed: expected contiguous rows of {num_inputs} codes, got {found}")
    codes = np.empty((packed.shape[0], num_inputs), np.uint8)
    added = 256 - (1 << bits - 1) if is_signed else 0
    sizes = packed.shape[0], packed.shape[1], num_inputs, bits, added
    load_threaded_library().fd_codes_unpack(packed.ctypes.data, *sizes, codes.ctypes.data)
    return codes.view(np.int8) if is_signed else codes


def widen_codes(coded: GroupedCodes, dtype: Literal["float32", "bfloat16"]) -> NDArray[np.float32] | NDArray[np.uint16]:
    """Return the weights [outputs, inputs]: float32, or the bits of bfloat16, which are rounded once more."""
    wide = np.empty(coded.codes.shape, {"float32": np.float32, "bfloat16": np.uint16}[dtype])
    load_threaded_library().fd_codes_widen(ctypes.byref(_native(coded)), wide.ctypes.data, dtype == "bfloat16")
    return wide


def convert_codes(coded: GroupedCodes) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Return new codes -127..127 [outputs, inputs] of the float32 weights, and a scale for each 32 inputs.

    A scale is the smallest float16 number that is not below absmax / 127, infinity if there is none; a code is the
    integer nearest to value / scale, ties to even.
    """
    outputs, inputs = coded.codes.shape
    codes = np.empty((outputs, inputs), np.int8)
    scales = np.empty((outputs, -(-inputs // CONVERTED_GROUP)), np.float16)
    load_threaded_library().fd_codes_convert(ctypes.byref(_native(coded)), codes.ctypes.data, scales.ctypes.data)
    return codes, scales


def _native(coded: GroupedCodes) -> _GroupedCodes:
    """Return the arrays as the library takes them; they have to outlive the result."""
    zeros = None if coded.zeros is None else coded.zeros.ctypes.data
    arrays = coded.codes.ctypes.data, coded.scales.ctypes.data, zeros, coded.groups.ctypes.data
    return _GroupedCodes(*arrays, *coded.codes.shape, coded.scales.shape[1], coded.codes.dtype == np.int8)
