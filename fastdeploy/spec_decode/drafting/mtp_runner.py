# SPDX-License-Identifier: Apache-2.0
"""Runs layers for multi-token prediction (MTP).

slot      s        s + 1        ...   n - 1      |  n           n + 1        <- draft passes
token     x_s      x_{s+1}            x_{n-1}    |  x_n         draft 1
state     h_{s-1}  h_s                h_{n-2}    |  h_{n-1}     the layer's own output

Each row of the layer reads its token and the hidden state of the target one position earlier, after the target's final
norm or before it, as the form of the layer says. The target's states are stored per slot of its KV cache, so that any
request that holds a block can fill the layer's cache later. The rows of a second layer read the output of the first one
instead, also one position earlier, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paddle import Tensor

from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.mtp import MTPLayer
from fastdeploy.ops.attention import AttentionMetadata
from fastdeploy.ops.caches import LayerCache
from fastdeploy.ops.drafting import DraftStage
from fastdeploy.ops.registry import selected_backend
from fastdeploy.spec_decode.drafting.draft_vocabulary import draft_vocab_sizes
from fastdeploy.spec_decode.drafting.drafter import MAX_ROWS_OF_FIRST_PASS, CachedDrafter, DraftBuffers
from fastdeploy.worker.model_runner import RunnerConfig


class MTPRunner(CachedDrafter):
    """Drafts with MTP layers from the stored hidden states of the target."""

    def __init__(
        self,
        layers: Sequence[MTPLayer],
        target: CausalLM,
        caches: Sequence[LayerCache],
        num_blocks: int,
        config: RunnerConfig,
    ) -> None:
        """Allocate the states, which the target then writes in every step.

        Args:
            layers: MTP layers, which share their buffers.
            target: the model whose states they read.
            caches: one per layer, of `num_blocks` blocks and one scratch block per sequence.
            num_blocks: of the target's cache, whose block ids the layers share.
        """
        self.layers, buffers = layers, DraftBuffers(config)
        num_slots = num_blocks * config.block_size
        states = selected_backend().allocate_rows(num_slots + 1, config.hidden_size, config.dtype)
        self._states: Tensor = states  # last: before a sequence
        target.store_hidden_states(self._states, layers[0].reads_normed)

        def stage(layer: MTPLayer, cache: LayerCache) -> DraftStage:
            def compute(metadata: AttentionMetadata) -> None:
                layer.forward(buffers.token_ids.tensor, metadata, cache)

            return DraftStage(compute, layer.compute_logits)

        stages = [stage(layer, cache) for layer, cache in zip(layers, caches, strict=True)]
        sizes = draft_vocab_sizes(config.vocab_size)
        loop = buffers.loop(stages, layers[0].output, caches[0], self._states, layers[0].input_states, sizes)
        super().__init__(loop, caches, num_blocks, config, MAX_ROWS_OF_FIRST_PASS if len(layers) == 1 else None)

    def describe(self) -> dict[str, Any]:
        """Return the number of layers, the format of their heads, and the bytes that they add to the target's."""
        heads = {id(head): head for layer in self.layers if (head := layer.own_head) is not None}
        return {
            "num_layers": len(self.layers),
            "head": self.layers[0].head.weight.quantization,
            "weights_bytes": sum(layer.num_weight_bytes for layer in self.layers),
            "heads_bytes": sum(head.num_bytes for head in heads.values()),
            "states_bytes": int(self._states.size) * int(self._states.element_size()),
        }
