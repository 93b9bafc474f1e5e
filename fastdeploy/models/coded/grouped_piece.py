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


def stored_floats(files: SafetensorsSource, name: str) -> Floats:
    """Return a tensor as float32, in the shape in which it is stored."""
    return wide_floats(stored_array(files, name), files.kind(name))


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


def keeps_scales(scales: Floats, kind: str) -> bool:
    """Return whether scales are exact in float16, if those of an output are divided by a power of two.

    Args:
        scales: [outputs, groups].
        kind: of the tensor that holds them.
    """
    largest, smallest = scales.max(axis=1), scales.min(axis=1)
    if kind == "F16":
        return bool(largest.max() <= _LARGEST_HALF_SCALE)
    if kind == "BF16":
        return bool((smallest >= largest * _SMALLEST_OF_LARGEST).all())
    values = paddle.to_tensor(scales)
    factors, halves, _ = half_numbers(values, None)
    return bool((halves.astype("float32") * factors == values).all())


def kept_piece(codes: Tensor, scales: Floats, zeros: Floats | None, group_size: int, kind: str) -> CodedPiece:
    """Return a piece that keeps all codes.

    A scale per output is kept in float32, with zeros as the factor of its output. Scales per group are kept in float16
    if they are stored so and no minimum would be too large; minimums are rounded to float16.

    Args:
        scales, zeros: [outputs, groups].
        group_size: 32, 64 or 128; 0: one scale per output.
        kind: of the tensor that holds the scales.
    """
    if group_size == 0:
        return _piece_of_outputs(codes, scales, zeros)
    dtype = "float16" if kind == "F16" and scales.max() <= _LARGEST_HALF_SCALE else "float32"
    minimums = None if zeros is None else paddle.to_tensor(-zeros * scales).astype(dtype)
    return CodedPiece(codes, paddle.to_tensor(scales).astype(dtype), minimums, group_size)


def _piece_of_outputs(codes: Tensor, scales: Floats, zeros: Floats | None) -> CodedPiece:
    if zeros is None:
        return CodedPiece(codes, paddle.to_tensor(scales))
    ones, minimums = paddle.ones(list(scales.shape), "float16"), paddle.to_tensor(-zeros).astype("float16")
    return CodedPiece(codes, ones, minimums, factors=paddle.to_tensor(scales.reshape(-1)))


def converted_piece(grouped: GroupedCodes, files: SafetensorsSource, scale_name: str) -> CodedPiece:
    """Return new codes of eight bits in groups of 32 inputs.

    Args:
        scale_name: the tensor that an error names.

    Raises:
        ConfigError: weights are too large.
    """
    codes, scales = convert_codes(grouped)
    if not scales.max() <= _LARGEST_CONVERTED_SCALE:
        raise bad_tensor(files, scale_name, "has weights that are too large for new codes")
    return CodedPiece(paddle.to_tensor(codes), paddle.to_tensor(scales), None, CONVERTED_GROUP)
