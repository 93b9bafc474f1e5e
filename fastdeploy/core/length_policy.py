# SPDX-License-Identifier: Apache-2.0
"""The interface between the engine, its scheduler and the policy that chooses how many drafts each request gets.

docs/design/adaptive-length.md shows the calls of a step in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastdeploy.core.request import DraftQuota, Request
from fastdeploy.core.stats import DraftLengthStats
from fastdeploy.core.step import StepPlan

Clock = Callable[[], float]  # seconds; waiting for other processes should not count


class LengthPolicy:
    """Fixed length: every request gets as many drafts as fit, and all are verified.

    Attributes:
        is_adaptive: whether lengths depend on measured times, so that drafts may be proposed within steps only.
    """

    is_adaptive = False

    def trim_drafts(self, decoding: Sequence[Request], num_prefill_rows: int) -> None:
        """Start a step: trim the drafts of the `decoding` requests; `num_prefill_rows` more rows are expected."""

    def draft_quotas(self, plan: StepPlan, ready: Sequence[Request]) -> list[DraftQuota]:
        """Record a committed step; return a quota for each of the `ready` requests, or [] to propose nothing."""
        return [DraftQuota(request.draft_room, request.draft_room) for request in ready]

    def on_drafts_proposed(self, requests: Sequence[Request]) -> None:
        """Record the drafts of the requests before they are trimmed."""

    def finish_request(self, request: Request) -> None:
        """Drop the state of a request that finished or was aborted."""

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Raise AssertionError if state of other than the unfinished `requests` is kept."""

    def stats(self) -> DraftLengthStats:
        """Return counters and the current state."""
        return DraftLengthStats()
