# SPDX-License-Identifier: Apache-2.0
"""Runs a draft model: a smaller model with the same vocabulary as its target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastdeploy.models.decoder import CausalLM
from fastdeploy.ops.attention import AttentionMetadata
from fastdeploy.ops.caches import LayerCache
from fastdeploy.ops.drafting import DraftStage
from fastdeploy.spec_decode.drafting.drafter import CachedDrafter, DraftBuffers
from fastdeploy.worker.model_runner import RunnerConfig


class DraftModelRunner(CachedDrafter):
    """Drafts with a model that reads token ids only."""

    def __init__(self, model: CausalLM, kv_caches: Sequence[LayerCache], num_blocks: int, config: RunnerConfig) -> None:
        """Bind the model to its caches.

        Args:
            kv_caches: one per layer, of `num_blocks` blocks and one scratch block per sequence.
            num_blocks: of the target's cache, whose block ids the model shares.
        """
        self.model = model
        buffers = DraftBuffers(config)

        def compute(metadata: AttentionMetadata) -> None:
            model.forward(buffers.token_ids.tensor, metadata, kv_caches)

        stage = DraftStage(compute, model.compute_logits)
        super().__init__(buffers.loop([stage], model.output, kv_caches[0]), kv_caches, num_blocks, config)

    def describe(self) -> dict[str, Any]:
        """Return what the model is, and the bytes of its weights."""
        config = self.model.config
        return {
            "architecture": config.architecture,
            "dtype": config.dtype,
            "weights_bytes": self.model.num_weight_bytes,
        }
