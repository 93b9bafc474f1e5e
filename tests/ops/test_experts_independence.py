# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: a row has the same bits whatever rows stand beside it, and equal scores choose the lowest id."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import paddle
import pytest

from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.experts import (
    PackedExperts,
    RoutedRows,
    Router,
    RouterRule,
    SharedExpert,
    experts_down,
    experts_up,
    pack_experts,
    pack_gate,
    route,
)
from fastdeploy.ops.linear import WeightPiece, linear, pack_linear
from fastdeploy.ops.norm import NormParams
from fastdeploy.ops.quantized_form import FORMS
from fastdeploy.ops.reference.experts import choose_experts
from tests.ops.bits import assert_same_bits, bits
from tests.ops.test_row_independence import BLOCK, INTERLEAVED, around

HIDDEN, WIDTH, SHARED_WIDTH, NUM_EXPERTS = 136, 72, 40, 20  # of which no one is a multiple of a panel
ROWS = sorted({*range(1, 21), *around([BLOCK, INTERLEAVED, 2 * BLOCK, 64])})
FORMATS = [("float32", "none"), ("bfloat16", "none"), *(("bfloat16", kind) for kind in FORMS)]
TWO = RouterRule(2, "softmax", normalisation="clamp", epsilon=1e-12)
GROUPS = RouterRule(3, "sigmoid", 4, 2, "two_largest", "add", 1e-20, 2.5)


def pieces(outputs: int, inputs: int, dtype: str, seed: int) -> list[WeightPiece]:
    return [WeightPiece(random_rows(outputs, inputs, dtype, seed, scale=inputs**-0.5), 0, outputs)]


@dataclass
class Layer:
    """A sparse layer with random weights; `gate` is the weight of its router."""

    dtype: str
    rule: RouterRule
    gate: np.ndarray
    gate_up: PackedExperts
    down: PackedExperts
    shared: SharedExpert | None
    has_bias: bool = True

    def __call__(self, hidden: paddle.Tensor) -> tuple[RoutedRows, paddle.Tensor, paddle.Tensor]:
        """Return what was routed, what experts_up has computed, and the output; unused memory holds NaN."""
        num_rows, k = hidden.shape[0], self.rule.num_chosen
        routed = RoutedRows.allocate(num_rows + 2, HIDDEN, len(self.gate), k, self.dtype)
        routed.normed[:] = float("nan")
        routed.weights[:] = float("nan")
        routed.ids[:] = routed.entries[:] = 2**30
        activated = paddle.full([(num_rows + 2) * k, WIDTH], float("nan"), self.dtype)
        out = paddle.concat([hidden, paddle.full([2, HIDDEN], float("nan"), self.dtype)])
        shared = self.shared
        if shared is not None:
            unused = paddle.full([num_rows + 2, SHARED_WIDTH], float("nan"), self.dtype)
            summed = None if shared.summed is None else paddle.full([num_rows + 2, HIDDEN], float("nan"), "float32")
            shared = replace(shared, activated=unused, summed=summed)
        route(out, self.router(), routed, num_rows)
        inside = None if shared is not None and shared.summed is not None else shared
        experts_up(routed, self.gate_up, activated, num_rows, inside)
        if shared is not None and shared.summed is not None:
            linear(routed.normed, shared.gate_up, shared.activated, num_rows)
            linear(shared.activated, shared.down, shared.summed, num_rows)
        experts_down(routed, activated, self.down, out, num_rows, shared)
        assert np.isnan(out[num_rows:].astype("float32").numpy()).all()
        assert np.isnan(activated[num_rows * k :].astype("float32").numpy()).all()
        return routed, activated[: num_rows * k], out[:num_rows]

    def router(self) -> Router:
        norm = NormParams(paddle.ones([HIDDEN], self.dtype), 1e-6)
        bias = random_rows(1, len(self.gate), "float32", 2, scale=0.1)[0] if self.has_bias else None
        gate = pack_gate(paddle.to_tensor(self.gate))
        return Router(gate, len(self.gate), bias, self.rule, norm, paddle.zeros([2], "int32"))


def make_layer(dtype: str, quantization: str = "none", rule: RouterRule = TWO, shared: str = "none") -> Layer:
    """Return a layer; `shared` is "none", "inside" (of the experts' format) or "apart" (of another format)."""
    gate = np.random.default_rng(1).standard_normal((NUM_EXPERTS, HIDDEN), np.float32) * np.float32(0.2)
    up = [pieces(2 * WIDTH, HIDDEN, dtype, 10 + expert) for expert in range(NUM_EXPERTS)]
    down = [pieces(HIDDEN, WIDTH, dtype, 40 + expert) for expert in range(NUM_EXPERTS)]
    expert = None
    if shared != "none":
        format = quantization if shared == "inside" else "none"
        expert = SharedExpert(
            pack_linear(pieces(2 * SHARED_WIDTH, HIDDEN, dtype, 70), None, format, True),
            pack_linear(pieces(HIDDEN, SHARED_WIDTH, dtype, 71), None, format),
            paddle.zeros([1, SHARED_WIDTH], dtype),
            paddle.zeros([1, HIDDEN], "float32") if shared == "apart" else None,
        )
    return Layer(dtype, rule, gate, pack_experts(up, quantization, True), pack_experts(down, quantization), expert)


