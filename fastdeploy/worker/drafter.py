# SPDX-License-Identifier: Apache-2.0
"""What the runners of drafting models share: caches under the target's block ids, and the choice of drafts.

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
from fastdeploy.ops.batch_index import BatchIndex
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.gather import gather_rows
from fastdeploy.ops.sampling import SamplingBatch, sample
from fastdeploy.worker.model_runner import LOGITS_BYTES, RunnerConfig
from fastdeploy.worker.row_rules import RowRules


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
        row: of the last call, the one whose state leads to the next token.
    """

    request: Request
    count: int
    scratch_block: int
    token_ids: list[int] = field(default_factory=list)
    row: int = 0

    def last(self, block_size: int) -> Span:
        """Return the row of the last token: the last draft or, before any, the request's last token."""
        position = self.request.num_tokens + len(self.token_ids) - 1
        token = self.token_ids[-1] if self.token_ids else int(self.request.token_ids[-1])
        return Span(position, [token], self.table(block_size))

    def table(self, block_size: int) -> list[int]:
        """Return the blocks of all tokens up to the last one."""
        needed = -(-(self.request.num_tokens + len(self.token_ids)) // block_size)
        held = self.request.block_ids[:needed]
        return held if len(held) == needed else [*held, self.scratch_block]


class Drafter(ABC):
    """Drafts token by token for many requests together; `advance` is what models differ in.

    Attributes:
        batch, token_ids: index arrays and tokens of a call, written by `pack`.
    """

    def __init__(self, head: Head, num_blocks: int, config: RunnerConfig) -> None:
        """Allocate the buffers.

        Args:
            num_blocks: of the target's cache.
            config: sizes; hidden_size, vocab_size and dtype are the drafting model's.
        """
        self.config = config
        self.batch = BatchIndex(config.max_rows, config.max_seqs, config.max_blocks_per_seq, config.block_size)
        self.token_ids = HostBuffer(config.max_rows, "int32")
        self._head, self._num_blocks = head, num_blocks
        self._capacity = min(config.max_seqs, max(LOGITS_BYTES // (4 * config.vocab_size), 1))
        self._go_rows = HostBuffer(self._capacity, "int32")
        self._go_hidden: Tensor = paddle.zeros([self._capacity, config.hidden_size], config.dtype)
        self._logits: Tensor = paddle.zeros([self._capacity, config.vocab_size], "float32")
        self._sampling = SamplingBatch(self._capacity)
        self._rules = RowRules(self._sampling, config.eos_token_ids, config.vocab_limit)

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[TokenArray]:
        """Return up to counts[i] tokens, int32, to follow the last one of requests[i].

        All tokens of a request but its last are computed.
        """
        branches = [Branch(r, count, self._num_blocks + i) for i, (r, count) in enumerate(zip(requests, counts))]
        active = [branch for branch in branches if branch.count > 0]
        while active:
            self._extend(active, self.advance(active))
            active = [branch for branch in active if len(branch.token_ids) < branch.count]
        return [np.array(branch.token_ids, np.int32) for branch in branches]

    @abstractmethod
    def advance(self, active: list[Branch]) -> Tensor:
        """Compute what leads to the next token of each branch: set its `row` and return the states [rows, hidden]."""

    def pack(self, spans: Sequence[Span]) -> None:
        """Describe the rows of a call: at most max_rows, of at most max_seqs sequences."""
        at = 0
        for span in spans:
            self.token_ids.array[at : at + len(span.token_ids)] = span.token_ids
            at += len(span.token_ids)
        counts = np.array([len(span.token_ids) for span in spans], np.int32)
        starts = np.array([span.start for span in spans], np.int32)
        self.batch.fill(counts, starts, np.zeros(len(spans), np.int32), [span.block_ids for span in spans])

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
