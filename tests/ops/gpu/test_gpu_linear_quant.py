# SPDX-License-Identifier: Apache-2.0
"""Quantized linear layers on an emulated GPU have the bits of custom_ops/common/quant.h, for any number of rows."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import paddle
import pytest

from fastdeploy.ops import registry
from fastdeploy.ops.backends.gpu.library import launch
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.linear import PackedLinear, WeightPiece
from fastdeploy.ops.norm import NormParams
from fastdeploy.ops.quantized_form import FORMS, QuantizedForm, form_of
from fastdeploy.ops.reference import linear as reference
from tests.ops.bits import assert_same_bits, bits
from tests.ops.coded import random_coded
from tests.ops.gpu.emulated import SEEDS, count, counts_on_device, emulate
from tests.ops.quantized import defined_outputs
from tests.ops.test_quant_definition import rows_of_many_sizes

EPS = 1e-6
EDGES = (1, 4, 5, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 128, 129)  # rows at which another kernel or tile begins
# The emulated card has four multiprocessors: from 41 outputs on large tiles are used for 193 rows of wint8 and wint4,
# from 385 outputs on for 17 rows.
MANY_OUTPUTS = 392
# Forms of coded weights: with those of FORMS, every pair of quantization, group size and minimum.
CODED = [
    *(QuantizedForm("wint8", *rest) for rest in ((64, False), (32, True), (0, True), (128, False))),
    *(QuantizedForm("w8a8", *rest) for rest in ((128, False), (32, True), (0, True), (64, True))),
    *(QuantizedForm("wint4", *rest) for rest in ((128, True), (64, False), (0, False))),
    *(QuantizedForm("w4a8", *rest) for rest in ((64, True), (128, False), (0, True))),
]
LAYERS = FORMS | {f"{f.quantization} per {f.group_size}{' min' if f.has_minimum else ''}": f for f in CODED}
KERNELS = [*FORMS, "wint8 per 32 min", "wint8 per 128", "w8a8 per 32 min"]  # every branch of every kernel
SHAPES = [(16, 8), (40, 136), (70, 1032), (1, 64), (33, 392), (64, 512)]


@lru_cache(maxsize=64)
def pack(name: str, n: int, k: int, is_gated: bool = False) -> tuple[PackedLinear, PackedLinear]:
    """Return a layer with a bias as the CPU and as the GPU packs it."""
    rows = 2 * n if is_gated else n
    bias = random_rows(1, rows, "bfloat16", 2)[0]
    if name in FORMS:
        weight = random_rows(rows, k, "bfloat16", 1, k**-0.5)
        return (
            registry.lookup("cpu")("pack_linear")(weight, bias, name, is_gated),
            emulate()("pack_linear")(weight, bias, name, is_gated),
        )
    form = LAYERS[name]
    piece = random_coded(rows, k, form.weight_bits, form.group_size, form.has_minimum, seed=k)
    return (
        registry.lookup("cpu")("pack_linear")([piece], bias, form.quantization, is_gated),
        emulate()("pack_linear")([piece], bias, form.quantization, is_gated),
    )


def run(
    x: paddle.Tensor,
    w: PackedLinear,
    out_dtype: str = "float32",
    residual: paddle.Tensor | None = None,
    norm: NormParams | None = None,
    seed: int = 0,
    has_checks: bool = True,
) -> paddle.Tensor:
    """Return the outputs of one call; memory beyond its rows holds NaN before and after it."""
    rows = x.shape[0]
    padded = paddle.concat([x, paddle.full([3, x.shape[1]], float("nan"), "bfloat16")])
    out = paddle.full([rows + 3, w.out_features], float("nan"), out_dtype)
    emulate(seed, has_checks)("linear")(padded, w, out, rows, residual, norm)
    assert np.isnan(out[rows:].astype("float32").numpy()).all()
    return out[:rows]


def one_by_one(x: paddle.Tensor, w: PackedLinear, rows: Iterable[int], norm: NormParams | None) -> np.ndarray:
    return np.concatenate([bits(run(x[row : row + 1], w, norm=norm)) for row in rows])


@pytest.mark.parametrize(
    ("name", "case"), [(name, i) for i, name in enumerate(LAYERS)] + [(name, i + 3) for i, name in enumerate(KERNELS)]
)
def test_gpu_quantized_linear_has_the_bits_of_the_definition(name: str, case: int) -> None:
    n, k = SHAPES[case % len(SHAPES)]
    defined, packed = pack(name, n, k)
    few, many = ((3, 20), (7, 37), (12, 18))[case % 3]
    assert form_of(packed) == LAYERS[name]
    for rows, out_dtype in ((few, "bfloat16"), (many, "float32")):
        x, residual = rows_of_many_sizes(rows, k), random_rows(rows, n, out_dtype, 4)
        want = bits(defined_outputs(x, defined, out_dtype, residual))
        assert_same_bits(bits(run(x, packed, out_dtype, residual)), want, f"{rows} rows")


@pytest.mark.parametrize("name", KERNELS)
def test_gpu_quantized_linear_has_them_for_every_number_of_rows(name: str) -> None:
    defined, packed = pack(name, 41, 264)
    x = rows_of_many_sizes(200, 264)
    want = bits(defined_outputs(x, defined, "float32"))
    first = KERNELS.index(name) % 3 + 1
    for rows in sorted({*range(first, 21, 3), *EDGES, 192, 193}):
        assert_same_bits(bits(run(x[:rows], packed, has_checks=rows < 34)), want[:rows], f"{rows} rows")


@pytest.mark.parametrize("name", KERNELS)
def test_gpu_quantized_linear_has_them_in_large_tiles_and_in_any_order(name: str) -> None:
    defined, packed = pack(name, MANY_OUTPUTS, 264)
    x = rows_of_many_sizes(20, 264)[:17]
    want = bits(defined_outputs(x, defined, "float32"))
    first = KERNELS.index(name)
    for rows, seed in ((2, first), (17, first + 1), (17, first + 2)):
        seed %= len(SEEDS)
        assert_same_bits(bits(run(x[:rows], packed, seed=seed)), want[:rows], f"{rows} rows, seed {seed}")


@pytest.mark.parametrize("name", ["wint8", "wint4", "w8a8", "w4a8", "wint8 per 64"])
def test_gpu_quantized_linear_of_504_rows(name: str) -> None:
    defined, packed = pack(name, 560, 264)
    x, residual = random_rows(504, 264, "bfloat16", 3), random_rows(504, 560, "bfloat16", 4)
    want = bits(defined_outputs(x, defined, "bfloat16", residual))
    assert_same_bits(bits(run(x, packed, "bfloat16", residual, has_checks=False)), want, "504 rows")


@pytest.mark.parametrize("name", ["w8a8", "w4a8", "w4a8_min"])
def test_gpu_inputs_that_meet_no_weights_do_not_change_the_codes_of_other_inputs(name: str) -> None:
    n, k, piece = 40, 136, slice(64, 96)
    weight = random_rows(n, k, "bfloat16", 1, k**-0.5)
    weight[:, piece] = 0.0
    packed = emulate()("pack_linear")(weight, None, name)
    for rows in (3, 16, 20):
        x = random_rows(rows, k, "bfloat16", 3)
        want = bits(run(x, packed))
        x[:, 70] = 1000.0
        assert_same_bits(bits(run(x, packed)), want, f"{rows} rows")


@pytest.mark.parametrize(("quantization", "n"), [(name, 24 + 13 * (i % 2)) for i, name in enumerate(FORMS)])
def test_gpu_quantized_linear_with_norm_and_gate_is_close_to_the_reference(quantization: str, n: int) -> None:
    k, rows = 200, 35
    weight, bias = random_rows(2 * n, k, "bfloat16", 1, k**-0.5), random_rows(1, 2 * n, "bfloat16", 2)[0]
    norm = NormParams(random_rows(1, k, "bfloat16", 5)[0], EPS)
    x, residual = random_rows(rows, k, "bfloat16", 3, 2.0), random_rows(rows, n, "bfloat16", 4)
    want = paddle.zeros([rows, n], "bfloat16")
    reference.linear(x, reference.pack_linear(weight, bias, quantization, True), want, rows, residual, norm)
    packed = emulate()("pack_linear")(weight, bias, quantization, True)
    for count_ in (5, rows):
        got = run(x[:count_], packed, "bfloat16", residual[:count_], norm).astype("float32").numpy()
        expected = want[:count_].astype("float32").numpy()
        assert (np.abs(got - expected) <= 8e-3 * (1 + np.abs(expected))).all()


@pytest.mark.parametrize(("name", "is_gated"), [(name, i % 3 > 0) for i, name in enumerate(KERNELS)])
def test_gpu_quantized_linear_gives_a_normed_row_the_same_bits_alone(name: str, is_gated: bool) -> None:
    _, packed = pack(name, 40, 264, is_gated)
    x, norm = random_rows(40, 264, "bfloat16", 3), NormParams(random_rows(1, 264, "bfloat16", 5)[0], EPS)
    out = bits(run(x, packed, norm=norm))
    assert_same_bits(one_by_one(x, packed, range(0, 40, 13), norm), out[::13], "rows alone")
    for rows in (4, 9, 16, 33):
        assert_same_bits(bits(run(x[:rows], packed, norm=norm)), out[:rows], f"{rows} rows")
    normed = paddle.zeros_like(x)
    emulate()("rms_norm")(x, norm.weight, normed, 40, EPS)
    assert_same_bits(bits(run(normed, packed)), out, "rows normed before")


@pytest.mark.parametrize(("name", "rows"), [(name, 7 + 33 * (i % 2)) for i, name in enumerate(KERNELS)])
def test_gpu_quantized_linear_of_rows_with_nan_or_infinity_is_nan(name: str, rows: int) -> None:
    defined, packed = pack(name, 40, 136)
    x = random_rows(rows, 136, "bfloat16", 3)
    want = bits(defined_outputs(x, defined, "float32"))
    x[1, 7], x[2, 135], x[4, 0] = float("nan"), float("-inf"), float("inf")
    out = run(x, packed)
    broken = np.isin(np.arange(rows), (1, 2, 4))
    assert np.isnan(out.numpy()[broken]).all()
    assert_same_bits(bits(out)[~broken], want[~broken], "other rows")


@pytest.mark.parametrize("quantization", FORMS)
def test_gpu_quantized_linear_reads_the_number_of_rows_from_the_device(quantization: str) -> None:
    defined, packed = pack(quantization, 40, 136)
    x = random_rows(40, 136, "bfloat16", 3)
    want = bits(defined_outputs(x, defined, "float32"))
    for rows, captured in ((0, 16), (3, 16), (2, 40), (35, 40)):
        out = paddle.full([40, 40], float("nan"), "float32")
        linear = emulate(rows)("linear")
        with counts_on_device(rows, 1):
            linear(x, packed, out, captured)
        assert_same_bits(bits(out)[:rows], want[:rows], f"{rows} of {captured} rows")
        assert np.isnan(out.numpy()[rows:]).all()


@pytest.mark.parametrize(("quantization", "rows"), [(name, 2 + 16 * (i % 2)) for i, name in enumerate(FORMS)])
def test_gpu_quantized_linear_may_overwrite_its_inputs_and_its_residual(quantization: str, rows: int) -> None:
    _, packed = pack(quantization, 72, 72)
    x = random_rows(rows, 72, "bfloat16", 3)
    want = bits(run(x, packed, "bfloat16", x))
    emulate(1)("linear")(x, packed, x, rows, x)
    assert_same_bits(bits(x), want, "in place")


@pytest.mark.parametrize("quantization", FORMS)
def test_gpu_first_outputs_of_a_quantized_layer(quantization: str) -> None:
    weight, x = random_rows(200, 136, "bfloat16", 1), random_rows(3, 136, "bfloat16", 3)
    packed = emulate()("pack_linear")(weight, None, quantization)
    first = emulate()("first_outputs")(packed, 64)
    assert first.num_bytes < packed.num_bytes
    assert_same_bits(bits(run(x, first)), bits(run(x, packed))[:, :64], quantization)


@pytest.mark.parametrize("quantization", FORMS)
@pytest.mark.parametrize("is_gated", [False, True])
def test_gpu_packs_transposed_pieces_as_one_matrix(quantization: str, is_gated: bool) -> None:
    weight = random_rows(80, 136, "bfloat16", 1)
    pieces = [WeightPiece(weight.t().contiguous(), begin, end, True) for begin, end in ((0, 24), (24, 80))]
    packed, expected = (emulate()("pack_linear")(w, None, quantization, is_gated) for w in (pieces, weight))
    assert (packed.data.numpy() == expected.data.numpy()).all()


@pytest.mark.parametrize("name", [*FORMS, "wint8 per 32 min", "w8a8 per 64 min"])
@pytest.mark.parametrize("rows", [1, 8, 16, 40])
def test_gpu_quantized_linear_reads_the_weight_once_for_up_to_16_rows(name: str, rows: int) -> None:
    n, k = 96, 1024
    form, (_, packed) = LAYERS[name], pack(name, n, k)
    x, out = random_rows(rows, k, "bfloat16", 3), paddle.zeros([rows, n], "bfloat16")
    linear = emulate()("linear")
    counted = count(lambda: linear(x, packed, out, rows))
    assert counted["launches"] == 2
    used = counted["global_read_bytes"] + counted["global_written_bytes"]
    assert used >= 0.9 * 32 * (counted["read_sectors"] + counted["written_sectors"])
    assert counted["matrix_wavefronts"] <= 1.1 * counted["least_matrix_wavefronts"]
    if rows > 16:
        return
    codes, values = rows * k * form.row_bits // 8, rows * k // 32 * 4  # bytes; values of pieces
    values *= (form.row_bits == 8) + form.has_minimum
    num_blocks, num_passes = n // 32, 2 if form.row_bits == 16 else 1  # over the inputs
    once = packed.data.shape[0] + num_passes * 2 * rows * k + num_blocks * (codes + values)  # each block reads the rows
    epilogue = (
        8 * rows * n + num_blocks * 128 * 4 * 4
    )  # bias and factors, of which each of 128 threads takes up to four
    assert once <= counted["global_read_bytes"] <= once + epilogue


@pytest.mark.parametrize(
    ("n", "k", "dtype", "message"),
    [
        (16, 12, "bfloat16", "weight: expected a multiple of 8 inputs, got 12"),
        (1, 65544, "bfloat16", "weight: expected at most 65536 inputs, got 65544"),
        (16, 64, "float32", "weight: expected bfloat16, got float32"),
    ],
)
def test_gpu_pack_linear_refuses(n: int, k: int, dtype: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"pack_linear: {message}"):
        emulate()("pack_linear")(random_rows(n, k, dtype, 1), None, "wint4")


def test_gpu_pack_linear_refuses_weights_that_are_not_finite() -> None:
    weight = random_rows(16, 64, "bfloat16", 1)
    weight[3, 5] = float("inf")
    with pytest.raises(ValueError, match="pack_linear: weight: expected finite values"):
        emulate()("pack_linear")(weight, None, "w4a8")


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ((4, 0, 0), "quantization: expected 0 to 3, got 4"),
        ((0, 48, 0), "group_size: expected 0, 32, 64 or 128, got 48"),
        ((1, 32, 2), "has_minimum: expected 0, or 1 and memory for the sums of codes, got 2"),
        ((1, 32, 1), "has_minimum: expected 0, or 1 and memory for the sums of codes, got 1"),
    ],
)
def test_gpu_linear_refuses_forms_that_no_weight_has(form: tuple[int, int, int], message: str) -> None:
    emulate()
    with pytest.raises(ValueError, match=f"linear: {message}"):
        launch("fd_linear_quantized", *[None] * 10, 1, 16, 8, 0, 0, *form, 4, 0.0)
