# SPDX-License-Identifier: Apache-2.0
"""Splits rows of GGUF tensors into codes, scales and minimums, or widens them, in native code and on all threads.

What a type becomes when it is split depends on how many inputs share a scale. With 32 and more, every code is kept;
scales and minimums are the file's own fp16 numbers, or fp32 products of them that are rounded to fp16: to nearest, ties
to even, so that they differ by at most 2^-11 of themselves or 2^-25. A type with 16 inputs to a scale is widened to
fp32 and gets eight-bit codes in groups of 32 inputs. Their scale is the smallest fp16 number that is not below
absmax / 127, and a code the integer nearest to value / scale, ties to even.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fastdeploy.core.ggml_types import GGML_TYPES, PLAIN_TYPES
from fastdeploy.ops.host import load_threaded_library

GROUP_SIZE = 32
Bytes = NDArray[np.uint8]
Rows = NDArray[np.int64]
Fidelity = Literal["kept", "rounded", "converted"]

_FOUR_BITS = {"Q4_0", "Q4_1", "Q4_K", "TQ1_0", "TQ2_0"}
_WITH_MINIMUM = {"Q4_1", "Q5_1", "Q4_K", "Q5_K"}
_KEPT = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "TQ1_0", "TQ2_0"}
_ROUNDED = {"Q4_K", "Q5_K", "IQ4_XS", "IQ1_S", "IQ2_XXS", "IQ3_XXS", "IQ3_S", "MXFP4"}


@dataclass(frozen=True)
class SplitRows:
    """Rows as codes: a weight is code * scale, or code * scale + minimum.

    Attributes:
        codes: [rows, inputs] int8, or uint8 from 0 on if there are minimums.
        scales: [rows, inputs / group_size] float16.
        minimums: as scales, or None.
        group_size: consecutive inputs that share a scale.
    """

    codes: NDArray[np.int8] | NDArray[np.uint8]
    scales: NDArray[np.float16]
    minimums: NDArray[np.float16] | None
    group_size: int = GROUP_SIZE


class _StoredRows(ctypes.Structure):
    """Rows in memory, custom_ops/host/ggml_blocks.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("type_id", ctypes.c_int64),
    ]


def fidelity(type_name: str) -> Fidelity:
    """Return what splitting does to a type.

    Returns:
        "kept": every value stays; "rounded": every code stays, and scales and minimums are rounded to fp16;
        "converted": the values get new codes of eight bits.

    Raises:
        ValueError: the type is unknown, or its values are not quantized.
    """
    if type_name not in GGML_TYPES or type_name in PLAIN_TYPES:
        raise ValueError(f"ggml_blocks: type_name: expected a quantized type, got {type_name!r}")
    if type_name in _KEPT:
        return "kept"
    return "rounded" if type_name in _ROUNDED else "converted"


def code_bits(type_name: str) -> int:
    """Return how many bits the codes of a type need after splitting: 4 or 8.

    Raises:
        ValueError: as `fidelity`.
    """
    fidelity(type_name)
    return 4 if type_name in _FOUR_BITS else 8


def has_minimum(type_name: str) -> bool:
    """Return whether a type has minimums after splitting.

    Raises:
        ValueError: as `fidelity`.
    """
    fidelity(type_name)
    return type_name in _WITH_MINIMUM


