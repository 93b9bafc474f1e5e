# SPDX-License-Identifier: Apache-2.0
"""Runs a layer for multi-token prediction beside its target.

slot      s        s + 1        ...   n - 1      |  n           n + 1        <- drafts
token     x_s      x_{s+1}            x_{n-1}    |  x_n         draft 1
state     h_{s-1}  h_s                h_{n-2}    |  h_{n-1}     the layer's own output

Each row of the layer reads the target's state one position earlier. The target's states are kept, one per slot of its
cache, so that the layer can be filled whenever drafts are wanted, by whoever holds the block then.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.core.step import IntArray, StepPlan
from fastdeploy.models.mtp import MTPLayer
from fastdeploy.ops.attention import KVCache
from fastdeploy.ops.buffer import byte_rows
from fastdeploy.worker.drafter import Drafter, Span
from fastdeploy.worker.model_runner import RunnerConfig


class MTPRunner(Drafter):
    """Keeps the target's states and drafts from them."""

    def __init__(self, layer: MTPLayer, cache: KVCache, num_blocks: int, config: RunnerConfig) -> None:
        """Allocate the states.

        Args:
            cache: the layer's own, of `num_blocks` blocks and one more per sequence.
            num_blocks: of the target's cache, whose block ids are used here too.
        """
        super().__init__(layer, num_blocks, config, first_slot=1)
        self.layer, self.cache = layer, cache
        self._state_tensor: Tensor = paddle.zeros([num_blocks * config.block_size, config.hidden_size], config.dtype)
        self._states, self._source = byte_rows(self._state_tensor), byte_rows(layer.source)
        self._outputs = byte_rows(layer.output)
        self._target_hidden: Tensor | None = None  # as `observe` was given it last, and its bytes
        self._target_states = self._states[:0]

    def observe(self, plan: StepPlan, hidden: Tensor) -> None:
        """Keep the states of a step; those of rejected drafts are overwritten before they are read."""
        if hidden is not self._target_hidden:
            self._target_hidden, self._target_states = hidden, byte_rows(hidden)
        row = 0
        for request, start, count in zip(plan.requests, plan.num_computed.tolist(), plan.num_scheduled.tolist()):
            self._keep(request.block_ids, start, self._target_states[row : row + count])
            row += count
        super().observe(plan, hidden)

    def run(self, spans: Sequence[Span], followed: Sequence[int] | None) -> Tensor:
        """Compute rows from the target's states, or drafts from the layer's own."""
        self.pack(spans)
        if followed is None:
            self._source[: self.batch.num_rows] = self._states[self._slots_before(spans)]
        else:
            self._source[: len(followed)] = self._outputs[followed]
        return self.layer.forward(self.token_ids.tensor, self.batch, self.cache)

    def _keep(self, block_ids: list[int], start: int, states: NDArray[np.uint8]) -> None:
        """Store the states of consecutive positions, block by block: a list of slots would cost NumPy 20 µs a step."""
        size, done = self.config.block_size, 0
        while done < len(states):
            block, offset = divmod(start + done, size)
            count = min(size - offset, len(states) - done)
            slot = block_ids[block] * size + offset
            self._states[slot : slot + count] = states[done : done + count]
            done += count

    def _slots_before(self, spans: Sequence[Span]) -> IntArray:
        """Return the slot before each packed row's."""
        slots, size = self.batch.buffers.slot_mapping.array, self.config.block_size
        before = np.empty(self.batch.num_rows, np.int32)
        before[1:] = slots[: len(before) - 1]
        firsts = self.batch.buffers.cu_seqlens_q.array[: len(spans)]
        before[firsts] = [s.block_ids[(s.start - 1) // size] * size + (s.start - 1) % size for s in spans]
        return before
