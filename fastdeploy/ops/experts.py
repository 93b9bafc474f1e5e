# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: a router chooses a few experts for each row, and the row's output is their weighted sum.

A sparse layer runs three operators. `route` normalises the rows, chooses their experts and lists the rows of each
expert; `experts_up` computes silu(gate) * up of every chosen expert; `experts_down` multiplies by the second matrix and
adds the weighted outputs of a row in ascending order of the experts. Shapes do not depend on the choice, so that the
operators can be captured; the work does.

The result of a row does not depend on the other rows of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import paddle

from fastdeploy.config.experts_config import RouterRule
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.linear import PackedLinear, Pieces, WeightPiece
from fastdeploy.ops.norm import NormParams
from fastdeploy.ops.quantized_form import FORMS, NO_QUANTIZATION, QuantizedForm
from fastdeploy.ops.reference import experts as reference
from fastdeploy.ops.registry import Lookup, OpEntry, cpu_only, register

SCORINGS = ("softmax", "sigmoid")  # the order of Scoring in custom_ops/cpu_ops/experts.h
GROUP_SCORES = ("largest", "two_largest")
NORMALISATIONS = ("none", "clamp", "add")


@dataclass(frozen=True)
class Router:
    """Weights of a router.

    Attributes:
        gate: from `pack_gate`; only the backend that packed it knows its layout.
        num_experts: E.
        correction_bias: [E] float32, or None.
        rule: how experts are chosen.
        norm: RMSNorm of the rows before the router and the experts.
        load: [2] int32, receives of each step how many experts have rows, and the most rows of one expert; part of an
            `ExpertLoad`.
    """

    gate: paddle.Tensor
    num_experts: int
    correction_bias: paddle.Tensor | None
    rule: RouterRule
    norm: NormParams
    load: paddle.Tensor


class ExpertLoad:
    """How the rows of the last step were spread over the experts of a model.

    Attributes:
        array: [num_layers, 2] int32; for each sparse layer, how many experts had rows, and the most rows of one expert.
        num_experts, num_chosen: experts of a layer (E), and experts per row (k).
    """

    def __init__(self, num_layers: int, num_experts: int, num_chosen: int) -> None:
        """Start with zeros."""
        buffer = HostBuffer((num_layers, 2), "int32")
        self.array, self.num_experts, self.num_chosen = buffer.array, num_experts, num_chosen
        self._rows = iter(buffer.tensor)

    def next_layer(self) -> paddle.Tensor:
        """Return what the router of the next sparse layer writes: [2] int32, a row of `array`."""
        return next(self._rows)


@dataclass(frozen=True)
class RoutedRows:
    """The rows of a step, normalised and assigned to experts; all layers share these buffers.

    An entry is a pair of a row and one of its experts, numbered row * num_chosen + place; a row's experts are in
    ascending order.

    Attributes:
        normed: [max_rows, hidden_size], in the model's dtype: the normalised rows.
        ids: [max_rows, num_chosen] int32, the experts of each row in ascending order.
        weights: [max_rows, num_chosen] float32.
        starts: [num_experts + 1] int32: the entries of expert e are entries[starts[e] : starts[e + 1]].
        entries: [max_rows * num_chosen] int32, by expert, then by row.
    """

    normed: paddle.Tensor
    ids: paddle.Tensor
    weights: paddle.Tensor
    starts: paddle.Tensor
    entries: paddle.Tensor

    @classmethod
    def allocate(cls, max_rows: int, hidden_size: int, num_experts: int, num_chosen: int, dtype: str) -> RoutedRows:
        """Return buffers for up to max_rows rows."""
        return cls(
            normed=paddle.zeros([max_rows, hidden_size], dtype),
            ids=paddle.zeros([max_rows, num_chosen], "int32"),
            weights=paddle.zeros([max_rows, num_chosen], "float32"),
            starts=paddle.zeros([num_experts + 1], "int32"),
            entries=paddle.zeros([max_rows * num_chosen], "int32"),
        )


