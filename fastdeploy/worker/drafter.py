# SPDX-License-Identifier: Apache-2.0
"""What the runners of drafting models share: caches under the target's block ids, and the choice of drafts.

token    x_0 ...    x_{ready} ...      x_{n-1} |  draft 1     draft 2
         |<-filled->|<- the first call's rows->|  one row in each further call

What decoding adds is computed when drafts are wanted, in the call that makes the first of them: a request without
drafts costs nothing. For each block it is known how many of its slots are filled, so that whoever finds a block by its
prefix fills what is missing. Of requests that may draft no more than a backlog is left open, lest much be caught up at
once; chunks of long prompts are so computed beside the target's.

A drafting model's caches have the target's blocks and, behind them, one scratch block per sequence. Drafts are written
behind the committed slots: into the request's last block, or its scratch block where that one is full. What comes next
overwrites them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import paddle
from paddle import Tensor

from fastdeploy.core.request import Request, TokenArray
from fastdeploy.core.step import StepPlan
from fastdeploy.ops.batch_index import BatchIndex
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.gather import gather_rows
from fastdeploy.ops.sampling import SamplingBatch, sample
from fastdeploy.worker.model_runner import LOGITS_BYTES, RunnerConfig
from fastdeploy.worker.row_rules import RowRules

MAX_BACKLOG = 1024  # rows of a request that may draft; a model of 1/16 computes them while its target does 64


class Head(Protocol):
    """Makes logits of hidden states."""

    def compute_logits(self, hidden: Tensor, num_rows: int, out: Tensor) -> None:
        """Write float32 logits [num_rows, V] of the first rows of `hidden`."""


@dataclass(frozen=True)
class Span:
    """Rows of one sequence: its tokens from position `start` on, over the blocks that hold it."""

    start: int
    token_ids: TokenArray | Sequence[int]
    block_ids: list[int]


@dataclass
class Branch:
    """A draft in the making.

    Attributes:
        count: most tokens wanted.
        scratch_block: holds what the request's own blocks have no room for.
        token_ids: drafted so far.
        start: first position that the first call computes.
        row: of the last call, the one whose state leads to the next token.
    """

    request: Request
    count: int
    scratch_block: int
    token_ids: list[int] = field(default_factory=list)
    start: int = 0
    row: int = 0

    def next_span(self, block_size: int) -> Span:
        """Return the rows of the next call: at first whatever is missing, then the last draft."""
        if not self.token_ids:
            return Span(self.start, self.request.token_ids[self.start :], self._table(block_size))
        position = self.request.num_tokens + len(self.token_ids) - 1
        return Span(position, self.token_ids[-1:], self._table(block_size))

    def _table(self, block_size: int) -> list[int]:
        """Return the blocks of all tokens up to the last one."""
        needed = -(-(self.request.num_tokens + len(self.token_ids)) // block_size)
        held = self.request.block_ids[:needed]
        return held if len(held) == needed else [*held, self.scratch_block]


class Drafter(ABC):
    """Fills the caches of a drafting model and drafts token by token for many requests together.

    `run` is what models differ in.

    Attributes:
        batch, token_ids: index arrays and tokens of a call, written by `pack`.
    """

    def __init__(self, head: Head, num_blocks: int, config: RunnerConfig, first_slot: int = 0) -> None:
        """Start with nothing filled.

        Args:
            num_blocks: of the target's cache.
            config: sizes; hidden_size, vocab_size and dtype are the drafting model's.
            first_slot: positions before it have no row.
        """
        self.config = config
        self.batch = BatchIndex(config.max_rows, config.max_seqs, config.max_blocks_per_seq, config.block_size)
        self.token_ids = HostBuffer(config.max_rows, "int32")
        self._head, self._num_blocks, self._first_slot = head, num_blocks, first_slot
        self._num_filled = np.zeros(num_blocks, np.int32)  # slots of each block, from its first on
        self._capacity = min(config.max_seqs, max(LOGITS_BYTES // (4 * config.vocab_size), 1))
        self._go_rows = HostBuffer(self._capacity, "int32")
        self._go_hidden: Tensor = paddle.zeros([self._capacity, config.hidden_size], config.dtype)
        self._logits: Tensor = paddle.zeros([self._capacity, config.vocab_size], "float32")
        self._sampling = SamplingBatch(self._capacity)
        self._rules = RowRules(self._sampling, config.eos_token_ids, config.vocab_limit)

    @abstractmethod
    def run(self, spans: Sequence[Span], followed: Sequence[int] | None) -> Tensor:
        """Compute rows, at most max_rows, and return their states [rows, hidden].

        Args:
            followed: rows of the last call, the states of which lead to the spans' tokens, all of them drafts; None:
                they are tokens of the text.
        """

    def observe(self, plan: StepPlan, hidden: Tensor) -> None:
        """Take in a step of the target: empty the blocks that it began, fill where a backlog has grown."""
        size, grown = self.config.block_size, []
        ends = (plan.num_computed + plan.num_scheduled).tolist()
        for request, start, end in zip(plan.requests, plan.num_computed.tolist(), ends):
            if begun := request.block_ids[-(-start // size) : -(-end // size)]:
                self._num_filled[begun] = 0
            if request.max_drafts and start // size < end // size:
                known = min(end, request.num_tokens)
                if known - self._num_ready(request) >= MAX_BACKLOG:
                    grown.append((request, known))
        self._fill(grown)

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[TokenArray]:
        """Return up to counts[i] tokens, int32, to follow the last one of requests[i].

        All tokens of a request but its last are computed.
        """
        branches = [Branch(r, count, self._num_blocks + i) for i, (r, count) in enumerate(zip(requests, counts))]
        active = [branch for branch in branches if branch.count > 0]
        self._begin(active)
        while active:
            self._extend(active, self._advance(active))
            active = [branch for branch in active if len(branch.token_ids) < branch.count]
        return [np.array(branch.token_ids, np.int32) for branch in branches]

    def pack(self, spans: Sequence[Span]) -> None:
        """Describe the rows of a call: at most max_rows, of at most max_seqs sequences."""
        at = 0
        for span in spans:
            self.token_ids.array[at : at + len(span.token_ids)] = span.token_ids
            at += len(span.token_ids)
        counts = np.array([len(span.token_ids) for span in spans], np.int32)
        starts = np.array([span.start for span in spans], np.int32)
        self.batch.fill(counts, starts, np.zeros(len(spans), np.int32), [span.block_ids for span in spans])

    def _begin(self, active: list[Branch]) -> None:
        """Find where each branch starts; fill first what would not fit into its first call."""
        self._find_starts(active)
        if sum(branch.request.num_tokens - branch.start for branch in active) > self.config.max_rows:
            self._fill([(branch.request, branch.request.num_tokens - 1) for branch in active])
            self._find_starts(active)

    def _find_starts(self, active: list[Branch]) -> None:
        for branch in active:
            branch.start = min(self._num_ready(branch.request), branch.request.num_tokens - 1)

    def _advance(self, active: list[Branch]) -> Tensor:
        """Compute what leads to the next token of each branch."""
        is_first = not active[0].token_ids
        spans = [branch.next_span(self.config.block_size) for branch in active]
        hidden = self.run(spans, None if is_first else [branch.row for branch in active])
        end = 0
        for branch, span in zip(active, spans):
            end += len(span.token_ids)
            branch.row = end - 1
            if is_first:
                self._mark(branch.request, span.start, branch.request.num_tokens)
        return hidden

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
            self.run(spans, None)
            for (request, _), span in zip(wanted, spans):
                self._mark(request, span.start, span.start + len(span.token_ids))

    def _num_ready(self, request: Request) -> int:
        """Return how many positions, from 0 on, are filled without a hole."""
        filled = self._num_filled[request.block_ids]
        holes = np.flatnonzero(filled < self.config.block_size)
        whole = int(holes[0]) if len(holes) else len(filled)
        ready = whole * self.config.block_size + (int(filled[whole]) if len(holes) else 0)
        return max(ready, self._first_slot)

    def _mark(self, request: Request, start: int, end: int) -> None:
        """Note that the positions [start, end) are filled, as far as the request's own blocks hold them."""
        size = self.config.block_size
        held = request.block_ids[start // size : -(-end // size)]
        counts = np.minimum(end - (start // size + np.arange(len(held))) * size, size)
        self._num_filled[held] = np.maximum(self._num_filled[held], counts)

    def _extend(self, active: list[Branch], hidden: Tensor) -> None:
        """Draw one token per branch; a branch for which none can be drawn ends."""
        for first in range(0, len(active), self._capacity):
            part = active[first : first + self._capacity]
            self._go_rows.array[: len(part)] = [branch.row for branch in part]
            gather_rows(hidden, self._go_rows.tensor, self._go_hidden, len(part))
            self._head.compute_logits(self._go_hidden, len(part), self._logits)
            for row, branch in enumerate(part):
                self._rules.write_draft(branch.request, row, len(branch.token_ids))
            sample(self._logits, self._sampling, len(part))
            for branch, token in zip(part, self._sampling.token_ids.array[: len(part)].tolist()):
                if token >= 0:
                    branch.token_ids.append(token)
                else:
                    branch.count = len(branch.token_ids)
