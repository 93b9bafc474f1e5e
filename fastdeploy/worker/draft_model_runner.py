# SPDX-License-Identifier: Apache-2.0
"""Runs a smaller model of the same vocabulary beside its target."""

from __future__ import annotations

from collections.abc import Sequence

from paddle import Tensor

from fastdeploy.models.decoder import CausalLM
from fastdeploy.ops.attention import KVCache
from fastdeploy.worker.drafter import Drafter, Span
from fastdeploy.worker.model_runner import RunnerConfig


class DraftModelRunner(Drafter):
    """Drafts with a model that reads tokens alone."""

    def __init__(self, model: CausalLM, kv_caches: Sequence[KVCache], num_blocks: int, config: RunnerConfig) -> None:
        """Bind the model to its caches.

        Args:
            kv_caches: one per layer of the model, of `num_blocks` blocks and one more per sequence.
            num_blocks: of the target's cache, whose block ids are used here too.
        """
        super().__init__(model, num_blocks, config)
        self.model, self.kv_caches = model, kv_caches

    def run(self, spans: Sequence[Span], followed: Sequence[int] | None) -> Tensor:
        """Compute rows; drafts are tokens like others."""
        self.pack(spans)
        return self.model.forward(self.token_ids.tensor, self.batch, self.kv_caches)
