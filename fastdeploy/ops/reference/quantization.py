# SPDX-License-Identifier: Apache-2.0
"""What quantized weights and rows stand for, in Paddle operators and with the native kernels' roundings."""

import paddle

_GROUP = 128  # inputs that share a scale in the formats of four bits
_EXTREME_CODES = (-8.0, -7.5, -7.0, -6.5, -6.0, -8.5, -9.0)  # of the largest weight, before it is cut to -8..7
_LEAST_SCALE = 2.0**-112  # below it a scale or a row is 0: its inverse would overflow
_MOST_WIDE = 32639  # codes of sixteen bits whose two signed bytes are 127
_ROUNDING = 12582912.0  # 1.5 * 2^23: adding it and taking it away rounds to the nearest integer, ties to even


def dequantized(weight: paddle.Tensor, quantization: str) -> paddle.Tensor:
    """Return codes times scales of a float32 weight [out_features, in_features]."""
    return _four_bits(weight) if quantization in ("wint4", "w4a8") else _eight_bits(weight)


def quantized_rows(x: paddle.Tensor, quantization: str) -> paddle.Tensor:
    """Return float32 rows as integer codes times their scale; a row with NaN or infinity is all NaN.

    Eight bits (w8a8, w4a8): the scale is absmax / 127. Sixteen: the power of two that makes absmax 2^14 to 2^15.
    """
    largest = x.abs().max(axis=1, keepdim=True)
    is_zero = largest < _LEAST_SCALE
    largest = paddle.where(is_zero, paddle.ones_like(largest), largest)
    if quantization in ("w8a8", "w4a8"):
        codes, scale = _nearest(x * (127.0 / largest)), largest / 127.0
    else:
        scale = 2.0 ** (largest.log2().floor() - 14.0)
        codes = _nearest(x / scale).clip(max=_MOST_WIDE)
    found = paddle.where(is_zero, paddle.zeros_like(x), codes * scale)
    return paddle.where(x.isfinite().all(axis=1, keepdim=True), found, paddle.full_like(x, "nan"))


def _eight_bits(weight: paddle.Tensor) -> paddle.Tensor:
    return _coded(weight, weight.abs().max(axis=1, keepdim=True) / 127.0, -127, 127)


def _four_bits(weight: paddle.Tensor) -> paddle.Tensor:
    n, k = weight.shape
    padded = paddle.nn.functional.pad(weight, [0, 0, 0, -k % _GROUP]).reshape([-1, _GROUP])
    extreme = paddle.take_along_axis(padded, padded.abs().argmax(axis=1, keepdim=True), 1)
    best, least = paddle.zeros_like(padded), paddle.full_like(extreme, float("inf"))
    for code in _EXTREME_CODES:
        scale = (extreme / code).astype("bfloat16").astype("float32")
        candidate = _coded(padded, scale, -8, 7)
        error = _squared_error(candidate, padded)
        better = (error < least) & (scale.abs() >= _LEAST_SCALE)
        best, least = paddle.where(better, candidate, best), paddle.where(better, error, least)
    return best.reshape([n, -1])[:, :k].contiguous()


def _coded(weight: paddle.Tensor, scale: paddle.Tensor, low: int, high: int) -> paddle.Tensor:
    is_zero = scale.abs() < _LEAST_SCALE
    inverse = 1.0 / paddle.where(is_zero, paddle.ones_like(scale), scale)
    return paddle.where(is_zero, paddle.zeros_like(weight), _nearest(weight * inverse).clip(low, high) * scale)


def _squared_error(found: paddle.Tensor, wanted: paddle.Tensor) -> paddle.Tensor:
    """Return [num_groups, 1]: sums over every sixteenth weight in order, then of halves of the sixteen sums."""
    squares = (found - wanted).square().reshape([-1, _GROUP // 16, 16])
    total = squares[:, 0]
    for i in range(1, _GROUP // 16):
        total = total + squares[:, i]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total


def _nearest(x: paddle.Tensor) -> paddle.Tensor:
    return (x + _ROUNDING) - _ROUNDING
