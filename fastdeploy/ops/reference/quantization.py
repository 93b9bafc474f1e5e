# SPDX-License-Identifier: Apache-2.0
"""The values that quantized weights and rows represent, in Paddle operators, rounded as the native kernels do."""

import paddle

_GROUP = 128  # inputs that share a scale in 4-bit formats
_EXTREME_CODES = (
    -8.0,
    -7.5,
    -7.0,
    -6.5,
    -6.0,
    -8.5,
    -9.0,
)  # candidate codes of the largest weight, not clipped yet
_MIN_SCALE = 2.0**-112  # smaller scales and rows count as 0, because their inverse would overflow
_MAX_16_BIT_CODE = 32639  # both of its signed bytes are 127
_ROUNDING = 12582912.0  # 1.5 * 2^23: adding and subtracting it rounds to the nearest integer, ties to even


def dequantize_weight(weight: paddle.Tensor, quantization: str) -> paddle.Tensor:
    """Quantize a float32 weight [out_features, in_features] and return codes times scales."""
    return _four_bits(weight) if quantization in ("wint4", "w4a8") else _eight_bits(weight)


def dequantize_rows(x: paddle.Tensor, quantization: str) -> paddle.Tensor:
    """Quantize float32 rows [num_rows, in_features] and return codes times scales.

    Rows with NaN or infinity become NaN. In w8a8 and w4a8 the scale is absmax / 127. In wint8 and wint4 it is the power
    of two that brings absmax to 2^14..2^15.
    """
    largest = x.abs().max(axis=1, keepdim=True)
    is_zero = largest < _MIN_SCALE
    largest = paddle.where(is_zero, paddle.ones_like(largest), largest)
    if quantization in ("w8a8", "w4a8"):
        codes, scale = _nearest(x * (127.0 / largest)), largest / 127.0
    else:
        scale = 2.0 ** (largest.log2().floor() - 14.0)
        codes = _nearest(x / scale).clip(max=_MAX_16_BIT_CODE)
    values = paddle.where(is_zero, paddle.zeros_like(x), codes * scale)
    return paddle.where(x.isfinite().all(axis=1, keepdim=True), values, paddle.full_like(x, "nan"))


def _eight_bits(weight: paddle.Tensor) -> paddle.Tensor:
    return _quantized(weight, weight.abs().max(axis=1, keepdim=True) / 127.0, -127, 127)


def _four_bits(weight: paddle.Tensor) -> paddle.Tensor:
    n, k = weight.shape
    padded = paddle.nn.functional.pad(weight, [0, 0, 0, -k % _GROUP]).reshape([-1, _GROUP])
    extreme = paddle.take_along_axis(padded, padded.abs().argmax(axis=1, keepdim=True), 1)
    best, min_error = paddle.zeros_like(padded), paddle.full_like(extreme, float("inf"))
    for code in _EXTREME_CODES:
        scale = (extreme / code).astype("bfloat16").astype("float32")
        candidate = _quantized(padded, scale, -8, 7)
        error = _squared_error(candidate, padded)
        better = (error < min_error) & (scale.abs() >= _MIN_SCALE)
        best, min_error = paddle.where(better, candidate, best), paddle.where(better, error, min_error)
    return best.reshape([n, -1])[:, :k].contiguous()


def _quantized(weight: paddle.Tensor, scale: paddle.Tensor, low: int, high: int) -> paddle.Tensor:
    is_zero = scale.abs() < _MIN_SCALE
    inverse = 1.0 / paddle.where(is_zero, paddle.ones_like(scale), scale)
    return paddle.where(is_zero, paddle.zeros_like(weight), _nearest(weight * inverse).clip(low, high) * scale)


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
