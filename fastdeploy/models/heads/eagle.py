# SPDX-License-Identifier: Apache-2.0
"""Heads of EAGLE's kinds: decoder layers that read a token and a state of the position before it.

- EAGLE: the first layer's input is fc([embedding ; state]), without a norm. The state is the target's after its final
  norm, in later draft passes the output of the last layer. Embedding, head and final norm: the target's, without the
  norm.
- EAGLE 3: queries, keys and values of the first layer are projections of [norm(embedding) ; norm(state)], and its
  output is added to the state. The state is a projection of states of several of the target's layers, in later draft
  passes the output of the last layer, before or after the head's own final norm.

Sources: Li et al. 2024 (EAGLE), Li et al. 2025 (EAGLE-3), and the released files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.config.head_config import HeadConfig
from fastdeploy.layers.attention import Attention
from fastdeploy.layers.embedding import Embedding, Table, num_table_bytes
from fastdeploy.layers.linear import Linear
from fastdeploy.layers.logits import LogitsHead
from fastdeploy.layers.norm import RMSNorm
from fastdeploy.layers.rotary import rotary_table
from fastdeploy.models.attention_part import AttentionContext
from fastdeploy.models.decoder import CausalLM, DecoderLayer
from fastdeploy.models.heads.taps import StateTaps, TapWeights
from fastdeploy.models.layer_parts import LayerWeights
from fastdeploy.models.mlp_part import MLPWeights
from fastdeploy.models.step_buffers import StepBuffers
from fastdeploy.ops.attention import AttentionMetadata
from fastdeploy.ops.caches import LayerCache
from fastdeploy.ops.linear import PackedLinear, first_outputs, linear
from fastdeploy.ops.norm import NormParams
from fastdeploy.ops.rotary import HeadLayout, RotaryParams

NUM_MASKED = 1  # position 0 has no state before it


@dataclass(frozen=True)
class JointWeights:
    """A projection of [embedding ; state] as two linear layers; norms only in EAGLE 3."""

    of_embedding: PackedLinear
    of_state: PackedLinear
    embedding_norm: Tensor | None = None
    state_norm: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of both layers."""
        return self.of_embedding.num_bytes + self.of_state.num_bytes


@dataclass(frozen=True)
class FirstLayerWeights:
    """Weights of the first layer; `qkv` is None where the joint projection computes q | k | v."""

    joint: JointWeights
    qkv: PackedLinear | None
    output: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    mlp: MLPWeights

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed layers."""
        qkv = 0 if self.qkv is None else self.qkv.num_bytes
        return self.joint.num_bytes + qkv + self.output.num_bytes + self.mlp.num_bytes


@dataclass(frozen=True)
class EagleWeights:
    """Weights of a head; a part that is None is the target's, or does not exist.

    Attributes:
        head: of the drafts; None if it is the target's.
        taps: empty if the state is the target's after its final norm.
    """

    embedding: Table | None
    first: FirstLayerWeights
    others: tuple[LayerWeights, ...]
    final_norm: Tensor | None
    head: PackedLinear | None
    taps: tuple[TapWeights, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the embedding and of the packed layers, without the head."""
        embedding = 0 if self.embedding is None else num_table_bytes(self.embedding)
        layers = self.first.num_bytes + sum(layer.num_bytes for layer in self.others)
        return embedding + layers + sum(tap.projection.num_bytes for tap in self.taps)


class JointProjection:
    """Projects the embeddings in a buffer together with the states that are given."""

    def __init__(self, weights: JointWeights, embedded: Tensor, eps: float, state_is_normed: bool) -> None:
        """Store the buffer, which is written before each call.

        Args:
            embedded: [capacity, width].
            eps: of the norms.
            state_is_normed: whether the given states are normalised already.
        """
        self._embedded = embedded
        self._of_embedding = Linear(weights.of_embedding, _norm(weights.embedding_norm, eps))
        self._of_state = Linear(weights.of_state, None if state_is_normed else _norm(weights.state_norm, eps))

    def __call__(self, x: Tensor, out: Tensor, num_rows: int) -> None:
        """Write the projection of the first num_rows rows of the embeddings and of x [capacity, width] to out."""
        self._of_embedding(self._embedded, out, num_rows)
        self._of_state(x, out, num_rows, out)


def _norm(weight: Tensor | None, eps: float) -> NormParams | None:
    return None if weight is None else NormParams(weight, eps)


