# SPDX-License-Identifier: Apache-2.0
"""Rows copied by index on an emulated GPU: the right rows and no others, in whole sectors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import paddle
import pytest

from fastdeploy.ops.coded_piece import CodedPiece, decode
from fastdeploy.ops.examples import CODED_FORMS, random_codes, random_rows
from fastdeploy.ops.quantized_form import QuantizedForm
from tests.ops.bits import assert_same_bits, bits
from tests.ops.gpu.emulated import SEEDS, count, counts_on_device, emulate

SECTOR = 32  # bytes
GATHERS = {  # operator name: its arguments from (rows, ids, out, num_rows)
    "embedding": lambda table, ids, out, num_rows: (ids, table, out, num_rows),
    "gather_rows": lambda x, ids, out, num_rows: (x, ids, out, num_rows),
}


def ids_of(values: np.ndarray, capacity: int) -> paddle.Tensor:
    """Return indices of which those that are not used are far outside of every array."""
    ids = np.full(capacity, 2**31 - 1, np.int32)
    ids[: len(values)] = values
    return paddle.to_tensor(ids)


@pytest.mark.parametrize("operator", GATHERS)
@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 8), ("bfloat16", 264), ("float32", 4), ("float32", 1024)])
def test_gpu_gathers_copy_their_rows_only(operator: str, dtype: str, size: int) -> None:
    source = random_rows(37, size, dtype, 1)
    rng = np.random.default_rng(size)
    for num_rows in range(21):
        chosen = rng.integers(0, 37, num_rows)
        out = paddle.full([22, size], 7.0, dtype)
        kernel = emulate(SEEDS[num_rows % 4])(operator)
        kernel(*GATHERS[operator](source, ids_of(chosen, 22), out, num_rows))
        assert_same_bits(bits(out)[:num_rows], bits(source)[chosen], "copied rows")
        assert (out[num_rows:] == 7.0).all()


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 8), ("float32", 260)])
def test_gpu_scatter_copies_its_rows_only(dtype: str, size: int) -> None:
    source = random_rows(22, size, dtype, 1)
    rng = np.random.default_rng(size)
    for num_rows in range(21):
        chosen = rng.permutation(37)[:num_rows]
        out = paddle.full([37, size], 7.0, dtype)
        emulate(SEEDS[num_rows % 4])("scatter_rows")(source, ids_of(chosen, 22), out, num_rows)
        assert_same_bits(bits(out)[chosen], bits(source)[:num_rows], "copied rows")
        assert (out.astype("float32").numpy()[np.setdiff1d(np.arange(37), chosen)] == 7.0).all()


@pytest.mark.parametrize("operator", [*GATHERS, "scatter_rows"])
def test_gpu_copies_of_rows_read_their_number_from_the_device(operator: str) -> None:
    source, out = random_rows(9, 64, "bfloat16", 1), paddle.full([9, 64], 7.0, "bfloat16")
    order = GATHERS.get(operator, GATHERS["gather_rows"])
    kernel = emulate()(operator)
    with counts_on_device(3, 1):
        kernel(*order(source, ids_of(np.arange(3), 8), out, 8))
    assert_same_bits(bits(out)[:3], bits(source)[:3], "copied rows")
    assert (out[3:] == 7.0).all()


@pytest.mark.parametrize("hidden", [8, 64, 200])
def test_gpu_embedding_of_a_packed_weight_copies_its_rows_only(hidden: int) -> None:
    weight, find = random_rows(37, hidden, "bfloat16", 1), emulate()
    table, rng = find("pack_linear")(weight), np.random.default_rng(hidden)
    for num_rows in range(21):
        chosen = rng.integers(0, 37, num_rows)
        out = paddle.full([22, hidden], 7.0, "bfloat16")
        emulate(SEEDS[num_rows % 4])("packed_embedding")(ids_of(chosen, 22), table, out, num_rows)
        assert_same_bits(bits(out)[:num_rows], bits(weight)[chosen], "copied rows")
        assert (out[num_rows:] == 7.0).all()


def test_gpu_embedding_of_a_packed_weight_refuses_gated_layers_and_other_dtypes() -> None:
    find, ids, out = emulate(), ids_of(np.arange(3), 4), paddle.zeros([4, 64], "bfloat16")
    gated = find("pack_linear")(random_rows(32, 64, "bfloat16", 1), is_gated=True)
    with pytest.raises(ValueError, match="packed_embedding: table: expected one row for each output, got a gated"):
        find("packed_embedding")(ids, gated, out, 3)
    table = find("pack_linear")(random_rows(32, 64, "bfloat16", 1))
    with pytest.raises(ValueError, match="packed_embedding: out: expected bfloat16, got float32"):
        find("packed_embedding")(ids, table, out.astype("float32"), 3)


@pytest.mark.parametrize("form", CODED_FORMS)
def test_gpu_embedding_of_a_quantized_weight_has_the_bits_of_its_decoded_rows(form: QuantizedForm) -> None:
    for hidden in (8, 200):
        piece = random_codes(37, hidden, form, hidden)
        table = emulate()("pack_linear")([piece], None, form.quantization)
        expected, rng = bits(decode(piece).astype("bfloat16")), np.random.default_rng(hidden)
        for num_rows in (0, 1, 7, 20):
            chosen = rng.integers(0, 37, num_rows)
            out = paddle.full([22, hidden], 7.0, "bfloat16")
            emulate(SEEDS[num_rows % 4])("packed_embedding")(ids_of(chosen, 22), table, out, num_rows)
            assert_same_bits(bits(out)[:num_rows], expected[chosen], f"{form} {hidden}")
            assert (out[num_rows:] == 7.0).all()


@pytest.mark.parametrize("form", [QuantizedForm("wint8", 32, True), QuantizedForm("wint4", 128)])
def test_gpu_embedding_of_a_wide_quantized_weight_reads_few_sectors_that_it_does_not_use(form: QuantizedForm) -> None:
    hidden, chosen = 2560, np.array([16, 0, 5, 15])
    piece = random_codes(17, hidden, form, 3)
    table = emulate()("pack_linear")([piece], None, form.quantization)
    out = paddle.zeros([4, hidden], "bfloat16")
    kernel = emulate()("packed_embedding")
    counted = count(lambda: kernel(ids_of(chosen, 4), table, out, 4))
    assert_same_bits(bits(out), bits(decode(piece).astype("bfloat16"))[chosen], f"{form}")
    codes = hidden * form.weight_bits // 8 // SECTOR
    groups = form.num_groups(hidden) * (2 if form.has_minimum else 1)  # each in a sector of its own
    assert counted["launches"] == 1
    # Each of eight warps reads the id and the factor of its row.
    assert 4 * (codes + groups + 2 * 8) / counted["read_sectors"] >= 0.90
    assert 4 * 2 * hidden / (SECTOR * counted["written_sectors"]) >= 0.90


def test_gpu_embedding_of_a_quantized_weight_reads_the_number_of_rows_from_the_device() -> None:
    piece = random_codes(37, 64, QuantizedForm("w8a8", 32), 1)
    table, out = emulate()("pack_linear")([piece], None, "w8a8"), paddle.full([9, 64], 7.0, "bfloat16")
    with counts_on_device(3, 1):
        emulate()("packed_embedding")(ids_of(np.arange(3), 9), table, out, 8)
    assert_same_bits(bits(out)[:3], bits(decode(piece).astype("bfloat16"))[:3], "copied rows")
    assert (out[3:] == 7.0).all()


def test_gpu_embedding_of_a_quantized_weight_keeps_subnormal_numbers() -> None:
    scales = paddle.to_tensor(np.array([[2.0**-133], [-(2.0**-134)]], np.float32))
    codes = paddle.to_tensor(np.array([[1, -3, 127, 0], [1, 3, 0, -2]] * 2, np.int8).reshape(2, 8))
    table = emulate()("pack_linear")([CodedPiece(codes, scales)], None, "wint8")
    out = paddle.zeros([2, 8], "bfloat16")
    emulate()("packed_embedding")(ids_of(np.arange(2), 2), table, out, 2)
    assert_same_bits(bits(out), bits(decode(CodedPiece(codes, scales)).astype("bfloat16")), "rows")
    assert bits(out).view(np.uint16)[0, :2].tolist() == [0x0001, 0x8003]


def test_gpu_embedding_of_a_quantized_weight_refuses_what_does_not_fit() -> None:
    find, ids, out = emulate(), ids_of(np.arange(3), 4), paddle.zeros([4, 64], "bfloat16")
    table = find("pack_linear")(random_rows(32, 64, "bfloat16", 1), None, "wint4")
    with pytest.raises(ValueError, match="packed_embedding: out: expected bfloat16, got float32"):
        find("packed_embedding")(ids, table, out.astype("float32"), 3)
    with pytest.raises(ValueError, match=r"packed_embedding: out: expected \[. or more, 64\], got \[4, 72\]"):
        find("packed_embedding")(ids, table, paddle.zeros([4, 72], "bfloat16"), 3)
    with pytest.raises(ValueError, match="packed_embedding: table: expected one row for each output, got a gated"):
        find("packed_embedding")(ids, replace(table, is_gated=True), out, 3)


def test_gpu_embedding_of_504_rows_of_a_large_table() -> None:
    table = random_rows(20000, 128, "bfloat16", 1)
    chosen = np.random.default_rng(2).integers(0, 20000, 504)
    chosen[:2] = 0, 19999
    out = paddle.full([504, 128], 7.0, "bfloat16")
    emulate(has_checks=False)("embedding")(ids_of(chosen, 504), table, out, 504)
    assert_same_bits(bits(out), bits(table)[chosen], "copied rows")


@pytest.mark.parametrize("operator", [*GATHERS, "scatter_rows"])
@pytest.mark.parametrize("size", [512, 2048, 5120])
def test_gpu_copies_of_rows_touch_few_sectors_that_they_do_not_use(operator: str, size: int) -> None:
    source, out = random_rows(9, size, "bfloat16", 1), paddle.zeros([9, size], "bfloat16")
    arguments = GATHERS.get(operator, GATHERS["gather_rows"])(source, ids_of(np.array([8, 0, 4, 1]), 9), out, 4)
    kernel = emulate()(operator)
    counted = count(lambda: kernel(*arguments))
    assert counted["launches"] == 1
    assert 4 * 2 * size / (SECTOR * counted["read_sectors"]) >= 0.90
    assert 4 * 2 * size / (SECTOR * counted["written_sectors"]) >= 0.90


@pytest.mark.parametrize("operator", [*GATHERS, "scatter_rows"])
def test_gpu_copies_of_rows_refuse_what_they_cannot_copy(operator: str) -> None:
    order = GATHERS.get(operator, GATHERS["gather_rows"])
    kernel, x, ids = emulate()(operator), random_rows(9, 64, "bfloat16", 1), ids_of(np.arange(3), 4)
    with pytest.raises(ValueError, match=f"{operator}: row_bytes: expected a multiple of 16 bytes, got 24"):
        kernel(*order(random_rows(9, 12, "bfloat16", 1), ids, paddle.zeros([4, 12], "bfloat16"), 3))
    with pytest.raises(ValueError, match=f"{operator}: out: expected bfloat16, got float32"):
        kernel(*order(x, ids, paddle.zeros([4, 64], "float32"), 3))
    with pytest.raises(ValueError, match=f"{operator}: .*: expected int32, got int64"):
        kernel(*order(x, ids.astype("int64"), paddle.zeros([4, 64], "bfloat16"), 3))
    with pytest.raises(ValueError, match=rf"{operator}: .*: expected \[5 or more\], got \[4\]"):
        kernel(*order(x, ids, paddle.zeros([9, 64], "bfloat16"), 5))
    with pytest.raises(ValueError, match=rf"{operator}: out: expected \[. or more, 64\], got \[4, 72\]"):
        kernel(*order(x, ids, paddle.zeros([4, 72], "bfloat16"), 3))
