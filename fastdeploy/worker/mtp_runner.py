# SPDX-License-Identifier: Apache-2.0
"""Runs a layer for multi-token prediction beside its target.

slot      s        s + 1        ...   n - 1      |  n           n + 1        <- drafts
token     x_s      x_{s+1}            x_{n-1}    |  x_n         draft 1
state     h_{s-1}  h_s                h_{n-2}    |  h_{n-1}     the layer's own output
          `- carried over from the step before

After every step the layer computes the target's rows too, each from the target's state one position earlier, so that
its cache is complete wherever the target's is and shares its blocks. A block also keeps the target's state at the last
committed position in it: whoever goes on behind that block, the same request or one that finds its prefix, needs it.
Drafts are written behind the committed slots, in the request's last block or a scratch block; the next step overwrites
them.
"""

from __future__ import annotations

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.core.request import Request
from fastdeploy.core.step import StepPlan, StepResult
from fastdeploy.models.mtp import MTPLayer
from fastdeploy.ops.attention import KVCache
from fastdeploy.ops.buffer import byte_rows
from fastdeploy.worker.drafter import Branch, Drafter, Span
from fastdeploy.worker.model_runner import RunnerConfig

Bytes = NDArray[np.uint8]  # [rows, bytes of a state]


class MTPRunner(Drafter):
    """Keeps the layer's cache complete and drafts from it."""

    def __init__(self, layer: MTPLayer, cache: KVCache, num_blocks: int, config: RunnerConfig) -> None:
        """Allocate the states that blocks keep.

        Args:
            cache: the layer's own, of `num_blocks` blocks and one more per sequence.
            num_blocks: of the target's cache, whose block ids are used here too.
        """
        super().__init__(layer, num_blocks, config)
        self.layer, self.cache = layer, cache
        self._block_states: Tensor = paddle.zeros([num_blocks, config.hidden_size], config.dtype)
        self._states, self._source = byte_rows(self._block_states), byte_rows(layer.source)

    def observe(self, plan: StepPlan, hidden: Tensor, result: StepResult) -> None:
        """Take in a step of the target: fill the layer's cache for its rows and keep the committed states.

        Args:
            hidden: [max_rows, hidden_size], the target's states of the plan's rows after its final norm.
        """
        states = byte_rows(hidden)
        self._fill(plan, states)
        num_rejected = plan.num_drafts - np.array([r.num_accepted for r in result.results], np.int32)
        ends = plan.num_computed + plan.num_scheduled - num_rejected
        firsts = np.cumsum(plan.num_scheduled) - plan.num_scheduled
        for row, request in enumerate(plan.requests):
            self._keep_states(request, states[firsts[row] :], int(plan.num_computed[row]), int(ends[row]))

    def advance(self, active: list[Branch]) -> Tensor:
        """Compute the row of each branch's last token, after the state that led to it."""
        if active[0].token_ids:
            states = byte_rows(self._hidden)[[branch.row for branch in active]]
        else:
            states = self._states[[self._last_block(branch.request) for branch in active]]
        self._source[: len(active)] = states
        for row, branch in enumerate(active):
            branch.row = row
        return self._run([branch.last(self.config.block_size) for branch in active])

    def _fill(self, plan: StepPlan, states: Bytes) -> None:
        source, block_size, at = self._source, self.config.block_size, 0
        num_rows = int(plan.num_scheduled.sum())
        source[1:num_rows] = states[: num_rows - 1]
        spans = []
        for request, start, count in zip(plan.requests, plan.num_computed.tolist(), plan.num_scheduled.tolist()):
            source[at] = self._states[request.block_ids[(start - 1) // block_size]] if start else 0
            spans.append(Span(start, request.tokens_with_draft()[start : start + count], request.block_ids))
            at += count
        self._run(spans)

    def _keep_states(self, request: Request, states: Bytes, start: int, end: int) -> None:
        """Copy the state at the last of the positions [start, end) in each block to the block's place."""
        size = self.config.block_size
        for block in range(start // size, (end - 1) // size + 1):
            last = min((block + 1) * size, end) - 1
            self._states[request.block_ids[block]] = states[last - start]

    def _last_block(self, request: Request) -> int:
        """Return the block of the last computed position."""
        return request.block_ids[(request.num_computed - 1) // self.config.block_size]

    def _run(self, spans: list[Span]) -> Tensor:
        self.pack(spans)
        self._hidden = self.layer.forward(self.token_ids.tensor, self.batch, self.cache)
        return self._hidden
