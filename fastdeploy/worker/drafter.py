# SPDX-License-Identifier: Apache-2.0
"""What the runners of drafting models share: caches under the target's block ids, and the choice of drafts.

token    x_0 ...    x_{ready} ...      x_{n-1} |  draft 1     draft 2
         |<-filled->|<- the first call's rows->|  one row in each further call
stage 2             |      the second call's rows         |

What decoding adds is computed when drafts are wanted, in the call that makes the first of them: a request without
drafts costs nothing. For each block it is known how many of its slots are filled, so that whoever finds a block by its
prefix fills what is missing. Of requests that may draft no more than a backlog is left open, lest much be caught up at
once; chunks of long prompts are so computed beside the target's.

A model of several stages makes draft k in stage k, and all further ones in the last. A row of stage k reads its token
and the row that stage k - 1 has one position earlier: the stages' calls have equally many rows, each of them one
position behind the rows of the call before. What stands behind the text is computed again.

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
from fastdeploy.core.step import IntArray, StepPlan
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
        start: first position that the call of the first stage computes.
        row: of the last call, the one whose state leads to the next token.
    """

    request: Request
    count: int
    scratch_block: int
    token_ids: list[int] = field(default_factory=list)
    start: int = 0
    row: int = 0

    def span(self, start: int, block_size: int) -> Span:
        """Return the rows from position `start` to the last draft."""
        num_tokens = self.request.num_tokens
        if start >= num_tokens:
            return Span(start, self.token_ids[start - num_tokens :], self._table(block_size))
        tokens = self.request.token_ids[start:]
        return Span(start, np.append(tokens, self.token_ids) if self.token_ids else tokens, self._table(block_size))

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

    def __init__(self, heads: Sequence[Head], num_blocks: int, config: RunnerConfig) -> None:
        """Start with nothing filled.

        Args:
            heads: of each stage; at most max_rows / max_seqs of them.
            num_blocks: of the target's cache.
            config: sizes; hidden_size, vocab_size and dtype are the drafting model's.
        """
        self.config = config
        self.batch = BatchIndex(config.max_rows, config.max_seqs, config.max_blocks_per_seq, config.block_size)
        self.token_ids = HostBuffer(config.max_rows, "int32")
        self._heads, self._num_blocks = heads, num_blocks
        self._num_filled = np.zeros((len(heads), num_blocks), np.int32)  # slots of each block, from its first on
        self._capacity = min(config.max_seqs, max(LOGITS_BYTES // (4 * config.vocab_size), 1))
        self._go_rows = HostBuffer(self._capacity, "int32")
        self._go_hidden: Tensor = paddle.zeros([self._capacity, config.hidden_size], config.dtype)
        self._logits: Tensor = paddle.zeros([self._capacity, config.vocab_size], "float32")
        self._sampling = SamplingBatch(self._capacity)
        self._rules = RowRules(self._sampling, config.eos_token_ids, config.vocab_limit)

    @abstractmethod
    def run(self, stage: int, spans: Sequence[Span], followed: Sequence[int] | None) -> Tensor:
        """Compute rows of a stage, at most max_rows, and return their states [rows, hidden].

        Args:
            stage: 0, 1, ...
            followed: of each row the one of the last call that leads to it; None for the text in the first stage.
        """

    def observe(self, plan: StepPlan, hidden: Tensor, slots: IntArray) -> None:
        """Take in a step of the target: empty the blocks that it began, fill where a backlog has grown."""
        size, grown = self.config.block_size, []
        ends = (plan.num_computed + plan.num_scheduled).tolist()
        for request, start, end in zip(plan.requests, plan.num_computed.tolist(), ends):
            if begun := request.block_ids[-(-start // size) : -(-end // size)]:
                self._num_filled[:, begun] = 0
            if request.max_drafts and start // size < end // size:
                known = min(end, request.num_tokens)
                if known - self._first_missing(request, len(self._heads)) >= MAX_BACKLOG:
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
            missing = self._first_missing(branch.request, min(branch.count, len(self._heads)))
            branch.start = min(missing, branch.request.num_tokens - 1)

    def _advance(self, active: list[Branch]) -> Tensor:
        """Compute what leads to the next token of each branch."""
        size, drafted, last = self.config.block_size, len(active[0].token_ids), len(self._heads) - 1
        spans = [
            b.span(b.start + drafted if drafted <= last else b.request.num_tokens + drafted - 1, size) for b in active
        ]
        followed = [row for b, span in zip(active, spans) for row in range(b.row + 1 - len(span.token_ids), b.row + 1)]
        hidden = self.run(min(drafted, last), spans, followed if drafted else None)
        end = 0
        for branch, span in zip(active, spans):
            end += len(span.token_ids)
            branch.row = end - 1
            if drafted <= last:
                self._mark(drafted, branch.request, span.start, branch.request.num_tokens)
        return hidden

    def _fill(self, wanted: Sequence[tuple[Request, int]]) -> None:
        """Compute what each request lacks before a position, in as many rounds of all stages as that takes.

        The rows of the first stage end earlier by as many positions as there are further stages.
        """
        num_stages = len(self._heads)
        ends = [(request, end + 1 - num_stages) for request, end in wanted]
        while ends := [(request, end) for request, end in ends if self._first_missing(request, num_stages) < end]:
            chunks, room = [], self.config.max_rows
            for request, end in ends:
                start = self._first_missing(request, num_stages)
                chunks.append((request, start, min(end, start + room)))
                room -= chunks[-1][2] - start
                if not room:
                    break
            for stage in range(num_stages):
                self._fill_stage(stage, chunks, self.config.max_rows - room)

    def _fill_stage(self, stage: int, chunks: list[tuple[Request, int, int]], num_rows: int) -> None:
        """Compute rows of a stage: of each request those that follow the first stage's from one position to another."""
        chunks = [(request, start + stage, end + stage) for request, start, end in chunks]
        spans = [Span(start, request.token_ids[start:end], request.block_ids) for request, start, end in chunks]
        self.run(stage, spans, range(num_rows) if stage else None)
        for request, start, end in chunks:
            self._mark(stage, request, start, end)

    def _first_missing(self, request: Request, num_stages: int) -> int:
        """Return the first position from which on the first stage must compute to fill so many stages."""
        ready = (self._num_ready(stage, request) - stage for stage in range(num_stages))
        return max(0, min(ready))

    def _num_ready(self, stage: int, request: Request) -> int:
        """Return how many positions, from 0 on, a stage has filled without a hole."""
        filled = self._num_filled[stage, request.block_ids]
        holes = np.flatnonzero(filled < self.config.block_size)
        whole = int(holes[0]) if len(holes) else len(filled)
        return whole * self.config.block_size + (int(filled[whole]) if len(holes) else 0)

    def _mark(self, stage: int, request: Request, start: int, end: int) -> None:
        """Note that the positions [start, end) are filled, as far as the request's own blocks hold them."""
        if start >= end:
            return
        size = self.config.block_size
        held = request.block_ids[start // size : -(-end // size)]
        counts = np.minimum(end - (start // size + np.arange(len(held))) * size, size)
        self._num_filled[stage, held] = np.maximum(self._num_filled[stage, held], counts)

    def _extend(self, active: list[Branch], hidden: Tensor) -> None:
        """Draw one token per branch; a branch for which none can be drawn ends."""
        head = self._heads[min(len(active[0].token_ids), len(self._heads) - 1)]
        for first in range(0, len(active), self._capacity):
            part = active[first : first + self._capacity]
            self._go_rows.array[: len(part)] = [branch.row for branch in part]
            gather_rows(hidden, self._go_rows.tensor, self._go_hidden, len(part))
            head.compute_logits(self._go_hidden, len(part), self._logits)
            for row, branch in enumerate(part):
                self._rules.write_draft(branch.request, row, len(branch.token_ids))
            sample(self._logits, self._sampling, len(part))
            for branch, token in zip(part, self._sampling.token_ids.array[: len(part)].tolist()):
                if token >= 0:
                    branch.token_ids.append(token)
                else:
                    branch.count = len(branch.token_ids)
