# SPDX-License-Identifier: Apache-2.0
"""Runs layers for multi-token prediction beside their target.

slot      s        s + 1        ...   n - 1      |  n           n + 1        <- drafts
token     x_s      x_{s+1}            x_{n-1}    |  x_n         draft 1
state     h_{s-1}  h_s                h_{n-2}    |  h_{n-1}     the layer's own output

Each row of the layer reads the target's state one position earlier. The target's states are kept, one per slot of its
cache, so that the layer can be filled whenever drafts are wanted, by whoever holds the block then. A further layer's
rows read the states of the layer before it instead, one position earlier too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import Tensor

from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.mtp import MTPLayer
from fastdeploy.ops.attention import AttentionMetadata, KVCache
from fastdeploy.ops.drafting import DraftStage
from fastdeploy.spec_decode.drafting.draft_vocabulary import draft_vocab_sizes
from fastdeploy.spec_decode.drafting.drafter import DraftBuffers, Drafter
from fastdeploy.worker.model_runner import RunnerConfig

LEAST_FILL = 32  # rows; filling takes a third of the layer's arithmetic, but that third's weights are read once more


class MTPRunner(Drafter):
    """Has the target keep its states, and drafts from them."""

    def __init__(
        self,
        layers: Sequence[MTPLayer],
        target: CausalLM,
        caches: Sequence[KVCache],
        num_blocks: int,
        config: RunnerConfig,
    ) -> None:
        """Allocate the states.

        Args:
            layers: which share their buffers.
            target: whose states they read.
            caches: one per layer, of `num_blocks` blocks and one more per sequence.
            num_blocks: of the target's cache, whose block ids are used here too.
        """
        self.layers, buffers = layers, DraftBuffers(config)
        num_slots = num_blocks * config.block_size
        self._states: Tensor = paddle.zeros([num_slots + 1, config.hidden_size], config.dtype)  # the last: before all
        target.keep_states(self._states)

        def stage(layer: MTPLayer, cache: KVCache) -> DraftStage:
            def compute(metadata: AttentionMetadata) -> None:
                layer.forward(buffers.token_ids.tensor, metadata, cache)

            return DraftStage(compute, layer.compute_logits)

        stages = [stage(layer, cache) for layer, cache in zip(layers, caches, strict=True)]
        sizes = draft_vocab_sizes(config.vocab_size)
        loop = buffers.loop(stages, layers[0].output, self._states, layers[0].source, sizes)
        super().__init__(loop, num_blocks, config, least_fill=LEAST_FILL if len(layers) == 1 else None)

    def describe(self) -> dict[str, Any]:
        """Return how many layers there are, the format of their heads, and the bytes that are not the target's."""
        heads = {id(head): head for layer in self.layers if (head := layer.own_head) is not None}
        return {
            "num_layers": len(self.layers),
            "head": self.layers[0].head.weight.quantization,
            "weights_bytes": sum(layer.num_weight_bytes for layer in self.layers),
            "heads_bytes": sum(head.num_bytes for head in heads.values()),
            "states_bytes": int(self._states.size) * int(self._states.element_size()),
        }
