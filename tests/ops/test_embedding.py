# SPDX-License-Identifier: Apache-2.0
"""Rows of a packed table are the weights for which it stands, rounded to its dtype once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from fastdeploy.ops.backends.cpu.graph import OpGraph
from fastdeploy.ops.coded_piece import CodedPiece, decode
from fastdeploy.ops.embedding import packed_embedding
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.linear import PackedLinear, first_outputs, pack_linear
from fastdeploy.ops.quantized_form import FORMS, GROUP_SIZES, QUANTIZATIONS, QuantizedForm, form_of
from fastdeploy.ops.reference.quantization import dequantize_weight
from tests.ops.bits import assert_same_bits, bits
from tests.ops.coded import random_coded

SIZES = [(40, 5), (33, 33), (17, 64), (48, 133), (21, 576)]
ALL_FORMS = [
    QuantizedForm(quantization, group_size, has_minimum)
    for quantization in QUANTIZATIONS
    for group_size in GROUP_SIZES
    for has_minimum in (False, True)
]


def row_bits(table: PackedLinear) -> NDArray[np.int16]:
    """Return the bits of all rows of a quantized table, which are looked up from the last to the first."""
    vocab = table.out_features
    ids, out = paddle.arange(vocab - 1, -1, -1, dtype="int32"), paddle.full([vocab + 1, table.in_features], 7.0)
    out = out.astype("bfloat16")
    packed_embedding(ids, table, out, vocab)
    assert (out[vocab] == 7.0).all()
    found: NDArray[np.int16] = bits(out)[vocab - 1 :: -1]
    return found


def piece_in(form: QuantizedForm, n: int, k: int, seed: int, dtype: str = "float16") -> CodedPiece:
    """Return random codes that are packed in this form."""
    return random_coded(n, k, form.weight_bits, form.group_size, form.has_minimum, seed, dtype)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("size", range(len(SIZES)))
def test_rows_of_a_quantized_table_are_its_codes_times_scales_rounded_once(name: str, size: int) -> None:
    weight = random_rows(*SIZES[size], "bfloat16", 3)
    expected = dequantize_weight(weight.astype("float32"), FORMS[name]).astype("bfloat16")
    assert_same_bits(row_bits(pack_linear(weight, None, name)), bits(expected), f"{name} {SIZES[size]}")


@pytest.mark.parametrize("form", ALL_FORMS)
@pytest.mark.parametrize("size", range(len(SIZES)))
def test_rows_of_codes_are_the_decoded_weights_rounded_once(form: QuantizedForm, size: int) -> None:
    for dtype in ("float16", "float32"):
        piece = piece_in(form, *SIZES[size], seed=size, dtype=dtype)
        table = pack_linear([piece], None, form.quantization)
        assert form_of(table) == form
        assert_same_bits(row_bits(table), bits(decode(piece).astype("bfloat16")), f"{form} {SIZES[size]} {dtype}")


def test_sums_and_products_of_a_weight_are_rounded_to_float32_before_bfloat16() -> None:
    piece = CodedPiece(
        paddle.to_tensor(np.array([[255], [1], [3], [0]], np.uint8)),
        paddle.to_tensor(np.array([[2.0**-24], [1.0], [2.0**-10], [-1.0]], np.float16)),
        paddle.to_tensor(np.array([[1.0], [2.0**-8], [65504.0], [0.0]], np.float16)),
        32,
    )
    # 1 + 255 * 2^-24, 1 + 2^-8 (a tie, to even), 65504 + 3 * 2^-10, and -0 + 0.
    found = row_bits(pack_linear([piece], None, "wint8"))
    assert found[:, 0].view(np.uint16).tolist() == [0x3F80, 0x3F80, 0x4780, 0x0000]


@pytest.mark.parametrize("quantization", ["wint8", "w8a8"])
def test_weights_that_are_subnormal_in_bfloat16_are_kept(quantization: str) -> None:
    scales = paddle.to_tensor(np.array([[2.0**-133], [-(2.0**-134)], [3.0e38]], np.float32))
    codes = paddle.to_tensor(np.array([[1, -3, 127], [1, 3, 0], [1, -1, 127]], np.int8))
    found = row_bits(pack_linear([CodedPiece(codes, scales)], None, quantization))
    # 2^-133 is the smallest number. Half of it is a tie, which becomes 0; three halves become 2; a zero has a sign.
    expected = [[0x0001, 0x8003, 0x007F], [0x8000, 0x8002, 0x8000], [0x7F62, 0xFF62, 0x7F80]]
    assert found.view(np.uint16).tolist() == expected


def test_rows_of_pieces_with_and_without_a_minimum_have_the_values_of_each() -> None:
    pieces = [
        random_coded(24, 160, 4, 128, False, 1),
        random_coded(7, 160, 8, 64, True, 2),
        random_coded(1, 160, 8, 0, False, 3),
        random_coded(32, 160, 4, 32, True, 4),
    ]
    table = pack_linear(pieces, None, "wint8")
    assert form_of(table) == QuantizedForm("wint8", 32, has_minimum=True)
    expected = paddle.concat([decode(piece) for piece in pieces]).astype("bfloat16")
    found = paddle.to_tensor(row_bits(table)).view("bfloat16")
    assert (found == expected).all()


def test_any_number_of_rows_has_the_bits_of_one_row() -> None:
    table = pack_linear([random_coded(64, 576, 8, 32, False, 1)], None, "wint8")
    expected = row_bits(table)
    ids = np.random.default_rng(1).integers(0, 64, 2048).astype(np.int32)
    for num_rows in (0, 1, 56, 57, 2048):  # 64 KiB of rows are divided among threads
        out = paddle.full([2048, 576], 7.0, "bfloat16")
        packed_embedding(paddle.to_tensor(ids), table, out, num_rows)
        assert_same_bits(bits(out)[:num_rows], expected[ids[:num_rows]], f"{num_rows} rows")
        assert (out[num_rows:] == 7.0).all()


def test_the_first_outputs_of_a_head_are_the_first_rows_of_its_table() -> None:
    table = pack_linear([random_coded(144, 96, 4, 64, True, 1)], None, "w4a8")
    assert_same_bits(row_bits(first_outputs(table, 64)), row_bits(table)[:64], "rows")


def test_a_captured_lookup_is_replayed_with_new_ids_and_checks_them() -> None:
    table = pack_linear([random_coded(40, 96, 8, 32, True, 1)], None, "wint8")
    expected = row_bits(table)
    ids, out = paddle.zeros([5], "int32"), paddle.full([5, 96], 7.0, "bfloat16")
    graph = OpGraph(lambda: packed_embedding(ids, table, out, 5))
    assert graph.describe() == ["QuantizedGather"]
    ids.set_value(paddle.to_tensor(np.array([39, 0, 17, 40, -1], np.int32)))
    graph.replay(3, 0)
    assert_same_bits(bits(out)[:3], expected[[39, 0, 17]], "replayed rows")
    assert (out[3:] == 7.0).all()
    with pytest.raises(ValueError, match=r"embedding: token_ids: expected 0\.\.39, got 40 at row 3"):
        graph.replay(4, 0)


TABLE = pack_linear([random_coded(40, 33, 8, 32, False, 1)], None, "wint8")
GATED = pack_linear([random_coded(40, 33, 8, 32, False, 1)], None, "wint8", is_gated=True)


@pytest.mark.parametrize(
    ("table", "ids", "out", "message"),
    [
        (TABLE, [0, 40], ([2, 33], "bfloat16"), r"token_ids: expected 0\.\.39, got 40 at row 1"),
        (TABLE, [-1, 0], ([2, 33], "bfloat16"), r"token_ids: expected 0\.\.39, got -1 at row 0"),
        (TABLE, [0], ([2, 33], "bfloat16"), r"token_ids: expected a CPU tensor that holds \[2\], got \[1\]"),
        (TABLE, [0, 1], ([1, 33], "bfloat16"), r"out: expected a CPU tensor that holds \[2, 33\], got \[1, 33\]"),
        (TABLE, [0, 1], ([2, 40], "bfloat16"), r"out: expected a CPU tensor that holds \[2, 33\], got \[2, 40\]"),
        (TABLE, [0, 1], ([2, 33], "float32"), "out: expected dtype bfloat16, got float32"),
        (GATED, [0, 1], ([2, 33], "bfloat16"), "table: expected one row for each output, got a gated layer"),
        (replace(TABLE, out_features=56), [0, 1], ([2, 33], "bfloat16"), r"table: expected a CPU tensor of \[\d+\]"),
        (replace(TABLE, has_minimum=True), [0, 1], ([2, 33], "bfloat16"), r"table: expected a CPU tensor of \[\d+\]"),
    ],
)
def test_what_does_not_fit_is_refused(
    table: PackedLinear, ids: list[int], out: tuple[list[int], str], message: str
) -> None:
    token_ids = paddle.to_tensor(np.array(ids, np.int32))
    with pytest.raises(ValueError, match=f"embedding: {message}"):
        packed_embedding(token_ids, table, paddle.zeros(*out), 2)