def split_rows(data: Bytes, type_name: str, num_inputs: int, rows: Rows | None = None) -> SplitRows:
    """Split rows of a quantized type.

    Args:
        data: [rows, bytes of a row] uint8 with any distance between rows; it is read in place.
        num_inputs: values of a row, whole blocks.
        rows: [n] int64, which rows are taken, in this order; None for all.

    Raises:
        ValueError: the type is not quantized, data does not fit the type and num_inputs, or a row is out of range.
    """
    with_minimum = has_minimum(type_name)
    stored, num_rows = _stored_rows(data, type_name, num_inputs, rows)
    codes = np.empty((num_rows, num_inputs), np.int8)
    scales = np.empty((num_rows, num_inputs // GROUP_SIZE), np.float16)
    minimums = np.empty_like(scales) if with_minimum else None
    address = None if minimums is None else minimums.ctypes.data
    load_threaded_library().fd_ggml_split(ctypes.byref(stored), codes.ctypes.data, scales.ctypes.data, address)
    return SplitRows(codes if minimums is None else codes.view(np.uint8), scales, minimums)


def widen_rows(
    data: Bytes, type_name: str, num_inputs: int, dtype: Literal["float32", "bfloat16"], rows: Rows | None = None
) -> NDArray[np.float32] | NDArray[np.uint16]:
    """Return the values [n, num_inputs] of rows of any type: float32, or the bits of bfloat16 as uint16.

    A product of factors is rounded to fp32 after each step, in the order of the format's definition; bfloat16 is the
    fp32 value rounded once more, ties to even.

    Args:
        data, num_inputs, rows: as for `split_rows`.

    Raises:
        ValueError: the type is unknown, data does not fit the type and num_inputs, or a row is out of range.
    """
    stored, num_rows = _stored_rows(data, type_name, num_inputs, rows)
    wide = np.empty((num_rows, num_inputs), {"float32": np.float32, "bfloat16": np.uint16}[dtype])
    load_threaded_library().fd_ggml_widen(ctypes.byref(stored), wide.ctypes.data, dtype == "bfloat16")
    return wide


def find_bad_scale(data: Bytes, type_name: str, num_inputs: int, rows: Rows | None = None) -> int | None:
    """Return the first of some rows that has a scale, a minimum or a plain value which is NaN or infinite in fp32.

    Args:
        data, num_inputs, rows: as for `split_rows`; the type may be a plain one.

    Returns:
        Its index among the rows that are taken, or None if there is none.

    Raises:
        ValueError: as `widen_rows`.
    """
    stored, num_rows = _stored_rows(data, type_name, num_inputs, rows)
    first = int(load_threaded_library().fd_ggml_find_bad_scale(ctypes.byref(stored)))
    return first if first < num_rows else None


def _stored_rows(data: Bytes, type_name: str, num_inputs: int, rows: Rows | None) -> tuple[_StoredRows, int]:
    """Return the rows as the library takes them, and their number; the arrays have to outlive the result."""
    if type_name not in GGML_TYPES:
        raise ValueError(f"ggml_blocks: type_name: expected one of {', '.join(GGML_TYPES)}, got {type_name!r}")
    kind = GGML_TYPES[type_name]
    if num_inputs < 0 or num_inputs % kind.block_values:
        raise ValueError(
            f"ggml_blocks: num_inputs: expected a multiple of {kind.block_values} for {type_name}, got {num_inputs}"
        )
    expected = kind.row_bytes(num_inputs)
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != expected or (expected > 1 and data.strides[1] != 1):
        raise ValueError(
            f"ggml_blocks: data: expected uint8 [rows, {expected}] with contiguous rows for {num_inputs} values of "
            f"{type_name}, got {data.dtype} {list(data.shape)} with strides {list(data.strides)}"
        )
    if rows is not None:
        _check_rows(rows, data.shape[0])
    address, num_rows = (None, data.shape[0]) if rows is None else (rows.ctypes.data, len(rows))
    return _StoredRows(data.ctypes.data, address, num_rows, data.strides[0], num_inputs, kind.type_id), num_rows


def _check_rows(rows: Rows, num_rows: int) -> None:
    if rows.dtype != np.int64 or rows.ndim != 1 or not rows.flags.c_contiguous:
        raise ValueError(f"ggml_blocks: rows: expected contiguous int64 [n], got {rows.dtype} {list(rows.shape)}")
    if rows.size and (rows.min() < 0 or rows.max() >= num_rows):
        raise ValueError(f"ggml_blocks: rows: expected 0..{num_rows - 1}, got {rows.min()}..{rows.max()}")
