# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts in Paddle operators and NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import paddle

from fastdeploy.ops.reference.linear import linear, pack_each
from fastdeploy.ops.reference.norm import normalise

if TYPE_CHECKING:
    from fastdeploy.ops.experts import PackedExperts, RoutedRows, Router, RouterRule, SharedExpert
    from fastdeploy.ops.linear import PackedLinear, Pieces
    from fastdeploy.ops.quantized_form import QuantizedForm

_SHARED_FIELDS = ("in_features", "out_features", "dtype", "quantization", "is_gated", "group_size", "has_minimum")
"""Fields of both PackedExperts and PackedLinear."""


def pack_gate(weight: paddle.Tensor) -> paddle.Tensor:
    """As fastdeploy.ops.experts.pack_gate; the packed weight is the weight."""
    return weight


def pack_experts(
    weights: Sequence[Pieces],
    quantization: str = "none",
    is_gated: bool = False,
    form: QuantizedForm | None = None,
) -> PackedExperts:
    """As fastdeploy.ops.experts.pack_experts; the data is [num_experts, out, in]."""
    from fastdeploy.ops.experts import PackedExperts

    packed = pack_each(weights, quantization, is_gated, form)
    first = packed[0]
    data = paddle.stack([one.data for one in packed])
    return PackedExperts(data, len(packed), **{name: getattr(first, name) for name in _SHARED_FIELDS})


def route(hidden: paddle.Tensor, router: Router, routed: RoutedRows, num_rows: int) -> None:
    """As fastdeploy.ops.experts.route, but logits may depend on num_rows."""
    normed = normalise(hidden[:num_rows], router.norm.weight, router.norm.eps).astype(hidden.dtype)
    routed.normed[:num_rows] = normed
    logits = paddle.matmul(normed.astype("float32"), router.gate.astype("float32"), transpose_y=True).numpy()
    bias = None if router.correction_bias is None else router.correction_bias.numpy()
    ids, weights = choose_experts(logits, bias, router.rule)
    routed.ids[:num_rows] = paddle.to_tensor(ids)
    routed.weights[:num_rows] = paddle.to_tensor(weights)
    order = np.argsort(ids.ravel(), kind="stable").astype(np.int32)
    counts = np.bincount(ids.ravel(), minlength=router.num_experts)
    routed.entries[: order.size] = paddle.to_tensor(order)
    routed.starts[:] = paddle.to_tensor(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
    router.load[:] = paddle.to_tensor([int((counts > 0).sum()), int(counts.max())], dtype="int32")


def choose_experts(
    logits: np.ndarray, correction_bias: np.ndarray | None, rule: RouterRule
) -> tuple[np.ndarray, np.ndarray]:
    """Return the experts of each row in ascending order, and their weights.

    Args:
        logits: [rows, num_experts] float32.
        correction_bias: [num_experts] float32, or None.
        rule: how they are chosen.

    Returns:
        ids [rows, num_chosen] int32 and weights [rows, num_chosen] float32.
    """
    scores = _scores(logits, rule.scoring)
    choice = scores if correction_bias is None else scores + correction_bias
    if rule.num_groups > 1:
        groups = choice.reshape(len(choice), rule.num_groups, -1)
        largest = np.sort(groups, axis=-1)[..., ::-1]
        of_group = largest[..., 0] if rule.group_score == "largest" else largest[..., 0] + largest[..., 1]
        kept = np.zeros(of_group.shape, bool)
        np.put_along_axis(kept, _largest(of_group, rule.num_kept_groups), True, axis=-1)
        choice = np.where(kept[..., None], groups, np.float32("-inf")).reshape(choice.shape)
    ids = np.sort(_largest(choice, rule.num_chosen), axis=-1).astype(np.int32)
    weights = np.take_along_axis(scores, ids, axis=-1)
    total = weights.sum(axis=-1, keepdims=True, dtype=np.float32)
    epsilon = np.float32(rule.epsilon)
    if rule.normalisation == "clamp":
        weights = weights / np.maximum(total, epsilon)
    elif rule.normalisation == "add":
        weights = weights / (total + epsilon)
    return ids, (weights * np.float32(rule.scale)).astype(np.float32)


def _scores(logits: np.ndarray, scoring: str) -> np.ndarray:
    if scoring == "sigmoid":
        return (1 / (1 + np.exp(-logits))).astype(np.float32)
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (exponentials / exponentials.sum(axis=-1, keepdims=True)).astype(np.float32)


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the largest values of each row; of equal values the first ones."""
    return np.argsort(-values, axis=-1, kind="stable")[..., :count]


def experts_up(
    routed: RoutedRows, gate_up: PackedExperts, activated: paddle.Tensor, num_rows: int, shared: SharedExpert | None
) -> None:
    """As fastdeploy.ops.experts.experts_up."""
    num_chosen = routed.ids.shape[1]
    for expert, begin, end in _touched(routed):
        rows = paddle.gather(routed.normed, routed.entries[begin:end] // num_chosen)
        out = paddle.zeros([end - begin, gate_up.out_features], activated.dtype)
        linear(rows, _expert(gate_up, expert), out, end - begin)
        activated[begin:end] = out
    if shared is not None:
        linear(routed.normed, shared.gate_up, shared.activated, num_rows)


def experts_down(
    routed: RoutedRows,
    activated: paddle.Tensor,
    down: PackedExperts,
    hidden: paddle.Tensor,
    num_rows: int,
    shared: SharedExpert | None,
) -> None:
    """As fastdeploy.ops.experts.experts_down."""
    num_chosen = routed.ids.shape[1]
    total = np.zeros([num_rows, down.out_features], np.float32)
    for expert, begin, end in _touched(routed):
        out = paddle.zeros([end - begin, down.out_features], "float32")
        linear(activated[begin:end], _expert(down, expert), out, end - begin)
        entries = routed.entries[begin:end].numpy()
        total[entries // num_chosen] += routed.weights.numpy().ravel()[entries, None] * out.numpy()
    if shared is not None:
        total += _shared_output(shared, num_rows).numpy()
    total += hidden[:num_rows].astype("float32").numpy()
    hidden[:num_rows] = paddle.to_tensor(total).astype(hidden.dtype)


def _shared_output(shared: SharedExpert, num_rows: int) -> paddle.Tensor:
    if shared.summed is not None:
        return shared.summed[:num_rows]
    out = paddle.zeros([num_rows, shared.down.out_features], "float32")
    linear(shared.activated, shared.down, out, num_rows)
    return out


def _touched(routed: RoutedRows) -> list[tuple[int, int, int]]:
    """Return the id, the first entry and the end of the entries of each expert that has rows."""
    starts = routed.starts.tolist()
    return [(expert, begin, end) for expert, (begin, end) in enumerate(pairwise(starts)) if begin < end]


def _expert(packed: PackedExperts, expert: int) -> PackedLinear:
    from fastdeploy.ops.linear import PackedLinear

    return PackedLinear(packed.data[expert], None, **{name: getattr(packed, name) for name in _SHARED_FIELDS})
