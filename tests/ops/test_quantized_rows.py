# SPDX-License-Identifier: Apache-2.0
"""Rounding of rows in quantized layers: wint8 and wint4 keep all bits of bf16 down to 1/128 of the largest input."""

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.linear import linear, pack_linear
from fastdeploy.ops.quantized_form import FORMS
from fastdeploy.ops.reference.quantization import dequantize_weight

LARGEST = 255 * 2.0**7  # 32640, in bf16 the last number below 2^15: a row with it has the scale 1


def applied(weight: paddle.Tensor, x: paddle.Tensor, quantization: str) -> NDArray[np.float32]:
    """Return the logits of a layer."""
    out = paddle.zeros([x.shape[0], weight.shape[0]])
    linear(x, pack_linear(weight, None, quantization), out, x.shape[0])
    return np.asarray(out.numpy())


def rounded_rows(x: list[list[float]], quantization: str) -> NDArray[np.float32]:
    """Return the rounded rows of a layer, by means of a weight whose codes have the scale 1."""
    k, code = len(x[0]), 127.0 if quantization in ("wint8", "w8a8") else -8.0
    weight = paddle.eye(k).astype("bfloat16") * code
    return applied(weight, paddle.to_tensor(x, "bfloat16"), quantization) / code


@pytest.mark.parametrize("quantization", ["wint8", "wint4"])
@pytest.mark.parametrize("size", [1.0, 2.0**-100, 2.0**100])
def test_a_16_bit_row_is_rounded_in_steps_of_its_largest_input(quantization: str, size: float) -> None:
    rows = [
        [16384, -16384, 128, -255, 129, 1, 0, 0],  # the scale 1
        [-LARGEST, 255, 1, 0.5, 1.5, -2.5, -0.25, 32512],  # ties to even
        [1.9921875, 0.015625, -0.0078125, 2.0**-14, 2.0**-15, 3 * 2.0**-15, 0, 1],  # the scale 2^-14
    ]
    expected = [
        [16384, -16384, 128, -255, 129, 1, 0, 0],
        [-LARGEST, 255, 1, 0, 2, -2, 0, 32512],
        [32639 * 2.0**-14, 0.015625, -0.0078125, 2.0**-14, 0, 2.0**-13, 0, 1],  # 32640 does not fit two signed bytes
    ]
    found = rounded_rows(np.multiply(rows, size).tolist(), quantization)
    assert np.array_equal(found, np.multiply(expected, size))


def test_an_8_bit_row_is_rounded_in_steps_of_1_127th_of_its_largest_input() -> None:
    assert rounded_rows([[254, -2, 1, 0.9, 3.1, 4.9]], "w8a8").tolist() == [[254, -2, 0, 0, 4, 4]]


@pytest.mark.parametrize("quantization", ["wint8", "wint4", "w8a8", "w4a8"])
def test_tiny_rows_become_zero(quantization: str) -> None:
    found = rounded_rows([[2.0**-113, 2.0**-120], [2.0**-112, -(2.0**-112)], [0, 0]], quantization)
    assert found[[0, 2]].tolist() == [[0, 0], [0, 0]]
    assert np.allclose(found[1], [2.0**-112, -(2.0**-112)], rtol=1e-6, atol=0)


def wide(tensor: paddle.Tensor) -> NDArray[np.float64]:
    return np.asarray(tensor.astype("float32").numpy(), np.float64)


def error_and_magnitude(
    x: paddle.Tensor, quantization: str, k: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return |error| against float64, the sums of |x| |w| and those of |w|: [rows, 48]."""
    weight = random_rows(48, k, "bfloat16", 1, k**-0.5)
    exact = wide(dequantize_weight(weight.astype("float32"), FORMS[quantization]))
    error = np.abs(applied(weight, x, quantization) - wide(x) @ exact.T)
    return error, np.abs(wide(x)) @ np.abs(exact).T, np.ones_like(wide(x)) @ np.abs(exact).T


@pytest.mark.parametrize("quantization", ["wint8", "wint4"])
@pytest.mark.parametrize("k", [300, 4096])
def test_rows_without_outliers_are_multiplied_exactly(quantization: str, k: int) -> None:
    x = random_rows(20, k, "float32", 2).astype("bfloat16").astype("float32")
    x = paddle.where(x.abs() * 128 < x.abs().max(axis=1, keepdim=True), paddle.zeros_like(x), x)
    error, products, _ = error_and_magnitude(x.astype("bfloat16"), quantization, k)
    assert (error <= 2.0**-22 * products).all(), "only fp32 rounding"


@pytest.mark.parametrize("quantization", ["wint8", "wint4"])
@pytest.mark.parametrize("outlier", [1.0, 30.0, 1000.0])
def test_an_outlier_changes_other_inputs_by_at_most_half_a_step(quantization: str, outlier: float) -> None:
    k = 1024
    x = random_rows(20, k, "bfloat16", 2)
    x[:, 77] = outlier * 2
    half_step = 2.0**-15 * np.abs(wide(x)).max(axis=1, keepdims=True)
    error, products, weights = error_and_magnitude(x, quantization, k)
    assert (error <= half_step * weights + 2.0**-22 * products).all()
    # Errors of inputs fall on both sides, so that they add up to far less: here the mean of |w| over K^0.5 of them.
    assert np.sqrt((error**2).mean()) <= 0.6 * (half_step * weights).mean() / np.sqrt(k) + 2.0**-22 * products.mean()


@pytest.mark.parametrize("quantization", ["wint8", "w8a8"])
def test_sums_of_any_number_of_the_largest_products_are_exact(quantization: str) -> None:
    k = 140_000  # times 127 * 127 it is beyond int32
    x, weight = paddle.full([2, k], 127.0, "bfloat16"), paddle.full([16, k], 127.0, "bfloat16")
    x[1] = LARGEST
    weight[5:] = -127.0
    rounding = k / 128 * 2.0**-24 if quantization == "w8a8" else 1e-6  # w8a8 adds a part for each 128 inputs
    found = applied(weight, x, quantization) / (k * 127.0)
    largest = 32639 if quantization == "wint8" else LARGEST
    expected = np.outer([127, largest], [1] * 5 + [-1] * 11)
    assert np.allclose(found, expected, rtol=rounding, atol=0)


@pytest.mark.parametrize("quantization", ["wint8", "wint4", "w8a8", "w4a8"])
@pytest.mark.parametrize("rows", [1, 9])
def test_outputs_may_overwrite_the_inputs(quantization: str, rows: int) -> None:
    size = 1024
    weight = pack_linear(random_rows(size, size, "bfloat16", 1, size**-0.5), None, quantization)
    for seed in range(20):
        x = random_rows(rows, size, "bfloat16", seed)
        out = paddle.zeros_like(x)
        linear(x, weight, out, rows)
        linear(x, weight, x, rows)
        assert bool((x == out).all())
