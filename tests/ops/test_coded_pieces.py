# SPDX-License-Identifier: Apache-2.0
"""Weights that are quantized already keep every code, and are multiplied as custom_ops/common/quant.h defines it."""

from dataclasses import replace

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from fastdeploy.ops.backends.cpu import library
from fastdeploy.ops.backends.cpu import linear as cpu_linear
from fastdeploy.ops.coded_piece import CodedPiece, StoredCodes, decode
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.experts import pack_experts
from fastdeploy.ops.linear import PackedLinear, linear, pack_linear
from fastdeploy.ops.quantized_form import QUANTIZATIONS, QuantizedForm, form_of
from tests.ops.bits import assert_same_bits, bits
from tests.ops.coded import random_coded
from tests.ops.quantized import defined_outputs, stored_codes

SIZES = [(40, 5), (33, 33), (48, 133), (21, 576), (16, 1536)]
FORMS = [  # each size of groups with and without minimums, each format of rows
    (quantization, group_size, has_minimum)
    for index, group_size in enumerate((0, 32, 64, 128))
    for minimum_index, has_minimum in enumerate((False, True))
    for quantization in (QUANTIZATIONS if group_size == 32 else QUANTIZATIONS[(index + minimum_index) % 2 :: 2])
]


def bits_of(quantization: str) -> int:
    """Return the bits of the codes of a format."""
    return QuantizedForm(quantization).weight_bits


def one_hot_outputs(w: PackedLinear) -> NDArray[np.float32]:
    """Return the weights [n, k] as the kernel multiplies them by rows of a single 1."""
    out = paddle.zeros([w.in_features, w.out_features])
    linear(paddle.eye(w.in_features).astype("bfloat16"), w, out, w.in_features)
    return np.asarray(out.numpy().T)


@pytest.mark.parametrize(("quantization", "group_size", "has_minimum"), FORMS)
@pytest.mark.parametrize("size", range(len(SIZES)))
def test_codes_are_kept_and_multiplied_as_defined(
    quantization: str, group_size: int, has_minimum: bool, size: int
) -> None:
    n, k = SIZES[size]
    piece = random_coded(n, k, bits_of(quantization), group_size, has_minimum, seed=size)
    weight = pack_linear([piece], random_rows(1, n, "bfloat16", 2).reshape([-1]), quantization)
    assert form_of(weight) == QuantizedForm(quantization, group_size, has_minimum)
    assert np.array_equal(stored_codes(weight), piece.codes.numpy())
    if library.isa() == "portable":
        return  # rounds products
    if library.isa().startswith("avx512") and form_of(weight) == QuantizedForm("wint8") and k > 256:
        return  # sums longer pieces
    for rows in (1, 3, 13, 20):
        x, out = random_rows(rows, k, "bfloat16", 3), paddle.zeros([rows, n])
        linear(x, weight, out, rows)
        assert_same_bits(bits(out), bits(defined_outputs(x, weight, "float32")), f"{quantization} {n}x{k}, {rows} rows")


