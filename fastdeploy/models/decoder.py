# SPDX-License-Identifier: Apache-2.0
"""The decoder that all supported architectures share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import paddle
from paddle import Tensor

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.layers.embedding import Embedding
from fastdeploy.layers.logits import LogitsHead
from fastdeploy.layers.norm import RMSNorm
from fastdeploy.layers.rotary import rotary_table
from fastdeploy.models.architecture import DecoderTraits
from fastdeploy.models.attention_part import AttentionContext
from fastdeploy.models.heads.taps import StateTaps
from fastdeploy.models.layer_parts import LayerWeights
from fastdeploy.models.step_buffers import StepBuffers
from fastdeploy.models.weights import DecoderWeights
from fastdeploy.ops.attention import AttentionMetadata
from fastdeploy.ops.caches import LayerCache
from fastdeploy.ops.experts import ExpertLoad
from fastdeploy.ops.gather import scatter_rows


@dataclass(frozen=True)
class SharedParts:
    """The parts of the target that layers for multi-token prediction use."""

    attention: AttentionContext
    embedding: Embedding
    final_norm: RMSNorm
    head: LogitsHead


class DecoderLayer:
    """hidden += attention(norm(hidden)); hidden += mlp(norm(hidden)). The layer calls five operators."""

    __slots__ = ("attention", "hidden", "mlp")

    def __init__(
        self, weights: LayerWeights, context: AttentionContext, buffers: StepBuffers, num_masked_prefix: int = 0
    ) -> None:
        self.attention = weights.attention.make_layer(context, buffers, num_masked_prefix)
        self.mlp = weights.mlp.make_layer(context.eps, buffers)
        self.hidden = buffers.hidden

    def __call__(self, metadata: AttentionMetadata, cache: LayerCache) -> None:
        """Apply the layer to the rows of the shared hidden buffer."""
        self.attention(self.hidden, metadata, cache)
        self.mlp(self.hidden, metadata.num_rows)


class CausalLM:
    """A decoder with its weights and the buffers of its steps.

    Attributes:
        config: the checkpoint's configuration; `config.dtype` is the dtype of activations.
        num_layers: number of layers, each with a KV cache.
        vocab_size: number of logits per row; the tokenizer may have fewer ids.
        max_rows: maximum number of rows in a step.
        max_model_len: maximum number of positions.
        num_weight_bytes: bytes of the embedding and of all packed weights.
        num_streamed_bytes: bytes of these weights that a step of one row reads.
        key_balance: digest of what the keys of all layers are divided by; empty if they are not balanced.
        forms: digest of the forms of all packed layers.
        output: [max_rows, hidden_size], the tensor that `forward` returns.
        expert_load: how the rows of the last step were spread over experts; None if all layers are dense.
        shared: parts that layers for multi-token prediction use too.
    """

    def __init__(
        self,
        config: ModelConfig,
        traits: DecoderTraits,
        weights: DecoderWeights,
        *,
        max_rows: int,
        max_model_len: int,
    ) -> None:
        """Allocate the activations and build the layers.

        Raises:
            ConfigError: with max_model_len, a sliding window would take effect, which is not supported.
        """
        config.check_max_model_len(max_model_len)
        self.config = config
        self.num_layers = config.num_layers
        self.vocab_size = config.vocab_size
        self.max_rows = max_rows
        self.max_model_len = max_model_len
        self.num_weight_bytes = weights.num_bytes
        self.num_streamed_bytes = weights.num_streamed_bytes
        self.key_balance, self.forms = weights.key_balance, weights.forms
        self.expert_load: ExpertLoad | None = None
        if (experts := config.experts) is not None:
            num_sparse = sum(experts.sparse_layers)
            self.expert_load = ExpertLoad(num_sparse, experts.num_experts, experts.rule.num_chosen)
        self._buffers = StepBuffers(config.hidden_size, max_rows, config.dtype, self.expert_load)
        self.output: Tensor = self._buffers.normed
        cos_sin = paddle.to_tensor(rotary_table(config.rope, max_model_len))
        context = AttentionContext(cos_sin, traits.interleaved_rotary, config.rms_norm_eps)
        self._layers = tuple(DecoderLayer(layer, context, self._buffers) for layer in weights.layers)
        self._embedding = Embedding(weights.embedding)
        self._final_norm = RMSNorm(weights.final_norm, config.rms_norm_eps)
        self._head = LogitsHead(weights.head)
        self.shared = SharedParts(context, self._embedding, self._final_norm, self._head)
        self._states: Tensor | None = None
        self._taps: StateTaps | None = None
        self._stored_rows = self.output

    def store_hidden_states(self, states: Tensor, is_normed: bool = True, taps: StateTaps | None = None) -> None:
        """Make `forward` write a state of each row to its slot in states [num_slots, width].

        Args:
            is_normed: whether to write the state after the final norm instead of before it.
            taps: what reads states of several layers, and makes the one that is written; None for the last one.
        """
        self._states, self._taps = states, taps
        last = self.output if is_normed else self._buffers.hidden
        self._stored_rows = last if taps is None else taps.states

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv_caches: Sequence[LayerCache]) -> Tensor:
        """Compute one step: write the keys and values of its rows and return their final hidden states.

        Args:
            token_ids: [capacity] int32, of which the first metadata.num_rows are read.
            metadata: the rows of the step, at most max_rows.
            kv_caches: one per layer.

        Returns:
            [max_rows, hidden_size] after the final norm; the first num_rows rows are valid until the next call.
        """
        buffers, num_rows = self._buffers, metadata.num_rows
        self._embedding(token_ids, buffers.hidden, num_rows)
        for index, (layer, cache) in enumerate(zip(self._layers, kv_caches, strict=True)):
            if self._taps is not None:
                self._taps.read(index, buffers.hidden, num_rows)
            layer(metadata, cache)
        if self._taps is not None:
            self._taps.read(self.num_layers, buffers.hidden, num_rows)
        self._final_norm(buffers.hidden, buffers.normed, num_rows)
        if self._states is not None:
            scatter_rows(self._stored_rows, metadata.slot_mapping, self._states, num_rows)
        return self.output

    def compute_logits(self, hidden: Tensor, num_rows: int, out: Tensor) -> None:
        """Write the logits of the first num_rows rows of `hidden` to out [capacity, vocab_size] float32."""
        self._head(hidden, out, num_rows)
