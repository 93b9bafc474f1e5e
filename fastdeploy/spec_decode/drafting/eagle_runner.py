# SPDX-License-Identifier: Apache-2.0
"""Runs heads of EAGLE's kinds.

slot      s        s + 1        ...   n - 1      |  n           n + 1        <- draft passes
token     x_s      x_{s+1}            x_{n-1}    |  x_n         draft 1
state     g_{s-1}  g_s                g_{n-2}    |  g_{n-1}     the head's own output

The target's steps store a state g per slot of its KV cache, so that any request that holds a block can fill the head's
caches later: its state after the final norm, or a projection of states of several layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle
from paddle import Tensor

from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.heads.eagle import EagleHead
from fastdeploy.ops.attention import AttentionMetadata
from fastdeploy.ops.caches import LayerCache
from fastdeploy.ops.drafting import DraftStage
from fastdeploy.ops.registry import selected_backend
from fastdeploy.spec_decode.drafting.draft_vocabulary import (
    DraftVocabulary,
    MappedVocabulary,
    draft_vocab_sizes,
    spread_logits,
)
from fastdeploy.spec_decode.drafting.drafter import MAX_ROWS_OF_FIRST_PASS, CachedDrafter, DraftBuffers
from fastdeploy.worker.model_runner import RunnerConfig, max_logits_rows


class EagleRunner(CachedDrafter):
    """Drafts with a head from the stored states of the target."""

    def __init__(
        self,
        head: EagleHead,
        target: CausalLM,
        caches: Sequence[LayerCache],
        num_blocks: int,
        config: RunnerConfig,
    ) -> None:
        """Allocate the states, which the target then writes in every step.

        Args:
            caches: one per layer, of `num_blocks` blocks and one scratch block per sequence.
            num_blocks: of the target's cache, whose block ids the head shares.
        """
        self.head, model, buffers = head, head.config.model, DraftBuffers(config)
        states = selected_backend().allocate_rows(num_blocks * config.block_size + 1, model.hidden_size, model.dtype)
        target.store_hidden_states(states, taps=head.taps)  # the last state is the one before a sequence

        def compute(metadata: AttentionMetadata) -> None:
            head.forward(buffers.token_ids.tensor, metadata, caches)

        ids, sizes = head.target_ids, draft_vocab_sizes(config.vocab_size)
        compute_logits: Callable[[Tensor, int, Tensor], None] = head.compute_logits
        if ids is not None:
            sizes, own = [len(ids), config.vocab_size], paddle.zeros([max_logits_rows(config), len(ids)], "float32")
            compute_logits = spread_logits(compute_logits, ids, own)
        loop = buffers.loop(
            [DraftStage(compute, compute_logits)],
            head.output,
            caches[0],
            states,
            head.input_states,
            sizes,
            ids,
        )
        vocabulary = DraftVocabulary(sizes) if ids is None else MappedVocabulary()
        super().__init__(loop, caches, num_blocks, config, MAX_ROWS_OF_FIRST_PASS, vocabulary)

    def describe(self) -> dict[str, Any]:
        """Return what the head reads and drafts, and the bytes that it adds to the target's."""
        states, config = self.loop.states, self.head.config
        assert states is not None
        return {
            "num_layers": config.model.num_layers,
            "taps": list(config.taps),
            "draft_vocab_size": config.draft_vocab_size,
            "head": self.head.head.weight.quantization,
            "weights_bytes": self.head.num_weight_bytes,
            "heads_bytes": 0 if self.head.own_head is None else self.head.own_head.num_bytes,
            "states_bytes": int(states.size) * int(states.element_size()),
        }