@pytest.mark.parametrize("quantization", ["wint8", "wint4"])
@pytest.mark.parametrize("has_minimum", [False, True])
@pytest.mark.parametrize("group_size", [0, 64])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_weight_is_code_times_scale_plus_minimum(
    quantization: str, has_minimum: bool, group_size: int, dtype: str
) -> None:
    piece = random_coded(24, 133, bits_of(quantization), group_size, has_minimum, 5, dtype)
    expected = decode(piece).numpy()
    found = one_hot_outputs(pack_linear([piece], None, quantization))
    assert np.allclose(found, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    if dtype == "float16":
        values = np.repeat(piece.scales.numpy().astype(np.float32), group_size or 133, axis=1)[:, :133]
        exact = piece.codes.numpy() * values.astype(np.float64)
        if piece.minimums is not None:
            exact = exact + np.repeat(piece.minimums.numpy().astype(np.float64), group_size or 133, axis=1)[:, :133]
        assert np.allclose(expected, exact, rtol=1e-6, atol=1e-6)


def test_scales_of_float32_are_rounded_relative_to_the_largest_of_their_output() -> None:
    piece = random_coded(24, 96, 4, 32, False, 5)
    scales = piece.scales.astype("float32") * 2.0**-30
    exact = decode(piece).numpy() * 2.0**-30
    found = one_hot_outputs(pack_linear([replace(piece, scales=scales)], None, "wint4"))
    assert np.allclose(found, exact, rtol=2.0**-11, atol=2.0**-24 * np.abs(exact).max())


@pytest.mark.parametrize("quantization", ["wint8", "w8a8"])
def test_pieces_of_several_kinds_form_one_weight(quantization: str) -> None:
    pieces = [
        random_coded(24, 160, 4, 128, False, 1),
        random_coded(7, 160, 8, 64, True, 2),
        random_coded(1, 160, 8, 0, False, 3, "float32"),
        random_coded(32, 160, 4, 32, True, 4),
    ]
    weight = pack_linear(pieces, None, quantization, is_gated=True)
    assert form_of(weight) == QuantizedForm(quantization, 32, has_minimum=True)
    codes = [piece.codes.numpy().astype(int) + (0 if piece.minimums is not None else 128) for piece in pieces]
    assert np.array_equal(stored_codes(weight), np.concatenate(codes))
    ungated = pack_linear(pieces, None, quantization)
    expected = np.concatenate([decode(piece).numpy() for piece in pieces])
    codes_of_no_minimum = np.abs(expected).max(axis=1, keepdims=True) + 128 * np.abs(expected).max()
    assert (np.abs(one_hot_outputs(ungated) - expected) <= 2e-7 * codes_of_no_minimum).all()


def stored(piece: CodedPiece, ranges: list[tuple[int, int]]) -> StoredCodes:
    """Return codes that are read as a file's are, and append to `ranges` which outputs are read."""

    def read(begin: int, end: int) -> CodedPiece:
        ranges.append((begin, end))
        return replace(piece, factors=None).outputs(begin, end)

    return StoredCodes(*piece.codes.shape, piece.group_size, piece.has_minimum, read, piece.factors)


@pytest.mark.parametrize("is_gated", [False, True])
def test_stored_codes_are_read_some_panels_at_a_time_and_packed_as_if_at_once(
    is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors = paddle.to_tensor(2.0 ** np.arange(-5, 10, dtype=np.float32))
    pieces = [
        random_coded(70, 160, 8, 64, True, 1),
        replace(random_coded(15, 160, 4, 32, False, 2), factors=factors),
        random_coded(45, 160, 8, 128, True, 3),
    ]
    expected = pack_linear(pieces, None, "wint8", is_gated).data.numpy()
    monkeypatch.setattr(cpu_linear, "_CODES_AT_ONCE", 160 * 33)
    assert np.array_equal(pack_linear(pieces, None, "wint8", is_gated).data.numpy(), expected)
    ranges: list[tuple[int, int]] = []
    packed = pack_linear([stored(piece, ranges) for piece in pieces], None, "wint8", is_gated)
    assert np.array_equal(packed.data.numpy(), expected)
    assert sum(end - begin for begin, end in ranges) == 130
    assert max(end - begin for begin, end in ranges) == (16 if is_gated else 32)


def test_stored_codes_have_the_values_and_the_inputs_of_their_pieces() -> None:
    piece = replace(random_coded(20, 192, 8, 64, True, 1), factors=paddle.full([20], 0.25))
    file = stored(piece, [])
    assert np.array_equal(decode(file).numpy(), decode(piece).numpy())
    halves = pack_linear([file.inputs(64, 192)], None, "wint8"), pack_linear([piece.inputs(64, 192)], None, "wint8")
    assert halves[0].in_features == 128
    assert np.array_equal(halves[0].data.numpy(), halves[1].data.numpy())


def test_stored_codes_that_do_not_fit_are_refused() -> None:
    file = stored(GOOD, [])
    with pytest.raises(ValueError, match="group_size: expected one of"):
        pack_linear([replace(file, group_size=48)], None, "wint8")
    with pytest.raises(ValueError, match=r"codes: expected \[outputs, 64\], got \[16, 65\]"):
        pack_linear([file, replace(file, num_inputs=65)], None, "wint8")
    with pytest.raises(ValueError, match="codes: expected dtype uint8, got int8"):
        pack_linear(
            [replace(file, read=stored(replace(GOOD, codes=GOOD.codes.astype("int8")), []).read)], None, "wint8"
        )


def test_experts_are_packed_from_codes_one_after_the_other() -> None:
    pieces = [[random_coded(48, 64, 4, 64, True, seed)] for seed in range(3)]
    packed = pack_experts(pieces, "w4a8")
    each = [pack_linear(expert, None, "w4a8").data.numpy() for expert in pieces]
    assert np.array_equal(packed.data.numpy(), np.concatenate(each))
    assert form_of(packed) == QuantizedForm("w4a8", 64, has_minimum=True)
    with pytest.raises(ValueError, match="expected experts of"):
        pack_experts([*pieces, [random_coded(48, 64, 4, 32, True, 9)]], "w4a8")


GOOD = random_coded(16, 64, 8, 32, True, 1)
ONE_SCALE = random_coded(16, 64, 8, 0, False, 1)


@pytest.mark.parametrize(
    ("piece", "quantization", "message"),
    [
        (replace(GOOD, scales=GOOD.scales * float("inf")), "wint8", "scales: expected finite values"),
        (replace(GOOD, minimums=GOOD.minimums * float("nan")), "wint8", "scales: expected finite values"),
        (replace(ONE_SCALE, scales=ONE_SCALE.scales * float("nan")), "wint8", "scales: expected finite values"),
        (replace(ONE_SCALE, scales=ONE_SCALE.scales * float("inf")), "w8a8", "scales: expected finite values"),
        (GOOD, "wint4", "codes: expected codes of four bits"),
        (random_coded(16, 64, 8, 32, False, 1), "w4a8", "codes: expected codes of four bits"),
        (replace(GOOD, group_size=48), "wint8", "group_size: expected one of"),
        (replace(GOOD, group_size=64), "wint8", "scales: expected float16 or float32 of"),
        (replace(GOOD, minimums=None), "wint8", "codes: expected paddle.int8 of"),
        (replace(GOOD, minimums=GOOD.minimums.astype("float32")), "wint8", "minimums: expected paddle.float16"),
        (GOOD, "none", "quantization: expected one of"),
        (GOOD, "wint4_min", "quantization: expected one of"),
    ],
)
def test_codes_that_do_not_fit_are_refused(piece: CodedPiece, quantization: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_linear([piece], None, quantization)


def test_a_scale_without_room_for_its_minimum_is_refused() -> None:
    large = replace(random_coded(16, 64, 8, 32, False, 1), scales=paddle.full([16, 2], 1000.0, "float16"))
    with pytest.raises(ValueError, match="scales: expected finite values"):
        pack_linear([large, GOOD], None, "wint8")


@pytest.mark.parametrize("is_stored", [True, False])
def test_factors_of_an_output_multiply(is_stored: bool) -> None:
    piece = random_coded(24, 64, 8, 0, True, 3).scaled(paddle.linspace(0.1, 3.0, 24))
    codes = StoredCodes(24, 64, 0, True, piece.outputs) if is_stored else piece
    power = 2.0 ** paddle.arange(-12, 12).astype("float32")
    for scaled, expected in ((codes.scaled(power), power), (codes.scaled(power).scaled(power), power * power)):
        values = decode(piece).numpy() * expected.numpy()[:, None]
        np.testing.assert_array_equal(decode(scaled).numpy(), values)
        np.testing.assert_array_equal(decode(scaled.outputs(5, 9)).numpy(), values[5:9])
