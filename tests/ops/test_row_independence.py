# SPDX-License-Identifier: Apache-2.0
"""Row r of an M-row call has the bits of the 1-row call, for every M that changes how the work is cut."""

from collections.abc import Callable

import numpy as np
import paddle
import pytest

from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.linear import QUANTIZATIONS, linear, pack_linear
from fastdeploy.ops.norm import NormParams, rms_norm
from tests.ops.bits import assert_same_bits, bits

# kColumnRows of custom_ops/cpu_ops/dot.h, kMostInTurns of linear_quant.cc, kTileBlocks blocks of linear_tiles.h
BLOCK, IN_TURNS, TILE = 24, 40, 384
EDGES = [*range(1, 21), *(edge + d for edge in (BLOCK, IN_TURNS, 2 * BLOCK, TILE, 504, 2040, 2048) for d in (-1, 0, 1))]
DTYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
PLAIN, FUSED, GATED = range(3)  # nothing but the product; bias, residual and norm; the same and the gate


def one_row_at_a_time(call: Callable[[int, int], paddle.Tensor], rows: int) -> np.ndarray:
    """Return the bits of call(first_row, 1) for every row."""
    return np.concatenate([bits(call(row, 1)) for row in range(rows)])


@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPES)
@pytest.mark.parametrize(("n", "k"), [(64, 64), (200, 97)])
@pytest.mark.parametrize("kind", [PLAIN, FUSED, GATED])
def test_linear(dtype: str, out_dtype: str, n: int, k: int, kind: int) -> None:
    weight_rows = 2 * n if kind == GATED else n
    bias = random_rows(1, weight_rows, dtype, 2).reshape([-1]) if kind else None
    weight = pack_linear(random_rows(weight_rows, k, dtype, 1), bias, is_gated=kind == GATED)
    x, residual = random_rows(max(EDGES), k, dtype, 3), random_rows(max(EDGES), n, out_dtype, 4)
    norm = NormParams(random_rows(1, k, dtype, 5).reshape([k]), 1e-6) if kind else None

    def call(first: int, rows: int) -> paddle.Tensor:
        out = paddle.zeros([rows, n], out_dtype)
        linear(x[first : first + rows], weight, out, rows, residual[first : first + rows] if kind else None, norm)
        return out

    alone = one_row_at_a_time(call, max(EDGES))
    for rows in EDGES:
        assert_same_bits(bits(call(0, rows)), alone[:rows], f"linear {dtype} {n}x{k}, {rows} rows")


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("n", "k", "out_dtype"), [(64, 300, "float32"), (200, 331, "float32"), (1600, 40, "bfloat16")])
def test_quantized_linear(quantization: str, n: int, k: int, out_dtype: str, is_gated: bool) -> None:
    weight_rows = 2 * n if is_gated else n
    bias = random_rows(1, weight_rows, "bfloat16", 2).reshape([-1])
    weight = pack_linear(random_rows(weight_rows, k, "bfloat16", 1), bias, quantization, is_gated)
    x, residual = random_rows(max(EDGES), k, "bfloat16", 3), random_rows(max(EDGES), n, out_dtype, 4)
    norm = NormParams(random_rows(1, k, "bfloat16", 5).reshape([k]), 1e-6) if is_gated else None

    def call(first: int, rows: int) -> paddle.Tensor:
        out = paddle.zeros([rows, n], out_dtype)
        linear(x[first : first + rows], weight, out, rows, residual[first : first + rows], norm)
        return out

    alone = one_row_at_a_time(call, max(EDGES))
    for rows in EDGES:
        assert_same_bits(bits(call(0, rows)), alone[:rows], f"linear {quantization} {n}x{k}, {rows} rows")


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("has_norm", [False, True])
def test_rows_that_threads_prepare_together_become_what_each_becomes_alone(quantization: str, has_norm: bool) -> None:
    n, k = 48, 1100  # kMinShared of quant_rows.h is 8192 inputs
    weight = pack_linear(random_rows(n, k, "bfloat16", 1), None, quantization)
    x = random_rows(40, k, "bfloat16", 2)
    norm = NormParams(random_rows(1, k, "bfloat16", 3).reshape([k]), 1e-6) if has_norm else None

    def call(first: int, rows: int) -> paddle.Tensor:
        out = paddle.zeros([rows, n])
        linear(x[first : first + rows], weight, out, rows, norm=norm)
        return out

    alone = one_row_at_a_time(call, 40)
    for rows in (7, 8, 11, 12, 16, 17, 24, 25, 40):
        assert_same_bits(bits(call(0, rows)), alone[:rows], f"linear {quantization}, {rows} rows")


