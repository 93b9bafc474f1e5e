# SPDX-License-Identifier: Apache-2.0
"""Native kernels of the operators in `fastdeploy.ops.experts`, and the layout of packed experts."""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from fastdeploy.ops.backends.cpu.library import run_native
from fastdeploy.ops.backends.cpu.linear import pack_matrices
from fastdeploy.ops.backends.cpu.memory import allocate_streamed
from fastdeploy.ops.experts import (
    GROUP_SCORES,
    NORMALISATIONS,
    SCORINGS,
    PackedExperts,
    RoutedRows,
    Router,
    RouterRule,
    SharedExpert,
)
from fastdeploy.ops.linear import Pieces, dtype_name
from fastdeploy.ops.quantized_form import NO_QUANTIZATION, PANEL, QuantizedForm, form_of


def pack_gate(weight: paddle.Tensor) -> paddle.Tensor:
    """Return [panels, hidden_size, 16]: panels of 16 experts, padded with zeros."""
    num_experts, width = weight.shape
    num_panels, *_ = shape = gate_shape(num_experts, width)
    padded = paddle.zeros([num_panels * PANEL, width], weight.dtype)
    padded[:num_experts] = weight
    packed = allocate_streamed([*shape], dtype_name(weight))
    packed[:] = padded.reshape([num_panels, PANEL, width]).transpose([0, 2, 1])
    return packed


def gate_shape(num_experts: int, hidden_size: int) -> tuple[int, int, int]:
    """Return the shape of a packed gate."""
    return -(-num_experts // PANEL), hidden_size, PANEL


def pack_experts(
    weights: Sequence[Pieces],
    quantization: str = NO_QUANTIZATION,
    is_gated: bool = False,
    form: QuantizedForm | None = None,
) -> PackedExperts:
    """Pack each expert as `pack_linear` does, one after the other in one allocation."""
    packed = pack_matrices("experts", weights, quantization, is_gated, form)
    n, k, dtype = packed.shape
    return PackedExperts(packed.data, len(weights), k, n, dtype, is_gated=is_gated, **packed.form_fields)


def route(hidden: paddle.Tensor, router: Router, routed: RoutedRows, num_rows: int) -> None:
    """Choose the experts of rows."""
    run_native(
        "fd_route",
        hidden,
        router.norm.weight,
        router.gate,
        router.correction_bias,
        routed.normed,
        routed.ids,
        routed.weights,
        routed.starts,
        routed.entries,
        router.load,
        router.num_experts,
        _counts(router.rule),
        [router.rule.epsilon, router.rule.scale],
        router.norm.eps,
        num_rows,
    )


def _counts(rule: RouterRule) -> list[int]:
    return [
        rule.num_chosen,
        SCORINGS.index(rule.scoring),
        rule.num_groups,
        rule.num_kept_groups,
        GROUP_SCORES.index(rule.group_score),
        NORMALISATIONS.index(rule.normalisation),
    ]


def experts_up(
    routed: RoutedRows, gate_up: PackedExperts, activated: paddle.Tensor, num_rows: int, shared: SharedExpert | None
) -> None:
    """Compute the gated products of all touched experts."""
    run_native(
        "fd_experts_up",
        routed.normed,
        routed.starts,
        routed.entries,
        gate_up.data,
        activated,
        None if shared is None else shared.gate_up.data,
        None if shared is None else shared.activated,
        *_sizes(gate_up),
        0 if shared is None else shared.gate_up.out_features,
        routed.ids.shape[1],
        num_rows,
    )


def experts_down(
    routed: RoutedRows,
    activated: paddle.Tensor,
    down: PackedExperts,
    hidden: paddle.Tensor,
    num_rows: int,
    shared: SharedExpert | None,
) -> None:
    """Add the outputs of all touched experts and the shared expert to `hidden`."""
    is_inside = shared is not None and shared.summed is None
    run_native(
        "fd_experts_down",
        activated,
        routed.starts,
        routed.entries,
        routed.weights,
        down.data,
        hidden,
        shared.down.data if shared is not None and is_inside else None,
        shared.activated if shared is not None and is_inside else None,
        None if shared is None else shared.summed,
        *_sizes(down),
        shared.down.in_features if shared is not None and is_inside else 0,
        routed.ids.shape[1],
        num_rows,
    )


def _sizes(experts: PackedExperts) -> tuple[int, int, int, list[int]]:
    """Return the number, the outputs, the inputs and the form of packed experts, as the library takes them."""
    form = form_of(experts)
    return experts.num_experts, experts.out_features, experts.in_features, [] if form is None else form.as_list()
