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

import numpy as np
import paddle
from paddle import Tensor

from fastdeploy.core.step import IntArray, StepPlan
from fastdeploy.models.mtp import MTPLayer
from fastdeploy.ops.attention import KVCache
from fastdeploy.ops.buffer import byte_rows
from fastdeploy.worker.drafter import Drafter, Span
from fastdeploy.worker.model_runner import RunnerConfig


class MTPRunner(Drafter):
    """Keeps the target's states and drafts from them."""

    def __init__(
        self, layers: Sequence[MTPLayer], caches: Sequence[KVCache], num_blocks: int, config: RunnerConfig
    ) -> None:
        """Allocate the states.

        Args:
            layers: which share their buffers.
            caches: one per layer, of `num_blocks` blocks and one more per sequence.
            num_blocks: of the target's cache, whose block ids are used here too.
        """
        super().__init__(layers, num_blocks, config)
        self.layers, self.caches = layers, caches
        num_slots = num_blocks * config.block_size
        self._state_tensor: Tensor = paddle.zeros([num_slots + 1, config.hidden_size], config.dtype)  # -1: before all
        self._states, self._source = byte_rows(self._state_tensor), byte_rows(layers[0].source)
        self._outputs = byte_rows(layers[0].output)
        self._target_hidden: Tensor | None = None  # as `observe` was given it last, and its bytes
        self._target_states = self._states[:0]

    def observe(self, plan: StepPlan, hidden: Tensor, slots: IntArray) -> None:
        """Keep the states of a step; those of rejected drafts are overwritten before they are read."""
        if hidden is not self._target_hidden:
            self._target_hidden, self._target_states = hidden, byte_rows(hidden)
        self._states[slots] = self._target_states[: len(slots)]
        super().observe(plan, hidden, slots)

    def describe(self) -> dict[str, Any]:
        """Return how many layers there are, the format of their heads, and the bytes that are not the target's."""
        heads = {id(head): head for layer in self.layers if (head := layer.own_head) is not None}
        return {
            "num_layers": len(self.layers),
            "head": self.layers[0].head.weight.quantization,
            "weights_bytes": sum(layer.num_weight_bytes for layer in self.layers),
            "heads_bytes": sum(head.num_bytes for head in heads.values()),
            "states_bytes": self._states.nbytes,
        }

    def run(self, stage: int, spans: Sequence[Span], followed: Sequence[int] | None) -> Tensor:
        """Compute rows of a layer from the target's states, or from those of the last call."""
        self.pack(spans)
        if followed is None:
            self._source[: self.batch.num_rows] = self._states[self._slots_before(spans)]
        else:
            self._source[: len(followed)] = self._outputs[followed]
        return self.layers[stage].forward(self.token_ids.tensor, self.batch, self.caches[stage])

    def _slots_before(self, spans: Sequence[Span]) -> IntArray:
        """Return the slot before each packed row's."""
        slots, size = self.batch.buffers.slot_mapping.array, self.config.block_size
        before = np.empty(self.batch.num_rows, np.int32)
        before[1:] = slots[: len(before) - 1]
        firsts = self.batch.buffers.cu_seqlens_q.array[: len(spans)]
        before[firsts] = [_slot(span.block_ids, span.start - 1, size) for span in spans]
        return before


def _slot(block_ids: list[int], position: int, block_size: int) -> int:
    return block_ids[position // block_size] * block_size + position % block_size if position >= 0 else -1
