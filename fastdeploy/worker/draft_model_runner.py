# SPDX-License-Identifier: Apache-2.0
"""Runs a smaller model of the same vocabulary beside its target.

token    x_0 ...    x_{ready} ...      x_{n-1} |  draft 1     draft 2
         |<-filled->|<- the first call's rows->|  one row in each further call

What decoding adds is computed when drafts are wanted, in one call with the row of the last token: a request without
drafts costs nothing. Chunks of a prompt are computed beside the target's, lest a long one be caught up at once. For
each block it is known how much of it is filled, so that whoever finds a block by its prefix fills what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from paddle import Tensor

from fastdeploy.core.request import Request
from fastdeploy.core.step import StepPlan, StepResult
from fastdeploy.models.decoder import CausalLM
from fastdeploy.ops.attention import KVCache
from fastdeploy.worker.drafter import Branch, Drafter, Span
from fastdeploy.worker.model_runner import RunnerConfig


class DraftModelRunner(Drafter):
    """Knows how far its model's caches are filled, fills them, and drafts from them."""

    def __init__(self, model: CausalLM, kv_caches: Sequence[KVCache], num_blocks: int, config: RunnerConfig) -> None:
        """Start with nothing filled.

        Args:
            kv_caches: one per layer of the model, of `num_blocks` blocks and one more per sequence.
            num_blocks: of the target's cache, whose block ids are used here too.
        """
        super().__init__(model, num_blocks, config)
        self.model, self.kv_caches = model, kv_caches
        self._num_filled = np.zeros(num_blocks, np.int32)  # slots of each block, from its first on

    def observe(self, plan: StepPlan, hidden: Tensor, result: StepResult) -> None:
        """Take in a step of the target: empty the blocks that it began, fill chunks of prompts."""
        size = self.config.block_size
        ends = (plan.num_computed + plan.num_scheduled).tolist()
        for request, start, end in zip(plan.requests, plan.num_computed.tolist(), ends):
            self._num_filled[request.block_ids[-(-start // size) : -(-end // size)]] = 0
        chunks = zip(plan.requests, ends, plan.num_verify_rows.tolist())
        self._fill([(request, end) for request, end, verify in chunks if not verify and request.max_drafts])

    def advance(self, active: list[Branch]) -> Tensor:
        """Compute the row of each branch's last token, and at first whatever its request lacks before."""
        if not active[0].token_ids:
            return self._begin(active)
        return self._compute(active, [branch.last(self.config.block_size) for branch in active])

    def _begin(self, active: list[Branch]) -> Tensor:
        size = self.config.block_size
        spans = [self._missing(branch.request, branch.table(size)) for branch in active]
        if sum(len(span.token_ids) for span in spans) > self.config.max_rows:
            self._fill([(branch.request, branch.request.num_tokens - 1) for branch in active])
            spans = [branch.last(size) for branch in active]
        hidden = self._compute(active, spans)
        for branch, span in zip(active, spans):
            self._mark(branch.request, span.start, branch.request.num_tokens)
        return hidden

    def _compute(self, active: list[Branch], spans: list[Span]) -> Tensor:
        for branch, end in zip(active, np.cumsum([len(span.token_ids) for span in spans]).tolist()):
            branch.row = end - 1
        return self._run(spans)

    def _fill(self, wanted: Sequence[tuple[Request, int]]) -> None:
        """Compute what each request lacks before a position, in as many calls as that takes."""
        while wanted := [(request, end) for request, end in wanted if self._num_ready(request) < end]:
            spans, room = [], self.config.max_rows
            for request, end in wanted:
                start = self._num_ready(request)
                tokens = request.token_ids[start : min(end, start + room)]
                spans.append(Span(start, tokens, request.block_ids))
                room -= len(tokens)
                if not room:
                    break
            self._run(spans)
            for (request, _), span in zip(wanted, spans):
                self._mark(request, span.start, span.start + len(span.token_ids))

    def _missing(self, request: Request, block_ids: list[int]) -> Span:
        """Return the rows that are not filled, at least that of the last token."""
        start = min(self._num_ready(request), request.num_tokens - 1)
        return Span(start, request.token_ids[start:], block_ids)

    def _num_ready(self, request: Request) -> int:
        """Return how many positions, from 0 on, are filled without a hole."""
        filled = self._num_filled[request.block_ids]
        holes = np.flatnonzero(filled < self.config.block_size)
        whole = int(holes[0]) if len(holes) else len(filled)
        return whole * self.config.block_size + (int(filled[whole]) if len(holes) else 0)

    def _mark(self, request: Request, start: int, end: int) -> None:
        """Note that the positions [start, end) are filled, as far as the request's own blocks hold them."""
        size = self.config.block_size
        held = request.block_ids[start // size : -(-end // size)]
        counts = np.minimum(end - (start // size + np.arange(len(held))) * size, size)
        self._num_filled[held] = np.maximum(self._num_filled[held], counts)

    def _run(self, spans: list[Span]) -> Tensor:
        self.pack(spans)
        return self.model.forward(self.token_ids.tensor, self.batch, self.kv_caches)