def test_linear_does_not_depend_on_where_the_residual_lives() -> None:
    weight = pack_linear(random_rows(80, 64, "bfloat16", 1))
    x, residual = random_rows(9, 64, "bfloat16", 2), random_rows(9, 80, "bfloat16", 3)
    apart, inside = paddle.zeros_like(residual), residual.clone()
    linear(x, weight, apart, 9, residual)
    linear(x, weight, inside, 9, inside)
    assert_same_bits(bits(inside), bits(apart), "linear with residual in place")


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", "none"), *(("bfloat16", kind) for kind in ("none", *QUANTIZATIONS))]
)
@pytest.mark.parametrize("rows", [1, 9, 60])
def test_a_norm_inside_a_layer_has_the_bits_of_one_before_it(dtype: str, quantization: str, rows: int) -> None:
    weight = pack_linear(random_rows(80, 100, dtype, 1), None, quantization)
    x, norm = random_rows(rows, 100, dtype, 2, 3.0), NormParams(random_rows(1, 100, dtype, 3).reshape([100]), 1e-6)
    inside, after, normed = paddle.zeros([rows, 80]), paddle.zeros([rows, 80]), paddle.zeros_like(x)
    linear(x, weight, inside, rows, norm=norm)
    rms_norm(x, norm.weight, normed, rows, norm.eps)
    linear(normed, weight, after, rows)
    assert_same_bits(bits(inside), bits(after), f"norm inside {dtype} {quantization}, {rows} rows")


@pytest.mark.parametrize("k", [64, 97])
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", "none"), *(("bfloat16", kind) for kind in ("none", *QUANTIZATIONS))]
)
def test_linear_keeps_nan_and_infinity_in_their_rows(dtype: str, quantization: str, k: int) -> None:
    weight = pack_linear(random_rows(80, k, dtype, 1), None, quantization)
    clean = random_rows(13, k, dtype, 2)
    poisoned = clean.clone()
    poisoned[4] = float("nan")
    poisoned[7] = float("inf")
    outs = []
    for x in (clean, poisoned):
        outs.append(paddle.zeros([13, 80], dtype))
        linear(x, weight, outs[-1], 13)
    kept = [row for row in range(13) if row not in (4, 7)]
    assert_same_bits(bits(outs[1])[kept], bits(outs[0])[kept], "rows beside NaN")
    assert np.isnan(outs[1].astype("float32").numpy()[4]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [64, 100, 1024])
def test_rms_norm(dtype: str, size: int) -> None:
    x, weight = random_rows(2048, size, dtype, 1), random_rows(1, size, dtype, 2).reshape([size])

    def call(first: int, rows: int) -> paddle.Tensor:
        out = paddle.zeros([rows, size], dtype)
        rms_norm(x[first : first + rows], weight, out, rows, 1e-6)
        return out

    alone = one_row_at_a_time(call, 2048)
    for rows in (*range(1, 21), 504, 2040, 2048):
        assert_same_bits(bits(call(0, rows)), alone[:rows], f"rms_norm {dtype}, {rows} rows")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_beyond_num_rows_are_left_alone(dtype: str) -> None:
    x, out = random_rows(9, 64, dtype, 1), paddle.full([9, 64], 7.0, dtype)
    linear(x, pack_linear(random_rows(64, 64, dtype, 2)), out, 5)
    assert (out[5:].astype("float32").numpy() == 7.0).all()
    assert (out[:5].astype("float32").numpy() != 7.0).all()
