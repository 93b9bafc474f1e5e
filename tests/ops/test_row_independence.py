# SPDX-License-Identifier: Apache-2.0
"""Row r of an M-row call has the bits of the 1-row call, for every M that changes how the work is cut."""

from collections.abc import Callable

import numpy as np
import paddle
import pytest

from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.linear import QUANTIZATIONS, linear, pack_linear
from fastdeploy.ops.norm import rms_norm
from fastdeploy.ops.rotary import HeadLayout, rotary
from fastdeploy.ops.swiglu import swiglu
from tests.ops.bits import assert_same_bits, bits

BLOCK, TILE = 24, 384  # kColumnRows of custom_ops/cpu_ops/dot.h; kTileBlocks blocks of linear_tiles.h
EDGES = [*range(1, 21), *(edge + d for edge in (BLOCK, 2 * BLOCK, TILE, 504, 2040, 2048) for d in (-1, 0, 1))]
DTYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]


def one_row_at_a_time(call: Callable[[int, int], paddle.Tensor], rows: int) -> np.ndarray:
    """Return the bits of call(first_row, 1) for every row."""
    return np.concatenate([bits(call(row, 1)) for row in range(rows)])


@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPES)
@pytest.mark.parametrize(("n", "k"), [(64, 64), (200, 97)])
@pytest.mark.parametrize("fused", [False, True])
def test_linear(dtype: str, out_dtype: str, n: int, k: int, fused: bool) -> None:
    weight = pack_linear(random_rows(n, k, dtype, 1), random_rows(1, n, dtype, 2).reshape([n]) if fused else None)
    x, residual = random_rows(max(EDGES), k, dtype, 3), random_rows(max(EDGES), n, out_dtype, 4)

    def call(first: int, rows: int) -> paddle.Tensor:
        out = paddle.zeros([rows, n], out_dtype)
        linear(x[first : first + rows], weight, out, rows, residual[first : first + rows] if fused else None)
        return out

    alone = one_row_at_a_time(call, max(EDGES))
    for rows in EDGES:
        assert_same_bits(bits(call(0, rows)), alone[:rows], f"linear {dtype} {n}x{k}, {rows} rows")


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize(("n", "k", "out_dtype"), [(64, 300, "float32"), (200, 331, "float32"), (1600, 40, "bfloat16")])
def test_quantized_linear(quantization: str, n: int, k: int, out_dtype: str) -> None:
    bias = random_rows(1, n, "bfloat16", 2).reshape([n])
    weight = pack_linear(random_rows(n, k, "bfloat16", 1), bias, quantization)
    x, residual = random_rows(max(EDGES), k, "bfloat16", 3), random_rows(max(EDGES), n, out_dtype, 4)

    def call(first: int, rows: int) -> paddle.Tensor:
        out = paddle.zeros([rows, n], out_dtype)
        linear(x[first : first + rows], weight, out, rows, residual[first : first + rows])
        return out

    alone = one_row_at_a_time(call, max(EDGES))
    for rows in EDGES:
        assert_same_bits(bits(call(0, rows)), alone[:rows], f"linear {quantization} {n}x{k}, {rows} rows")


def test_linear_does_not_depend_on_where_the_residual_lives() -> None:
    weight = pack_linear(random_rows(80, 64, "bfloat16", 1))
    x, residual = random_rows(9, 64, "bfloat16", 2), random_rows(9, 80, "bfloat16", 3)
    apart, inside = paddle.zeros_like(residual), residual.clone()
    linear(x, weight, apart, 9, residual)
    linear(x, weight, inside, 9, inside)
    assert_same_bits(bits(inside), bits(apart), "linear with residual in place")


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
def test_swiglu(dtype: str) -> None:
    gate_up = random_rows(2048, 2 * 72, dtype, 1, scale=5.0)

    def call(first: int, rows: int) -> paddle.Tensor:
        out = paddle.zeros([rows, 72], dtype)
        swiglu(gate_up[first : first + rows], out, rows)
        return out

    alone = one_row_at_a_time(call, 2048)
    for rows in (*range(1, 21), 504, 2040, 2048):
        assert_same_bits(bits(call(0, rows)), alone[:rows], f"swiglu {dtype}, {rows} rows")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotary(dtype: str, interleaved: bool) -> None:
    heads = HeadLayout(3, 1, 40)
    source, norm = random_rows(600, heads.row_size, dtype, 1), random_rows(1, 40, dtype, 2).reshape([40])
    cos_sin = random_rows(600, 20, "float32", 3)
    positions = paddle.to_tensor(np.random.default_rng(4).permutation(600).astype(np.int32))

    def call(first: int, rows: int) -> paddle.Tensor:
        qkv = source[first : first + rows].clone()
        rotary(qkv, positions[first : first + rows], cos_sin, rows, heads, interleaved, norm, norm)
        return qkv

    alone = one_row_at_a_time(call, 600)
    for rows in (*range(1, 21), 504, 600):
        assert_same_bits(bits(call(0, rows)), alone[:rows], f"rotary {dtype}, {rows} rows")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_beyond_num_rows_are_left_alone(dtype: str) -> None:
    x, out = random_rows(9, 64, dtype, 1), paddle.full([9, 64], 7.0, dtype)
    linear(x, pack_linear(random_rows(64, 64, dtype, 2)), out, 5)
    assert (out[5:].astype("float32").numpy() == 7.0).all()
    assert (out[:5].astype("float32").numpy() != 7.0).all()