class EagleHead:
    """A head with the parts that it shares with its target.

    Attributes:
        config: of the head.
        input_states: [max_rows, width], the state that each row reads; written by the caller.
        output: [max_rows, width], the states that the next draft pass reads.
        head: computes the logits of drafts.
        taps: what makes the states in the target's steps; None for its state after the final norm.
        own_head: the weight of the head if it is not the target's.
        num_weight_bytes: bytes of the weights that are not the target's, without the head.
        max_rows: maximum number of rows in a pass.
        target_ids: the target's id of each id that the head drafts; None if they are the same.
    """

    def __init__(
        self, config: HeadConfig, weights: EagleWeights, target: CausalLM, target_ids: NDArray[np.int32] | None = None
    ) -> None:
        """Allocate the activations and build the layers.

        Args:
            target_ids: the target's id of each id that the head drafts; None if they are the same.
        """
        model, shared = config.model, target.shared
        self.config, self.max_rows, eps = config, target.max_rows, model.rms_norm_eps
        buffers = StepBuffers(model.hidden_size, target.max_rows, model.dtype)
        self._hidden, self._normed = buffers.hidden, buffers.normed
        self.input_states: Tensor = paddle.zeros([target.max_rows, model.hidden_size], model.dtype)
        self.output: Tensor = buffers.normed if config.recycles_normed else buffers.hidden
        self._embedding = shared.embedding if weights.embedding is None else Embedding(weights.embedding)
        self._final_norm = None if weights.final_norm is None else RMSNorm(weights.final_norm, eps)
        self.own_head, self.num_weight_bytes = weights.head, weights.num_bytes
        self.head = shared.head if weights.head is None else LogitsHead(weights.head)
        self.target_ids = target_ids
        self.taps = StateTaps(weights.taps, eps, target.max_rows, model.dtype) if weights.taps else None
        first = weights.first
        self._joint = JointProjection(first.joint, buffers.normed, eps, config.norm_before_residual)
        self._joins_qkv = first.qkv is None
        self._state_norm = None
        if config.norm_before_residual and first.joint.state_norm is not None:
            self._state_norm = RMSNorm(first.joint.state_norm, eps)
            self._normed_states = buffers.scratch("states", model.hidden_size)
        heads = HeadLayout(model.num_heads, model.num_kv_heads, model.head_dim)
        cos_sin = paddle.to_tensor(rotary_table(model.rope, target.max_model_len))
        self._attention = Attention(
            self._joint if first.qkv is None else Linear(first.qkv),
            heads,
            RotaryParams(cos_sin, False, first.q_norm, first.k_norm, eps),
            Linear(first.output),
            buffers.scratch("qkv", (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim),
            buffers.scratch("attended", first.output.in_features),
            NUM_MASKED,
        )
        self._mlp = first.mlp.make_layer(eps, buffers)
        context = AttentionContext(cos_sin, False, eps)
        self._others = [DecoderLayer(layer, context, buffers, NUM_MASKED) for layer in weights.others]

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, caches: Sequence[LayerCache]) -> None:
        """Write the keys and values of the rows, and their states to `output`.

        Args:
            token_ids: [max_rows] int32, the token of each row; `input_states` has the states before them.
            metadata: the rows, at most max_rows.
            caches: one per layer.
        """
        hidden, num_rows = self._hidden, metadata.num_rows
        self._embedding(token_ids, self._normed, num_rows)
        if self._joins_qkv:
            self._attention(hidden, metadata, caches[0], self._first_states(num_rows))
        else:
            self._joint(self.input_states, hidden, num_rows)
            self._attention(hidden, metadata, caches[0])
        self._mlp(hidden, num_rows)
        for layer, cache in zip(self._others, caches[1:], strict=True):
            layer(metadata, cache)
        if self.config.recycles_normed and self._final_norm is not None:
            self._final_norm(hidden, self._normed, num_rows)

    def _first_states(self, num_rows: int) -> Tensor:
        """Return the states to which the first layer adds its output."""
        if self._state_norm is None:
            return self.input_states
        self._state_norm(self.input_states, self._normed_states, num_rows)
        return self._normed_states

    def compute_logits(self, states: Tensor, num_rows: int, out: Tensor) -> None:
        """Write the logits of the first num_rows rows of `states` to out [capacity, vocab] float32.

        Args:
            states: rows of `output`.
            out: may have fewer columns, a multiple of 64, for the logits of the first ids only.
        """
        if not self.config.recycles_normed and self._final_norm is not None:
            self._final_norm(states, self._normed, num_rows)
            states = self._normed
        weight, num_ids = self.head.weight, out.shape[1]
        linear(states, weight if num_ids == weight.out_features else first_outputs(weight, num_ids), out, num_rows)
