# SPDX-License-Identifier: Apache-2.0
"""The values that quantized weights and rows represent, in Paddle operators, rounded as the native kernels do."""

from collections.abc import Callable

import paddle

from fastdeploy.ops.quantized_form import QuantizedForm

_GROUP = 32  # inputs that share a scale
_PIECE = 32  # inputs that share a scale in a row of 8 bits
_EXTREME_CODES = (-8.0, -7.5, -7.0, -6.5, -6.0, -8.5, -9.0)
"""Candidate codes of the weight of largest magnitude of a group, not clipped yet."""
_END_CODES = ((0, 15), (-0.5, 14.75), (0, 15.5), (-0.25, 15), (0, 15.25), (0.25, 15.25), (-0.25, 15.25))
"""Candidate codes of the smallest and the largest weight of a group, not clipped yet."""
_MIN_SCALE = 2.0**-112  # smaller scales and rows count as 0, because their inverse would overflow
_MAX_16_BIT_CODE = 32639  # both of its signed bytes are 127
_ROUNDING = 12582912.0  # 1.5 * 2^23: adding and subtracting it rounds to the nearest integer, ties to even


def dequantize_weight(weight: paddle.Tensor, form: QuantizedForm) -> paddle.Tensor:
    """Quantize a float32 weight [out_features, in_features] and return what its codes stand for."""
    if not form.has_scales:
        return _without_groups(weight)
    factor = _power_of_two(weight.abs().max(axis=1, keepdim=True))
    scaled = weight * _inverse(factor)
    values = _four_bits(scaled, form.has_minimum) if form.weight_bits == 4 else _eight_bits(scaled)
    return values * factor


def dequantize_rows(x: paddle.Tensor, row_bits: int) -> paddle.Tensor:
    """Quantize float32 rows [num_rows, in_features] to 8 or 16 bits and return codes times scales.

    With 8 bits each 32 inputs have the scale absmax / 127, and become NaN if one of them is NaN or infinity. With 16
    bits a row has the power of two as its scale that brings absmax to 2^14..2^15, and becomes NaN as a whole.
    """
    if row_bits == 16:
        return _dequantize(x, _sixteen_bits)
    pieces = paddle.nn.functional.pad(x, [0, 0, 0, -x.shape[1] % _PIECE]).reshape([-1, _PIECE])
    values = _dequantize(pieces, lambda values, largest: _nearest(values * (127.0 / largest)) * (largest / 127.0))
    return values.reshape([x.shape[0], -1])[:, : x.shape[1]].contiguous()


def _dequantize(
    x: paddle.Tensor, round_values: Callable[[paddle.Tensor, paddle.Tensor], paddle.Tensor]
) -> paddle.Tensor:
    """Return what `round_values`, given rows and the largest magnitude of each, makes of ordinary rows."""
    largest = x.abs().max(axis=1, keepdim=True)
    is_zero = largest < _MIN_SCALE
    values = round_values(x, paddle.where(is_zero, paddle.ones_like(largest), largest))
    values = paddle.where(is_zero, paddle.zeros_like(x), values)
    return paddle.where(x.isfinite().all(axis=1, keepdim=True), values, paddle.full_like(x, "nan"))


def _sixteen_bits(x: paddle.Tensor, largest: paddle.Tensor) -> paddle.Tensor:
    scale = 2.0 ** (largest.log2().floor() - 14.0)
    return _nearest(x / scale).clip(max=_MAX_16_BIT_CODE) * scale


def _without_groups(weight: paddle.Tensor) -> paddle.Tensor:
    scale = weight.abs().max(axis=1, keepdim=True) / 127.0
    is_zero = scale < _MIN_SCALE
    inverse = 1.0 / paddle.where(is_zero, paddle.ones_like(scale), scale)
    codes = _nearest(weight * inverse).clip(-127, 127)
    return paddle.where(is_zero, paddle.zeros_like(weight), codes * scale)


def _eight_bits(weight: paddle.Tensor) -> paddle.Tensor:
    n, k = weight.shape
    groups = paddle.nn.functional.pad(weight, [0, 0, 0, -k % _GROUP]).reshape([-1, _GROUP])
    scale = _to_half(groups.abs().max(axis=1, keepdim=True) / 127.0)
    values = _nearest(groups * _inverse(scale)).clip(-127, 127) * scale
    return values.reshape([n, -1])[:, :k].contiguous()


def _four_bits(weight: paddle.Tensor, has_minimum: bool) -> paddle.Tensor:
    n, k = weight.shape
    padding = weight[:, -1:] if has_minimum else paddle.zeros([n, 1])
    groups = paddle.concat([weight, padding.expand([n, -k % _GROUP])], axis=1).reshape([-1, _GROUP])
    best, min_error = paddle.zeros_like(groups), paddle.full([groups.shape[0], 1], float("inf"))
    for scale, minimum in _candidates(groups, has_minimum):
        codes = _nearest((groups - minimum) * _inverse(scale))
        codes = codes.clip(0, 15) if has_minimum else codes.clip(-8, 7)
        values = codes * scale + minimum
        error = _squared_error(values, groups)
        is_better = error < min_error
        best, min_error = paddle.where(is_better, values, best), paddle.where(is_better, error, min_error)
    return best.reshape([n, -1])[:, :k].contiguous()


def _candidates(groups: paddle.Tensor, has_minimum: bool) -> list[tuple[paddle.Tensor, paddle.Tensor]]:
    """Return the scales and minimums, each [num_groups, 1], among which the best is chosen."""
    if not has_minimum:
        extreme = paddle.take_along_axis(groups, groups.abs().argmax(axis=1, keepdim=True), 1)
        none = paddle.full_like(extreme, -0.0)  # adding it keeps the sign of a zero
        return [(_to_half(extreme / code), none) for code in _EXTREME_CODES]
    smallest, largest = groups.min(axis=1, keepdim=True), groups.max(axis=1, keepdim=True)
    candidates = []
    for low, high in _END_CODES:
        scale = _to_half((largest - smallest) / (high - low))
        candidates.append((scale, _to_half(smallest - low * scale)))
    return candidates


def _power_of_two(largest: paddle.Tensor) -> paddle.Tensor:
    """Return the largest power of two that is not above a number, or 0 for tiny numbers."""
    is_zero = largest < _MIN_SCALE
    power = 2.0 ** paddle.where(is_zero, paddle.ones_like(largest), largest).log2().floor()
    return paddle.where(is_zero, paddle.zeros_like(largest), power)


def _inverse(scale: paddle.Tensor) -> paddle.Tensor:
    is_zero = scale == 0
    return paddle.where(is_zero, paddle.zeros_like(scale), 1.0 / paddle.where(is_zero, paddle.ones_like(scale), scale))


def _to_half(x: paddle.Tensor) -> paddle.Tensor:
    return x.astype("float16").astype("float32")


def _squared_error(values: paddle.Tensor, expected: paddle.Tensor) -> paddle.Tensor:
    """Return [num_groups, 1], summed as the kernel does: 16 interleaved sums in order, then pairwise by halves."""
    squares = (values - expected).square().reshape([-1, _GROUP // 16, 16])
    total = squares[:, 0]
    for i in range(1, _GROUP // 16):
        total = total + squares[:, i]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total


def _nearest(x: paddle.Tensor) -> paddle.Tensor:
    return (x + _ROUNDING) - _ROUNDING
