# SPDX-License-Identifier: Apache-2.0
"""Products of heads: a row has the bits of the row alone, and a head those of a linear layer with its matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import paddle
import pytest

from fastdeploy.ops.backends.cpu.graph import OpGraph
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.head_products import PackedHeads, pack_heads, project_heads
from fastdeploy.ops.linear import PackedLinear, WeightPiece, linear, pack_linear
from fastdeploy.ops.quantized_form import FORMS, form_of
from tests.ops.bits import assert_same_bits, bits
from tests.ops.coded import random_coded
from tests.ops.test_row_independence import BLOCK, INTERLEAVED, around, constant

FORMATS = [("float32", "none"), ("bfloat16", "none"), *(("bfloat16", kind) for kind in FORMS)]
SIZES = [(24, 40), (40, 20), (136, 72)]  # inputs and outputs of a head: no multiples of 32 or 16
HEADS, GAP, END = 3, 8, 5  # columns between two heads, and after the last one
ITEMS = [block * max(constant("linear_tiles.h", "kTileBlocks = ")) for block in constant("dot.h", "kColumnRows = ")]
ROWS = sorted({*range(1, 21), *around([BLOCK, INTERLEAVED, *ITEMS]), 504})


def pack(dtype: str, quantization: str, k: int, n: int) -> PackedHeads:
    """Return heads with random weights."""
    matrices = [random_rows(n, k, dtype, 10 + head, k**-0.5) for head in range(HEADS)]
    return pack_heads([[WeightPiece(matrix, 0, n)] for matrix in matrices], quantization)


def wide_rows(w: PackedHeads, num_rows: int, unread: float = float("nan")) -> paddle.Tensor:
    """Return rows whose heads are GAP columns apart; columns that no head reads hold `unread`."""
    stride = w.in_features + GAP
    x = random_rows(num_rows, HEADS * stride + END, w.dtype, 3)
    for head in range(HEADS):
        x[:, head * stride + w.in_features : (head + 1) * stride] = unread
    x[:, HEADS * stride :] = unread
    return x


def project(x: paddle.Tensor, w: PackedHeads, gap: int = GAP) -> paddle.Tensor:
    """Return the products of all rows; two more rows of both buffers hold NaN, and must keep it."""
    rows = x.shape[0]
    x = paddle.concat([x, paddle.full([2, x.shape[1]], float("nan"), x.dtype)])
    out = paddle.full([rows + 2, w.num_heads * w.out_features], float("nan"), x.dtype)
    project_heads(x, w, out, rows, w.in_features + gap if gap else None)
    assert np.isnan(wide(out[rows:])).all()
    return out[:rows]


def wide(tensor: paddle.Tensor) -> np.ndarray:
    return np.asarray(tensor.astype("float32").numpy())


def linear_of(w: PackedHeads, head: int) -> PackedLinear:
    """Return the linear layer with the packed weight of a head."""
    size = w.data.shape[0] // w.num_heads
    form = w.quantization, False, w.group_size, w.has_minimum
    data = w.data[head * size : (head + 1) * size]
    return PackedLinear(data, None, w.in_features, w.out_features, w.dtype, *form)


@pytest.mark.parametrize(("k", "n"), SIZES)
@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
def test_a_row_has_the_same_bits_for_every_number_of_rows(dtype: str, quantization: str, k: int, n: int) -> None:
    w = pack(dtype, quantization, k, n)
    x = wide_rows(w, max(ROWS))
    alone = np.concatenate([bits(project(x[row : row + 1], w)) for row in range(max(ROWS))])
    assert np.isfinite(wide(project(x, w))).all()
    for rows in ROWS:
        assert_same_bits(bits(project(x[:rows], w)), alone[:rows], f"{quantization} {dtype} {n}x{k}, {rows} rows")


@pytest.mark.parametrize(("k", "n"), [*SIZES, (300, 264)])
@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
def test_a_head_has_the_bits_of_a_linear_layer_with_its_matrix(dtype: str, quantization: str, k: int, n: int) -> None:
    w = pack(dtype, quantization, k, n)
    for rows in (1, 5, 2 * BLOCK + 1):
        x = wide_rows(w, rows)
        found = bits(project(x, w))
        for head in range(HEADS):
            slice_of_head = x[:, head * (k + GAP) : head * (k + GAP) + k].contiguous()
            want = paddle.zeros([rows, n], dtype)
            linear(slice_of_head, linear_of(w, head), want, rows)
            assert_same_bits(found[:, head * n : (head + 1) * n], bits(want), f"{quantization}, head {head}")


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
def test_heads_side_by_side_need_no_stride(dtype: str, quantization: str) -> None:
    w = pack(dtype, quantization, 40, 20)
    x = random_rows(9, HEADS * 40, dtype, 4)
    apart = paddle.zeros([9, HEADS * (40 + GAP)], dtype)
    for head in range(HEADS):
        apart[:, head * (40 + GAP) : head * (40 + GAP) + 40] = x[:, head * 40 : (head + 1) * 40]
    assert_same_bits(bits(project(x, w, gap=0)), bits(project(apart, w)), quantization)


@pytest.mark.parametrize("poison", [1000.0, float("nan"), float("inf")])
@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
def test_a_head_of_a_row_does_not_change_other_heads_and_rows(dtype: str, quantization: str, poison: float) -> None:
    w = pack(dtype, quantization, 40, 24)
    x = wide_rows(w, 9)
    want = bits(project(x, w))
    x[4, 40 + GAP : 40 + GAP + 40] *= poison
    found = project(x, w)
    same = bits(found) == want
    assert same[:, :24].all() and same[:, 48:].all() and same[[0, 1, 2, 3, 5, 6, 7, 8]].all()
    assert not same[4, 24:48].any()
    if not np.isfinite(poison):
        assert not np.isfinite(wide(found)[4, 24:48]).any()


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
def test_kv_b_proj_is_packed_from_its_own_rows(dtype: str, quantization: str) -> None:
    nope, value, latent = 24, 20, 40
    kv_b = random_rows(HEADS * (nope + value), latent, dtype, 5, latent**-0.5)
    starts = range(0, HEADS * (nope + value), nope + value)
    keys = pack_heads([[WeightPiece(kv_b[at : at + nope], 0, latent, True)] for at in starts], quantization)
    values = pack_heads([[WeightPiece(kv_b, at + nope, at + nope + value)] for at in starts], quantization)
    assert (keys.num_heads, keys.in_features, keys.out_features) == (HEADS, nope, latent)
    assert (values.num_heads, values.in_features, values.out_features) == (HEADS, latent, value)
    for packed, parts in (
        (keys, [kv_b[at : at + nope].t().contiguous() for at in starts]),
        (values, [kv_b[at + nope : at + nope + value] for at in starts]),
    ):
        for head, part in enumerate(parts):
            want = pack_linear(part, None, quantization)
            found = linear_of(packed, head)
            assert replace(found, data=want.data) == want
            assert np.array_equal(wide(found.data), wide(want.data))
    query = random_rows(6, HEADS * nope, dtype, 6)
    found, heads = wide(project(query, keys, gap=0)), wide(kv_b).reshape(HEADS, nope + value, latent)[:, :nope]
    want = np.einsum("rhi,hil->rhl", wide(query).reshape(6, HEADS, nope), heads).reshape(6, -1)
    tolerance = {"float32": 1e-5, "none": 2e-2, "wint8": 5e-2, "w8a8": 8e-2}
    np.testing.assert_allclose(found, want, atol=tolerance.get(dtype, tolerance.get(quantization, 0.5)))


def test_heads_are_packed_from_codes_as_experts_are() -> None:
    pieces = [[random_coded(48, 64, 4, 64, True, seed)] for seed in range(3)]
    packed = pack_heads(pieces, "w4a8")
    each = [pack_linear(head, None, "w4a8") for head in pieces]
    assert np.array_equal(packed.data.numpy(), np.concatenate([one.data.numpy() for one in each]))
    assert form_of(packed) == form_of(each[0])
    finer = replace(form_of(packed), group_size=32)  # type: ignore[type-var]
    assert form_of(pack_heads(pieces, "w4a8", finer)) == finer


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
def test_a_captured_launch_is_replayed_for_fewer_rows(dtype: str, quantization: str) -> None:
    w = pack(dtype, quantization, 24, 40)
    x = wide_rows(w, 9)
    found = paddle.full([9, HEADS * 40], 7.0, dtype)
    graph = OpGraph(lambda: project_heads(x, w, found, 9, 24 + GAP))
    assert graph.describe() == [f"ProjectHeads [{HEADS}, 40, 24]"] and (wide(found) == 7.0).all()
    for rows in (0, 4, 9):
        graph.replay(rows, 1)
        assert_same_bits(bits(found[:rows]), bits(project(x[:rows], w)) if rows else bits(found[:0]), f"{rows} rows")
        assert (wide(found[rows:]) == 7.0).all()
    with pytest.raises(ValueError, match="replay: num_rows: expected at most the rows captured, got 10"):
        graph.replay(10, 1)


def floats(*shape: int, dtype: str = "float32") -> paddle.Tensor:
    return paddle.zeros(list(shape), dtype)


def pieces(*sizes: tuple[int, int], dtype: str = "float32") -> list[list[WeightPiece]]:
    return [[WeightPiece(floats(n, k, dtype=dtype), 0, n)] for n, k in sizes]


def in_its_own_memory() -> None:
    both = floats(4, 16)
    project_heads(both[:3], PACKED, both[2:, :].reshape([2, 16]), 2)


PACKED = pack_heads(pieces((8, 4), (8, 4)))
QUANTIZED = pack_heads(pieces((8, 4), (8, 4), dtype="bfloat16"), "w4a8")
REFUSED: list[tuple[str, Callable[[], object]]] = [
    ("num_rows: expected at least 0, got -1", lambda: project_heads(floats(2, 8), PACKED, floats(2, 16), -1)),
    ("x: expected columns of all heads, got 7", lambda: project_heads(floats(2, 7), PACKED, floats(2, 16), 2)),
    ("x: expected columns of all heads, got 8", lambda: project_heads(floats(2, 8), PACKED, floats(2, 16), 2, 5)),
    (
        "x: expected a CPU tensor that holds [3, any], got [2, 8]",
        lambda: project_heads(floats(2, 8), PACKED, floats(3, 16), 3),
    ),
    (
        "head_stride: expected at least in_features, got 3",
        lambda: project_heads(floats(2, 8), PACKED, floats(2, 16), 2, 3),
    ),
    (
        "head_stride: expected at least in_features, got -4",
        lambda: project_heads(floats(2, 8), PACKED, floats(2, 16), 2, -4),
    ),
    (
        "out: expected a CPU tensor that holds [2, 16], got [2, 17]",
        lambda: project_heads(floats(2, 8), PACKED, floats(2, 17), 2),
    ),
    (
        "out: expected dtype float32, got bfloat16",
        lambda: project_heads(floats(2, 8), PACKED, floats(2, 16, dtype="bfloat16"), 2),
    ),
    ("out: expected memory of its own, got that of x", in_its_own_memory),
    (
        "matrices: expected dtype bfloat16, got float32",
        lambda: project_heads(floats(2, 8, dtype="bfloat16"), PACKED, floats(2, 16, dtype="bfloat16"), 2),
    ),
    ("rows: expected dtype bfloat16, got float32", lambda: project_heads(floats(2, 8), QUANTIZED, floats(2, 16), 2)),
    (
        "matrices: expected a CPU tensor of [192], got [128]",
        lambda: project_heads(floats(2, 12), replace(PACKED, num_heads=3), floats(2, 24), 2),
    ),
    (
        "num_heads: expected at least 1, got 0",
        lambda: project_heads(floats(2, 8), replace(PACKED, num_heads=0), floats(2, 16), 2),
    ),
]


@pytest.mark.parametrize(("message", "call"), REFUSED, ids=[message for message, _ in REFUSED])
def test_bad_input_is_refused(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert f"project_heads: {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("message", "weights", "quantization"),
    [
        ("pack_heads: weights: expected at least one of the heads", [], "none"),
        ("pack_heads: weights: expected heads of (8, 4, 'float32', None), got", pieces((8, 4), (8, 5)), "none"),
        ("quantization: expected one of none, wint8", pieces((8, 4)), "int8"),
        ("expected dtype bfloat16 for wint4, got float32", pieces((8, 4)), "wint4"),
    ],
)
def test_heads_that_cannot_be_packed_are_refused(
    message: str, weights: list[list[WeightPiece]], quantization: str
) -> None:
    with pytest.raises(ValueError) as caught:
        pack_heads(weights, quantization)
    assert message in str(caught.value)