def one_row_at_a_time(layer: Layer, hidden: paddle.Tensor) -> np.ndarray:
    return np.concatenate([bits(layer(hidden[row : row + 1])[2]) for row in range(hidden.shape[0])])


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
def test_a_row_has_the_same_bits_for_every_number_of_rows(dtype: str, quantization: str) -> None:
    is_sigmoid = quantization in ("none", "wint4")
    layer = make_layer(dtype, quantization, GROUPS if is_sigmoid else TWO, "inside" if is_sigmoid else "apart")
    hidden = random_rows(max(ROWS), HIDDEN, dtype, 3)
    alone = one_row_at_a_time(layer, hidden)
    for rows in ROWS:
        assert_same_bits(bits(layer(hidden[:rows])[2]), alone[:rows], f"{quantization} {dtype}, {rows} rows")


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
def test_all_rows_on_the_same_experts(dtype: str, quantization: str) -> None:
    layer = replace(make_layer(dtype, quantization, shared="inside"), has_bias=False)
    noise = random_rows(2 * BLOCK + 1, HIDDEN, "float32", 5, scale=0.02)
    hidden = (noise + paddle.to_tensor(layer.gate[[4, 11]].sum(0))).astype(dtype)
    routed, _, out = layer(hidden)
    assert (routed.ids[: len(hidden)].numpy() == routed.ids[0].numpy()).all()
    assert_same_bits(bits(out), one_row_at_a_time(layer, hidden), "rows of the same experts")


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
def test_every_row_on_experts_of_its_own(dtype: str, quantization: str) -> None:
    layer = replace(make_layer(dtype, quantization), has_bias=False)
    rows = NUM_EXPERTS // 2
    wanted = np.zeros((rows, HIDDEN), np.float32)
    for row in range(rows):
        wanted[row] = layer.gate[2 * row] + layer.gate[2 * row + 1]
    hidden = paddle.to_tensor(wanted).astype(dtype)
    routed, _, out = layer(hidden)
    assert routed.ids[:rows].numpy().tolist() == [[2 * row, 2 * row + 1] for row in range(rows)]
    assert_same_bits(bits(out), one_row_at_a_time(layer, hidden), "rows of different experts")


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
def test_an_expert_computes_what_linear_layers_compute(dtype: str, quantization: str) -> None:
    layer = make_layer(dtype, quantization)
    routed, activated, out = layer(random_rows(BLOCK + 3, HIDDEN, dtype, 6))
    starts = routed.starts.tolist()
    for expert in range(NUM_EXPERTS):
        begin, end = starts[expert], starts[expert + 1]
        if begin == end:
            continue
        rows = routed.normed[(routed.entries[begin:end] // 2).tolist()]
        want = paddle.zeros([end - begin, WIDTH], dtype)
        weight = pack_linear(pieces(2 * WIDTH, HIDDEN, dtype, 10 + expert), None, quantization, True)
        linear(rows, weight, want, end - begin)
        assert_same_bits(bits(activated[begin:end]), bits(want), f"expert {expert}")
    assert np.isfinite(out.astype("float32").numpy()).all()


def test_a_row_that_is_not_finite_does_not_change_the_others() -> None:
    layer = make_layer("bfloat16", shared="inside")
    hidden = random_rows(9, HIDDEN, "bfloat16", 7)
    want = bits(layer(hidden)[2])
    hidden[4] = float("nan")
    routed, _, out = layer(hidden)
    others = [row for row in range(9) if row != 4]
    assert_same_bits(bits(out)[others], want[others], "rows beside one that is not finite")
    assert np.isnan(out[4].astype("float32").numpy()).all()
    assert len(set(routed.ids[4].tolist())) == 2


def chosen(gate: np.ndarray, rule: RouterRule, hidden: np.ndarray, bias: np.ndarray | None = None) -> list[list[int]]:
    """Return the experts of rows, chosen by a router without an effective norm."""
    layer = replace(make_layer("float32"), gate=gate, rule=rule)
    router = replace(layer.router(), correction_bias=None if bias is None else paddle.to_tensor(bias))
    routed = RoutedRows.allocate(len(hidden), HIDDEN, len(gate), rule.num_chosen, "float32")
    route(paddle.to_tensor(hidden), router, routed, len(hidden))
    ids: list[list[int]] = routed.ids.tolist()
    return ids


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("num_rows", [1, 2, 9])
def test_of_equal_scores_the_lowest_ids_are_chosen(scoring: str, num_rows: int) -> None:
    gate = np.repeat(np.random.default_rng(2).standard_normal((1, HIDDEN), np.float32), 24, 0)
    rule = replace(TWO, scoring=scoring, num_chosen=5)
    hidden = np.random.default_rng(3).standard_normal((num_rows, HIDDEN), np.float32)
    assert chosen(gate, rule, hidden) == [[0, 1, 2, 3, 4]] * num_rows
    in_groups = replace(rule, num_groups=4, num_kept_groups=2, group_score="two_largest")
    assert chosen(gate, in_groups, hidden) == [[0, 1, 2, 3, 4]] * num_rows


@pytest.mark.parametrize("places", [[3, 17], [20, 21]])
def test_scores_one_step_of_rounding_apart_are_told_apart(places: list[int]) -> None:
    gate = np.zeros((24, HIDDEN), np.float32)
    gate[:, 0] = 0.5
    gate[places, 0] = np.nextafter(np.float32(0.5), np.float32(1))
    hidden = np.zeros((5, HIDDEN), np.float32)
    hidden[:, 0] = 1
    rule = RouterRule(2, "sigmoid")
    bias = np.zeros(24, np.float32)
    with_bias = bias.copy()
    with_bias[places] = np.float32(2**-24)
    assert chosen(gate * 0, rule, hidden, with_bias) == [places] * 5
    ids = chosen(gate * np.float32(2), replace(rule, scoring="softmax"), hidden, bias)
    assert ids in ([places] * 5, [[0, 1]] * 5), "sqrt(136) scales the logits, whose scores may round to equal ones"


@pytest.mark.parametrize("rule", [TWO, GROUPS, replace(GROUPS, scoring="softmax", group_score="largest")])
@pytest.mark.parametrize("num_experts", [16, 20, 132])
def test_random_scores_are_chosen_as_the_definition_says(rule: RouterRule, num_experts: int) -> None:
    draw = np.random.default_rng(num_experts)
    gate = draw.integers(-8, 9, (num_experts, HIDDEN)).astype(np.float32) / 64
    hidden = draw.choice(np.float32([-1, 1]), (33, HIDDEN))  # logits are exact, so that both add them up alike
    bias = draw.standard_normal(num_experts, np.float32) / 8
    ids, _ = choose_experts(hidden @ gate.T * np.float32(1 / np.sqrt(1 + 1e-6)), bias, rule)
    got = chosen(gate, rule, hidden, bias)
    same = [a == b for a, b in zip(got, ids.tolist(), strict=True)]
    assert sum(same) >= 32, "a score may differ in the last bit"


def test_load_counts_experts_and_their_rows() -> None:
    layer = make_layer("float32")
    router = layer.router()
    routed = RoutedRows.allocate(7, HIDDEN, NUM_EXPERTS, 2, "float32")
    route(random_rows(7, HIDDEN, "float32", 8), router, routed, 7)
    counts = np.bincount(routed.ids.numpy().ravel(), minlength=NUM_EXPERTS)
    assert router.load.tolist() == [int((counts > 0).sum()), int(counts.max())]
    assert np.diff(routed.starts.numpy()).tolist() == counts.tolist()


def wrong(field: str) -> Sequence[object]:
    return {
        "num_chosen": replace(TWO, num_chosen=NUM_EXPERTS + 1),
        "num_groups": replace(TWO, num_groups=3),
        "num_kept_groups": replace(TWO, num_groups=2, num_kept_groups=3),
    }[field]


@pytest.mark.parametrize("field", ["num_chosen", "num_groups", "num_kept_groups"])
def test_rules_that_cannot_be_followed_are_refused(field: str) -> None:
    layer = replace(make_layer("float32"), rule=wrong(field))
    with pytest.raises(ValueError, match=f"route: {field}: expected"):
        layer(random_rows(2, HIDDEN, "float32", 9))


def test_lists_that_no_router_has_written_are_refused() -> None:
    layer = make_layer("float32")
    routed, activated, out = layer(random_rows(3, HIDDEN, "float32", 10))
    routed.entries[0] = 99
    with pytest.raises(ValueError, match="experts_down: entries: expected entries of these rows, got 99"):
        experts_down(routed, activated, layer.down, out, 3, None)
    with pytest.raises(ValueError, match="experts_up: starts: expected the number of entries of these rows last"):
        experts_up(routed, layer.gate_up, activated, 2, None)
