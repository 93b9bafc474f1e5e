# SPDX-License-Identifier: Apache-2.0
"""Paths with a fused multiply-add have the bits of the definition in custom_ops/common/quant.h."""

import numpy as np
import paddle
import pytest

from fastdeploy.ops.backends.cpu import library
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.linear import linear, pack_linear
from fastdeploy.ops.quantized_form import FORMS
from tests.ops.bits import assert_same_bits, bits
from tests.ops.quantized import defined_outputs


def rows_of_many_sizes(count: int, k: int) -> paddle.Tensor:
    """Return rows between 2^-110 and 2^110, one with an outlier, one of zeros, one too small and one of 2^112."""
    x = random_rows(count, k, "float32", 3) * 2.0 ** paddle.linspace(-110, 110, count).reshape([-1, 1])
    x[count // 2, k // 2] *= 1000.0
    x[0] = 0.0
    x[1] = 2.0**-113
    x[2, 0] = 255 * 2.0**104
    return x.astype("bfloat16")


@pytest.mark.parametrize("quantization", FORMS)
@pytest.mark.parametrize(("n", "k"), [(40, 5), (64, 128), (33, 133), (21, 264), (16, 1032), (70, 3000)])
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
def test_a_layer_has_the_bits_of_the_definition(quantization: str, n: int, k: int, out_dtype: str) -> None:
    isa = library.isa()
    if isa == "portable":
        pytest.skip("the portable path rounds products")
    if isa.startswith("avx512") and quantization == "wint8" and k > 256:
        pytest.skip("AVX-512 sums longer groups in wint8")
    rows = 20
    x, residual = rows_of_many_sizes(rows, k), random_rows(rows, n, out_dtype, 4)
    bias = random_rows(1, n, "bfloat16", 2).reshape([-1])
    weight = pack_linear(random_rows(n, k, "bfloat16", 1, k**-0.5), bias, quantization)
    out = paddle.zeros([rows, n], out_dtype)
    linear(x, weight, out, rows, residual)
    expected = defined_outputs(x, weight, out_dtype, residual)
    assert np.isfinite(expected.astype("float32").numpy()).all()
    assert_same_bits(bits(out), bits(expected), f"{quantization} {n}x{k}")


@pytest.mark.parametrize("quantization", FORMS)
def test_rows_with_nan_or_infinity_become_nan(quantization: str) -> None:
    x = random_rows(4, 200, "bfloat16", 3)
    x[1, 7], x[2, 199] = float("nan"), float("-inf")
    weight = pack_linear(random_rows(32, 200, "bfloat16", 1), None, quantization)
    out = paddle.zeros([4, 32])
    linear(x, weight, out, 4)
    assert np.isnan(defined_outputs(x, weight, "float32").numpy()).all(axis=1).tolist() == [False, True, True, False]
    assert np.isnan(out.numpy()).all(axis=1).tolist() == [False, True, True, False]


@pytest.mark.parametrize("quantization", ["w8a8", "w4a8", "w4a8_min"])
def test_an_outlier_among_inputs_without_weights_changes_no_bit(quantization: str) -> None:
    weight = random_rows(48, 200, "bfloat16", 1)
    weight[:, 32:64] = 0.0
    packed, x = pack_linear(weight, None, quantization), random_rows(9, 200, "bfloat16", 3)
    out = [paddle.zeros([9, 48]), paddle.zeros([9, 48])]
    for result in out:
        linear(x, packed, result, 9)
        x[:, 40] *= 1000.0
    assert_same_bits(bits(out[1]), bits(out[0]), quantization)