@dataclass(frozen=True)
class PackedExperts:
    """The weights of one projection of all experts of a layer, in one allocation with a fixed stride.

    Attributes:
        data: the packed weights, expert after expert; only the backend that packed them knows their layout.
        num_experts, in_features, out_features: E, K and N.
        dtype, quantization, is_gated, group_size, has_minimum: as in PackedLinear.
    """

    data: paddle.Tensor
    num_experts: int
    in_features: int
    out_features: int
    dtype: str
    quantization: str = NO_QUANTIZATION
    is_gated: bool = False
    group_size: int = 0
    has_minimum: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights of all experts."""
        return int(self.data.size) * int(self.data.element_size())


@dataclass(frozen=True)
class SharedExpert:
    """The expert of every row, with the weights and the format of a gated feed-forward block.

    Attributes:
        gate_up: gated, hidden_size -> width.
        down: width -> hidden_size.
        activated: scratch buffer [max_rows, width].
        summed: None if the format is that of the experts, whose launches then include the shared expert. Otherwise a
            scratch buffer [max_rows, hidden_size] float32, into which the caller writes the expert's output before
            `experts_down`.
    """

    gate_up: PackedLinear
    down: PackedLinear
    activated: paddle.Tensor
    summed: paddle.Tensor | None = None


def pack_gate(weight: paddle.Tensor) -> paddle.Tensor:
    """Pack the weight of a router.

    Args:
        weight: [num_experts, hidden_size] float32 or bfloat16, which is kept and widened when it is read.
    """
    packed: paddle.Tensor = _PACK_GATE.run(weight)
    return packed


def pack_experts(
    weights: Sequence[Pieces],
    quantization: str = NO_QUANTIZATION,
    is_gated: bool = False,
    form: QuantizedForm | None = None,
) -> PackedExperts:
    """Pack the weights of one projection of all experts.

    Args:
        weights: for each expert the pieces of its weight, as `pack_linear` takes them. They are read once and in this
            order, one expert after the other, and need not be kept.
        quantization, is_gated: as `pack_linear` takes them.
        form: of experts that consist of coded pieces; None for that of the first expert.

    Raises:
        ValueError: as `pack_linear`, or experts of different sizes or forms.
    """
    packed: PackedExperts = _PACK_EXPERTS.run(weights, quantization, is_gated, form)
    return packed


def route(hidden: paddle.Tensor, router: Router, routed: RoutedRows, num_rows: int) -> None:
    """Normalise rows, choose their experts and list the rows of each expert.

    The normalised row is rounded to the dtype of `hidden`, then widened; logits are fp32 sums over the inputs in order.

    Args:
        hidden: [capacity, hidden_size] bfloat16 or float32.
        router: the weights.
        routed: receives everything.
        num_rows: rows to read.

    Raises:
        ValueError: invalid shape or dtype.
    """
    _ROUTE.run(hidden, router, routed, num_rows)


def experts_up(
    routed: RoutedRows, gate_up: PackedExperts, activated: paddle.Tensor, num_rows: int, shared: SharedExpert | None
) -> None:
    """Compute silu(gate) * up of every chosen expert for its rows, rounded once.

    Args:
        routed: from `route`.
        gate_up: gated, hidden_size -> expert width.
        activated: [max_rows * num_chosen, expert width]; receives a row for each entry, in the order of
            `routed.entries`.
        num_rows: as given to `route`.
        shared: an expert of the same format whose `activated` is computed too, or None.
    """
    _EXPERTS_UP.run(routed, gate_up, activated, num_rows, shared)


def experts_down(
    routed: RoutedRows,
    activated: paddle.Tensor,
    down: PackedExperts,
    hidden: paddle.Tensor,
    num_rows: int,
    shared: SharedExpert | None,
) -> None:
    """Add the weighted outputs of a row's experts and the shared expert's output to `hidden`.

    The weighted outputs are added in fp32 in ascending order of the experts, then the shared expert's output, then the
    row of `hidden`; the sum is rounded once.

    Args:
        routed, activated: from `experts_up`.
        down: expert width -> hidden_size.
        hidden: [capacity, hidden_size], the residual; receives the sum.
        num_rows: as given to `route`.
        shared: as given to `experts_up`, or an expert of another format whose output is in `shared.summed`, or None.
    """
    _EXPERTS_DOWN.run(routed, activated, down, hidden, num_rows, shared)


@dataclass(frozen=True)
class _Case:
    """Sizes of an example: rows, hidden size, expert width, experts, width of the shared expert, and options."""

    rows: int
    hidden: int
    width: int
    num_experts: int
    shared_width: int
    dtype: str
    rule: RouterRule
    quantization: str = NO_QUANTIZATION
    has_bias: bool = False
    is_shared_apart: bool = False

    def routed(self, lookup: Lookup) -> tuple[RoutedRows, Router, paddle.Tensor]:
        """Route random rows, and return what was chosen, the router and the rows."""
        gate = random_rows(self.num_experts, self.hidden, "float32", 1, scale=2 * self.hidden**-0.5)
        bias = random_rows(1, self.num_experts, "float32", 2, scale=0.1)[0] if self.has_bias else None
        norm = NormParams(random_rows(1, self.hidden, self.dtype, 3)[0], 1e-6)
        load = paddle.zeros([2], "int32")
        router = Router(lookup("pack_gate")(gate), self.num_experts, bias, self.rule, norm, load)
        hidden = random_rows(self.rows + 1, self.hidden, self.dtype, 4)
        routed = RoutedRows.allocate(self.rows + 1, self.hidden, self.num_experts, self.rule.num_chosen, self.dtype)
        lookup("route")(hidden, router, routed, self.rows)
        return routed, router, hidden

    def experts(self, lookup: Lookup, seed: int, outputs: int, inputs: int, is_gated: bool) -> PackedExperts:
        """Return random experts of `outputs` rows of weights."""
        weights = [
            [WeightPiece(random_rows(outputs, inputs, self.dtype, seed + expert, scale=inputs**-0.5), 0, outputs)]
            for expert in range(self.num_experts)
        ]
        packed: PackedExperts = lookup("pack_experts")(weights, self.quantization, is_gated)
        return packed

    def shared(self, lookup: Lookup) -> SharedExpert | None:
        """Return a random shared expert if there is one, of another format if `is_shared_apart`."""
        if not self.shared_width:
            return None
        quantization = NO_QUANTIZATION if self.is_shared_apart else self.quantization
        gate_up = random_rows(2 * self.shared_width, self.hidden, self.dtype, 5, scale=self.hidden**-0.5)
        down = random_rows(self.hidden, self.shared_width, self.dtype, 6, scale=self.shared_width**-0.5)
        pack, rows = lookup("pack_linear"), self.rows + 1
        summed = random_rows(rows, self.hidden, "float32", 7) if self.is_shared_apart else None
        activated = paddle.zeros([rows, self.shared_width], self.dtype)
        return SharedExpert(pack(gate_up, None, quantization, True), pack(down, None, quantization), activated, summed)


def _route_example(case: _Case, lookup: Lookup) -> Sequence[paddle.Tensor]:
    routed, router, _ = case.routed(lookup)
    return [routed.normed, routed.ids, routed.weights, routed.starts, routed.entries, router.load]


def _up_example(case: _Case, lookup: Lookup) -> Sequence[paddle.Tensor]:
    routed, _, _ = case.routed(lookup)
    gate_up = case.experts(lookup, 100, 2 * case.width, case.hidden, True)
    activated = paddle.full([(case.rows + 1) * case.rule.num_chosen, case.width], 7.0, case.dtype)
    shared = None if case.is_shared_apart else case.shared(lookup)
    lookup("experts_up")(routed, gate_up, activated, case.rows, shared)
    return [activated] if shared is None else [activated, shared.activated]


def _down_example(case: _Case, lookup: Lookup) -> Sequence[paddle.Tensor]:
    routed, _, hidden = case.routed(lookup)
    down = case.experts(lookup, 200, case.hidden, case.width, False)
    activated = random_rows((case.rows + 1) * case.rule.num_chosen, case.width, case.dtype, 8)
    shared = case.shared(lookup)
    if shared is not None:
        shared.activated[:] = random_rows(case.rows + 1, case.shared_width, case.dtype, 9)
    lookup("experts_down")(routed, activated, down, hidden, case.rows, shared)
    return [hidden]


_SOFTMAX = RouterRule(2, "softmax", normalisation="clamp", epsilon=1e-12)
_GROUPS = RouterRule(3, "sigmoid", 4, 2, "two_largest", "add", 1e-20, 2.5)
_LARGEST = RouterRule(4, "softmax", 5, 2, "largest", scale=16.0)
_CASES = [
    *(
        _Case(rows, 72, 40, num_experts, shared, dtype, rule, has_bias=has_bias)
        for dtype in ("float32", "bfloat16")
        for rows, num_experts, shared, rule, has_bias in (
            (1, 16, 0, _SOFTMAX, False),
            (9, 24, 56, _GROUPS, True),
            (33, 20, 24, _LARGEST, True),
        )
    ),
    *(
        _Case(rows, 264, 136, 16, 144, "bfloat16", _SOFTMAX, quantization, is_shared_apart=rows == 5)
        for quantization in FORMS
        for rows in (1, 5, 21)
    ),
]
_TOLERANCE = {"float32": 2e-5, "bfloat16": 8e-3}
_PACK_GATE = register(OpEntry("pack_gate", reference.pack_gate, has_fallback=False))
_PACK_EXPERTS = register(OpEntry("pack_experts", reference.pack_experts, has_fallback=False))


def _register(
    name: str, function: Callable[..., Any], example: Callable[[_Case, Lookup], Sequence[paddle.Tensor]]
) -> OpEntry:
    examples = [cpu_only(partial(example, case)) for case in _CASES]
    return register(OpEntry(name, function, _TOLERANCE, examples, has_fallback=False))


_ROUTE = _register("route", reference.route, _route_example)
_EXPERTS_UP = _register("experts_up", reference.experts_up, _up_example)
_EXPERTS_DOWN = _register("experts_down", reference.experts_down, _down_example)
