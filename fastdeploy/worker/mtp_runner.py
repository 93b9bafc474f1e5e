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

from collections.abc import Sequence

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.core.request import Request, TokenArray
from fastdeploy.core.step import StepPlan, StepResult
from fastdeploy.models.mtp import MTPLayer
from fastdeploy.ops.attention import KVCache
from fastdeploy.ops.batch_index import BatchIndex
from fastdeploy.ops.buffer import HostBuffer, byte_rows
from fastdeploy.ops.gather import gather_rows
from fastdeploy.ops.sampling import SamplingBatch, sample
from fastdeploy.worker.model_runner import LOGITS_BYTES, RunnerConfig
from fastdeploy.worker.row_rules import RowRules

Bytes = NDArray[np.uint8]  # [rows, bytes of a state]


class MTPRunner:
    """Keeps the layer's cache complete and drafts from it."""

    def __init__(self, layer: MTPLayer, cache: KVCache, num_blocks: int, config: RunnerConfig) -> None:
        """Allocate the states that blocks keep.

        Args:
            cache: the layer's own, of `num_blocks` blocks and one more per sequence.
            num_blocks: of the target's cache, whose block ids are used here too.
        """
        self.layer, self.cache, self.config = layer, cache, config
        self._num_blocks = num_blocks
        self.batch = BatchIndex(config.max_rows, config.max_seqs, config.max_blocks_per_seq, config.block_size)
        self.token_ids = HostBuffer(config.max_rows, "int32")
        self._block_states: Tensor = paddle.zeros([num_blocks, config.hidden_size], config.dtype)
        self._states, self._source = byte_rows(self._block_states), byte_rows(layer.source)
        self._capacity = min(config.max_seqs, max(LOGITS_BYTES // (4 * config.vocab_size), 1))
        self._go_rows = HostBuffer(self._capacity, "int32")
        self._go_hidden: Tensor = paddle.zeros([self._capacity, config.hidden_size], config.dtype)
        self._logits: Tensor = paddle.zeros([self._capacity, config.vocab_size], "float32")
        self._sampling = SamplingBatch(self._capacity)
        self._rules = RowRules(self._sampling, config.eos_token_ids, config.vocab_limit)

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

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[TokenArray]:
        """Return up to counts[i] tokens, int32, to follow the last one of requests[i].

        All tokens of a request but its last are computed.
        """
        drafts: list[list[int]] = [[] for _ in requests]
        active = [i for i, count in enumerate(counts) if count > 0]
        states = self._states[[self._last_block(requests[i]) for i in active]]
        while active:
            hidden = self._run_drafts(requests, drafts, active, states)
            for i, token in zip(active, self._draw(requests, drafts, active, hidden)):
                drafts[i] += [token] if token >= 0 else []
            num_steps = max(len(drafts[i]) for i in active)
            rows = [row for row, i in enumerate(active) if num_steps == len(drafts[i]) < counts[i]]
            states = byte_rows(hidden)[rows]
            active = [active[row] for row in rows]
        return [np.array(tokens, np.int32) for tokens in drafts]

    def _fill(self, plan: StepPlan, states: Bytes) -> None:
        source, block_size, at = self._source, self.config.block_size, 0
        num_rows = int(plan.num_scheduled.sum())
        source[1:num_rows] = states[: num_rows - 1]
        for request, start, count in zip(plan.requests, plan.num_computed.tolist(), plan.num_scheduled.tolist()):
            self.token_ids.array[at : at + count] = request.tokens_with_draft()[start : start + count]
            source[at] = self._states[request.block_ids[(start - 1) // block_size]] if start else 0
            at += count
        tables = [request.block_ids for request in plan.requests]
        self._run(plan.num_scheduled, plan.num_computed, tables)

    def _keep_states(self, request: Request, states: Bytes, start: int, end: int) -> None:
        """Copy the state at the last of the positions [start, end) in each block to the block's place."""
        size = self.config.block_size
        for block in range(start // size, (end - 1) // size + 1):
            last = min((block + 1) * size, end) - 1
            self._states[request.block_ids[block]] = states[last - start]

    def _last_block(self, request: Request) -> int:
        """Return the block of the last computed position."""
        return request.block_ids[(request.num_computed - 1) // self.config.block_size]

    def _run_drafts(
        self, requests: Sequence[Request], drafts: list[list[int]], active: list[int], states: Bytes
    ) -> Tensor:
        """Compute one row of each active request: its last draft, or its last token, after the given state."""
        size = self.config.block_size
        self._source[: len(active)] = states
        tables = []
        for row, i in enumerate(active):
            self.token_ids.array[row] = drafts[i][-1] if drafts[i] else requests[i].token_ids[-1]
            needed = -(-(requests[i].num_tokens + len(drafts[i])) // size)
            held = requests[i].block_ids[:needed]
            tables.append(held if len(held) == needed else [*held, self._num_blocks + i])
        num_computed = np.array([requests[i].num_computed + len(drafts[i]) for i in active], np.int32)
        return self._run(np.ones(len(active), np.int32), num_computed, tables)

    def _run(self, num_scheduled: TokenArray, num_computed: TokenArray, tables: list[list[int]]) -> Tensor:
        self.batch.fill(num_scheduled, num_computed, np.zeros(len(tables), np.int32), tables)
        return self.layer.forward(self.token_ids.tensor, self.batch, self.cache)

    def _draw(
        self, requests: Sequence[Request], drafts: list[list[int]], active: list[int], hidden: Tensor
    ) -> list[int]:
        """Choose one token per active request; -1 where none can be."""
        tokens: list[int] = []
        for first in range(0, len(active), self._capacity):
            part = active[first : first + self._capacity]
            self._go_rows.array[: len(part)] = np.arange(first, first + len(part))
            gather_rows(hidden, self._go_rows.tensor, self._go_hidden, len(part))
            self.layer.compute_logits(self._go_hidden, len(part), self._logits)
            for row, i in enumerate(part):
                self._rules.write_draft(requests[i], row, len(drafts[i]))
            sample(self._logits, self._sampling, len(part))
            tokens += self._sampling.token_ids.array[: len(part)].tolist()
        return tokens
