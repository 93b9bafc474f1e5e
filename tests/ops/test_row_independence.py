# SPDX-License-Identifier: Apache-2.0
"""Row r of an M-row call has the bits of the 1-row call, for every M at which kernels divide the work differently."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import paddle
import pytest

from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.linear import linear, pack_linear
from fastdeploy.ops.norm import NormParams, norm_gelu, rms_norm
from fastdeploy.ops.quantized_form import FORMS
from tests.ops.bits import assert_same_bits, bits

CPU_OPS = Path(__file__).resolve().parents[2] / "custom_ops" / "cpu_ops"


def constant(file: str, pattern: str) -> set[int]:
    """Return the values of a constant in the native sources, which may differ between instruction-set paths."""
    found = re.findall(rf"\b{pattern}(1 << )?(\d+)\b", (CPU_OPS / file).read_text())
    assert found, f"{file}: no {pattern}"
    return {1 << int(digits) if shifted else int(digits) for shifted, digits in found}


def around(edges: Iterable[int]) -> list[int]:
    """Return the row counts at and beside each edge."""
    return sorted({edge + d for edge in edges for d in (-1, 0, 1) if edge + d > 0})


BLOCK = max(constant("dot.h", "kColumnRows = "))  # rows of a block; 16-bit rows with two limbs count twice
INTERLEAVED = max(constant("linear_quant.cc", "kMaxInterleavedRows = "))
TILE = BLOCK * max(constant("linear_tiles.h", "kTileBlocks = "))
GROUPED = {*constant("linear.cc", "kMaxGroupRows = "), *constant("quant_strips.h", "kMaxGroupLimbRows = ")}
EDGES = sorted({*range(1, BLOCK + 2), *around([*GROUPED, INTERLEAVED, 2 * BLOCK, TILE // 2, TILE, 2 * TILE])})
PRIVATE_INPUTS = constant("tuning.h", r"constexpr Tuning \w+ = {\d+, ")  # to which every thread prepares rows itself
NORM_ELEMENTS = max(constant("tuning.h", "kMinParallelNormElements = "))
DTYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
PLAIN, FUSED, GATED = range(3)  # the product only; with bias, residual and norm; with these and a gate


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


@pytest.mark.parametrize("quantization", FORMS)
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


@pytest.mark.parametrize("quantization", FORMS)
@pytest.mark.parametrize("has_norm", [False, True])
def test_rows_that_threads_prepare_together_have_the_bits_of_single_rows(quantization: str, has_norm: bool) -> None:
    n, k = 48, 1100
    row_counts = around([*(inputs // k for inputs in PRIVATE_INPUTS), BLOCK // 2, BLOCK, INTERLEAVED, 2 * BLOCK])
    weight = pack_linear(random_rows(n, k, "bfloat16", 1), None, quantization)
    x = random_rows(max(row_counts), k, "bfloat16", 2)
    norm = NormParams(random_rows(1, k, "bfloat16", 3).reshape([k]), 1e-6) if has_norm else None

    def call(first: int, rows: int) -> paddle.Tensor:
        out = paddle.zeros([rows, n])
        linear(x[first : first + rows], weight, out, rows, norm=norm)
        return out

    alone = one_row_at_a_time(call, max(row_counts))
    for rows in row_counts:
        assert_same_bits(bits(call(0, rows)), alone[:rows], f"linear {quantization}, {rows} rows")


def test_a_residual_may_be_added_in_place() -> None:
    weight = pack_linear(random_rows(80, 64, "bfloat16", 1))
    x, residual = random_rows(9, 64, "bfloat16", 2), random_rows(9, 80, "bfloat16", 3)
    apart, inside = paddle.zeros_like(residual), residual.clone()
    linear(x, weight, apart, 9, residual)
    linear(x, weight, inside, 9, inside)
    assert_same_bits(bits(inside), bits(apart), "linear with residual in place")


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", "none"), *(("bfloat16", kind) for kind in ("none", *FORMS))]
)
@pytest.mark.parametrize("rows", [1, 9, 60])
def test_a_norm_in_a_layer_has_the_bits_of_a_separate_norm(dtype: str, quantization: str, rows: int) -> None:
    weight = pack_linear(random_rows(80, 100, dtype, 1), None, quantization)
    x, norm = random_rows(rows, 100, dtype, 2, 3.0), NormParams(random_rows(1, 100, dtype, 3).reshape([100]), 1e-6)
    inside, after, normed = paddle.zeros([rows, 80]), paddle.zeros([rows, 80]), paddle.zeros_like(x)
    linear(x, weight, inside, rows, norm=norm)
    rms_norm(x, norm.weight, normed, rows, norm.eps)
    linear(normed, weight, after, rows)
    assert_same_bits(bits(inside), bits(after), f"norm inside {dtype} {quantization}, {rows} rows")


# With 5,600 inputs, threads prepare few rows together in every format.
@pytest.mark.parametrize(("k", "rows"), [(100, 1), (100, 9), (100, 60), (5600, 1), (5600, 6), (5600, 12)])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", "none"), *(("bfloat16", kind) for kind in ("none", *FORMS))]
)
def test_a_norm_in_a_layer_reads_the_first_columns_of_wider_rows(
    dtype: str, quantization: str, is_gated: bool, k: int, rows: int
) -> None:
    weight = pack_linear(random_rows(96, k, dtype, 1, k**-0.5), None, quantization, is_gated)
    norm = NormParams(random_rows(1, k, dtype, 3).reshape([k]), 1e-6)
    narrow = random_rows(rows, k, dtype, 2, 3.0)
    wide = paddle.concat([narrow, paddle.full([rows, 36], float("nan"), dtype)], axis=1)
    found, want = (paddle.zeros([rows, weight.out_features], dtype) for _ in range(2))
    linear(wide, weight, found, rows, norm=norm)
    linear(narrow, weight, want, rows, norm=norm)
    assert_same_bits(bits(found), bits(want), f"wide rows {dtype} {quantization}, {rows} rows")


@pytest.mark.parametrize("k", [64, 97])
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", "none"), *(("bfloat16", kind) for kind in ("none", *FORMS))]
)
def test_nan_and_infinity_do_not_leave_their_rows(dtype: str, quantization: str, k: int) -> None:
    weight = pack_linear(random_rows(80, k, dtype, 1), None, quantization)
    clean = random_rows(13, k, dtype, 2)
    poisoned = clean.clone()
    poisoned[4] = float("nan")
    poisoned[7] = float("inf")
    outs = []
    for x in (clean, poisoned):
        outs.append(paddle.zeros([13, 80], dtype))
        linear(x, weight, outs[-1], 13)
    others = [row for row in range(13) if row not in (4, 7)]
    assert_same_bits(bits(outs[1])[others], bits(outs[0])[others], "rows beside NaN")
    assert np.isnan(outs[1].astype("float32").numpy()[4]).all()


@pytest.mark.parametrize("operator", ["rms_norm", "norm_gelu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [64, 100, 1024])
def test_norms(operator: str, dtype: str, size: int) -> None:
    row_counts = around([*range(1, 10), NORM_ELEMENTS // size])
    x, (weight, bias) = random_rows(max(row_counts), size, dtype, 1), random_rows(2, size, dtype, 2).unbind()

    def call(first: int, rows: int) -> paddle.Tensor:
        out, part = paddle.zeros([rows, size], dtype), x[first : first + rows]
        if operator == "rms_norm":
            rms_norm(part, weight, out, rows, 1e-6)
        else:
            norm_gelu(part, weight, bias, out, rows, 1e-6)
        return out

    alone = one_row_at_a_time(call, max(row_counts))
    for rows in row_counts:
        assert_same_bits(bits(call(0, rows)), alone[:rows], f"{operator} {dtype}, {rows} rows")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_beyond_num_rows_are_unchanged(dtype: str) -> None:
    x, out = random_rows(9, 64, dtype, 1), paddle.full([9, 64], 7.0, dtype)
    linear(x, pack_linear(random_rows(64, 64, dtype, 2)), out, 5)
    assert (out[5:].astype("float32").numpy() == 7.0).all()
    assert (out[:5].astype("float32").numpy() != 7.0).all()
