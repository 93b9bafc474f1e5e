# SPDX-License-Identifier: Apache-2.0
"""Makes coded pieces of weights (code - zero) * scale, which is code * scale + minimum, and reads what they consist of.

Zeros are None where codes are signed and their zero is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.core.errors import ConfigError
from fastdeploy.models.finite import bits_of
from fastdeploy.models.weight_source import SafetensorsSource
from fastdeploy.ops.coded_piece import CodedPiece, half_numbers
from fastdeploy.ops.grouped_codes import CONVERTED_GROUP, GroupedCodes, convert_codes
from fastdeploy.ops.registry import selected_backend

SCALE_KINDS = ("BF16", "F16", "F32")
_TYPES: Mapping[str, type[np.generic]] = {
    **{"I8": np.int8, "I32": np.int32, "I64": np.int64},
    **{"F16": np.float16, "BF16": np.uint16, "F32": np.float32},
}
_LARGEST_SCALE = 2.0**110  # no weight is infinite in bfloat16
_LARGEST_HALF_SCALE = 256.0  # -255 times it is a number in float16
_SMALLEST_OF_LARGEST = 2.0**-16  # a scale of this part of the largest one keeps all bits of bfloat16 in float16
_LARGEST_CONVERTED_SCALE = 511.75  # the largest number of float16 of which -128 times is one, too
Floats = NDArray[np.float32]


def bad_tensor(files: SafetensorsSource, name: str, problem: str) -> ConfigError:
    """Return the error of a tensor that is not valid."""
    return ConfigError("model", f"{files.where(name)} {problem}")


def stored_array(files: SafetensorsSource, name: str) -> NDArray[Any]:
    """Return a tensor in the mapped file; bfloat16 as unsigned integers."""
    return bits_of(files.stored(name)).view(_TYPES[files.kind(name)]).reshape(files.shapes[name])


def wide_floats(values: NDArray[Any], kind: str) -> Floats:
    """Return part of a tensor as float32.

    Args:
        kind: of the tensor.
    """
    return (values.astype(np.uint32) << 16).view(np.float32) if kind == "BF16" else values.astype(np.float32)


def check_scales(scales: Floats, files: SafetensorsSource, name: str) -> None:
    """Raise ConfigError if a scale is not a number above 0 with which weights are finite."""
    if not (scales.min() > 0 and scales.max() <= _LARGEST_SCALE):  # NaN is neither
        raise bad_tensor(files, name, f"has a scale that is not above 0 and at most {_LARGEST_SCALE:.1g}")


def are_small_halves(files: SafetensorsSource, name: str) -> bool:
    """Return whether scales are stored in float16, and minimums made from them are numbers in float16, too."""
    return files.kind(name) == "F16" and bool(stored_array(files, name).max() <= _LARGEST_HALF_SCALE)


def have_exact_halves(scales: Floats, kind: str) -> bool:
    """Return whether scales are exact in float16, if those of an output are divided by a power of two.

    Args:
        scales: [outputs, groups].
        kind: of the tensor that holds them.
    """
    if kind == "BF16":
        return bool((scales.min(axis=1) >= scales.max(axis=1) * _SMALLEST_OF_LARGEST).all())
    values = paddle.to_tensor(scales)
    factors, halves, _ = half_numbers(values, None)
    return bool((halves.astype("float32") * factors == values).all())


def kept_piece(grouped: GroupedCodes, group_size: int, has_small_halves: bool) -> CodedPiece:
    """Return a piece that keeps all codes.

    A scale per output is kept in float32, beside zeros as the factor of its output. Minimums of groups are rounded to
    float16, and so are scales of groups that are not `are_small_halves`, after a division by a power of two.

    Args:
        group_size: 32, 64 or 128; 0: one scale per output.
    """
    if group_size == 0:
        return _piece_of_outputs(grouped)
    columns, dtype = grouped.groups[::group_size], np.float16 if has_small_halves else np.float32
    scales = grouped.scales[:, columns]
    minimums = None if grouped.zeros is None else (-grouped.zeros[:, columns] * scales).astype(dtype)
    return _piece(grouped.codes, scales.astype(dtype), minimums, group_size)


def converted_piece(grouped: GroupedCodes, files: SafetensorsSource, scale_name: str) -> CodedPiece:
    """Return new codes of eight bits in groups of 32 inputs.

    Args:
        scale_name: the tensor that an error names.

    Raises:
        ConfigError: weights are too large.
    """
    codes, scales = convert_codes(grouped)
    if not scales.max() <= _LARGEST_CONVERTED_SCALE:
        raise bad_tensor(files, scale_name, "belongs to weights that are too large for new codes")
    return _piece(codes, scales, None, CONVERTED_GROUP)


def _piece_of_outputs(grouped: GroupedCodes) -> CodedPiece:
    if grouped.zeros is None:
        return _piece(grouped.codes, grouped.scales, None, 0)
    zeros, factors = grouped.zeros, selected_backend().host_tensor(grouped.scales.reshape(-1))
    return _piece(grouped.codes, np.ones(zeros.shape, np.float16), (-zeros).astype(np.float16), 0).scaled(factors)


def _piece(codes: NDArray[Any], scales: NDArray[Any], minimums: NDArray[Any] | None, size: int) -> CodedPiece:
    def wrap(array: NDArray[Any]) -> Tensor:
        return selected_backend().host_tensor(np.ascontiguousarray(array))

    return CodedPiece(wrap(codes), wrap(scales), None if minimums is None else wrap(minimums), size)
