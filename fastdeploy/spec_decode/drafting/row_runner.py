# SPDX-License-Identifier: Apache-2.0
"""What the runners of heads without attention have in common: they draft from one state of the target per request.

They read the state of the token before the last one, in the output of the target's last step. Nothing is stored, and a
request that was not part of that step gets no draft.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from fastdeploy.core.request import Request
from fastdeploy.core.step import StepPlan
from fastdeploy.spec_decode.drafting.base import Drafter, no_drafts
from fastdeploy.worker.model_runner import RunnerConfig


class RowHead(Protocol):
    """A head without attention.

    Attributes:
        num_drafts: most drafts that it makes.
        head_format: weight format of the matrices of logits.
        num_weight_bytes, num_head_bytes: bytes of the weights that are not the target's, and of these matrices.
    """

    num_drafts: int
    head_format: str
    num_weight_bytes: int
    num_head_bytes: int


@dataclass(frozen=True, slots=True)
class DraftInput:
    """A request that gets drafts.

    Attributes:
        row: of the target's last step, which has the state that the head reads.
        count: number of drafts.
    """

    request: Request
    row: int
    count: int


class RowRunner(Drafter):
    """Drafts with a head from the output of the target's last step."""

    num_stages = 0  # with caches

    def __init__(self, head: RowHead, config: RunnerConfig) -> None:
        """Start without rows to draft from."""
        self.head, self.config = head, config
        self._first_rows: WeakKeyDictionary[Request, tuple[int, range]] = WeakKeyDictionary()  # of the last step

    def describe(self) -> dict[str, Any]:
        """Return how many drafts the head makes, and the bytes that it adds to the target's."""
        return {
            "num_drafts": self.head.num_drafts,
            "head": self.head.head_format,
            "weights_bytes": self.head.num_weight_bytes,
            "heads_bytes": self.head.num_head_bytes,
        }

    def begin_step(self, plan: StepPlan) -> bool:
        """Take note of the rows and positions of each request."""
        self._first_rows.clear()
        row = 0
        for scheduled in plan.requests:
            start, count = scheduled.num_computed_tokens, scheduled.num_scheduled_tokens
            self._first_rows[scheduled.request] = row, range(start, start + count)
            row += count
        return False

    def reset(self) -> None:
        """Make no drafts before the next step."""
        self._first_rows.clear()

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Return drafts as `Drafter` says; none for a request without a row in the last step."""
        drafts, most = no_drafts(requests), self.head.num_drafts
        rows = [self._row_of(request) for request in requests]
        order = sorted((i for i, row in enumerate(rows) if row is not None and counts[i]), key=lambda i: -counts[i])
        if order:
            found = self._draft([DraftInput(requests[i], rows[i] or 0, min(counts[i], most)) for i in order])
            for i, tokens in zip(order, found, strict=True):
                drafts[i] = tokens
        return drafts

    def draft_timed(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Draft from the first row of whatever step was the last one."""
        for request in requests:
            position = request.num_tokens - 2
            self._first_rows[request] = 0, range(position, position + 1)
        return self.draft(requests, counts)

    @abstractmethod
    def _draft(self, inputs: Sequence[DraftInput]) -> list[list[int]]:
        """Return the drafts of each request, of which there is at least one; they are in descending order of counts."""

    def _row_of(self, request: Request) -> int | None:
        """Return the row of the last step that has the state of the token before the last one."""
        first, positions = self._first_rows.get(request, (0, range(0)))
        position = request.num_tokens - 2
        return first + position - positions.start if position in positions else None
