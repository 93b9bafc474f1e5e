# SPDX-License-Identifier: Apache-2.0
"""MLP speculators draft from one state of the target, without attention.

s = GELU(norm(projection(s) + embedding(token))) for each draft, first from the target's state and the token after it,
then from its own state and draft. (Wertheimer et al. 2024)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import paddle
from paddle import Tensor

from fastdeploy.layers.linear import Linear
from fastdeploy.layers.logits import first_logits
from fastdeploy.ops.embedding import embedding
from fastdeploy.ops.gather import gather_rows
from fastdeploy.ops.linear import PackedLinear
from fastdeploy.ops.norm import NormParams, norm_gelu

EPS = 1e-6  # of all norms


@dataclass(frozen=True)
class SpeculatorStep:
    """Weights of one draft of an MLP speculator; tied ones are those of several drafts."""

    embedding: Tensor
    projection: PackedLinear
    norm_weight: Tensor
    norm_bias: Tensor
    head: PackedLinear


def embedding_factor(num_drafts: int, inner_size: int) -> float:
    """Return by what the embedding is multiplied before it is added to the projection of the state."""
    state_weight = 0.5 ** (0.5 / num_drafts)
    return sqrt((1 - state_weight**2) * inner_size / 2) / state_weight


class MLPSpeculator:
    """An MLP speculator.

    Attributes:
        num_drafts: number of drafts that it makes, each in a pass of its own.
        input_states: [max_seqs, inner size], what a later pass reads of the one before it; written by the caller.
        output: [max_seqs, inner size], what the logits of a draft are computed from.
        head_format: weight format of the matrices of logits.
        num_weight_bytes, num_head_bytes: bytes of its other weights, and of these matrices.
    """

    def __init__(self, steps: Sequence[SpeculatorStep], hidden_size: int, scales_input: bool, max_seqs: int) -> None:
        """Allocate the activations.

        Args:
            steps: one per draft; their embeddings are multiplied by `embedding_factor`.
            hidden_size: of the target.
            scales_input: whether the target's state is divided by its root mean square, and by sqrt(2).
        """
        inner, dtype = steps[0].projection.out_features, steps[0].projection.dtype
        self._steps, self.num_drafts = steps, len(steps)
        self.head_format = steps[0].head.quantization
        self.input_states: Tensor = paddle.zeros([max_seqs, inner], dtype)
        self.output: Tensor = paddle.zeros([max_seqs, inner], dtype)
        self._summed: Tensor = paddle.zeros([max_seqs, inner], dtype)
        self._states: Tensor = paddle.zeros([max_seqs, hidden_size], dtype)
        norm = NormParams(paddle.full([hidden_size], sqrt(0.5), dtype), EPS) if scales_input else None
        self._projections = [Linear(step.projection, norm if i == 0 else None) for i, step in enumerate(steps)]
        weights = {id(w): w for step in steps for w in (step.embedding, step.norm_weight, step.norm_bias)}
        packed = {id(step.projection): step.projection for step in steps}
        self.num_weight_bytes = sum(int(w.size) * int(w.element_size()) for w in weights.values())
        self.num_weight_bytes += sum(p.num_bytes for p in packed.values())
        self.num_head_bytes = sum(h.num_bytes for h in {id(step.head): step.head for step in steps}.values())

    def compute(self, index: int, states: Tensor, rows: Tensor, token_ids: Tensor, num_rows: int) -> None:
        """Write to `output` what draft `index` is sampled from.

        Args:
            states: [capacity, target's width], of the target's last step.
            rows: [max_seqs] int32, the row of `states` that belongs to each sequence.
            token_ids: [max_seqs] int32, the last token of each sequence, or its last draft.
        """
        step, source = self._steps[index], self.input_states
        if index == 0:
            source = self._states
            gather_rows(states, rows, source, num_rows)
        embedding(token_ids, step.embedding, self._summed, num_rows)
        self._projections[index](source, self._summed, num_rows, self._summed)
        norm_gelu(self._summed, step.norm_weight, step.norm_bias, self.output, num_rows, EPS)

    def compute_logits(self, index: int, rows: Tensor, num_rows: int, out: Tensor) -> None:
        """Write the logits of rows of `output` to out [capacity, vocab] float32, or those of the first ids only."""
        first_logits(self._steps[index].head, rows, num_rows, out)
