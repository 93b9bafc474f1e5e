# SPDX-License-Identifier: Apache-2.0
"""How many drafts each request gets: the interface between the engine, its scheduler and a policy.

A step makes four calls, in this order:

1. The scheduler calls `LengthPolicy.trim_drafts` before it plans: drafts are cut to the tokens that will be verified.
2. After the commit the engine calls `LengthPolicy.draft_quotas`: the policy takes in the step and says what may be
   proposed for the next one.
3. The engine calls `Proposer.propose` with these quotas.
4. The engine calls `LengthPolicy.on_drafts_proposed`: the requests now hold their drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastdeploy.core.request import DraftQuota, Request
from fastdeploy.core.stats import DraftLengthStats
from fastdeploy.core.step import StepPlan

Clock = Callable[[], float]  # seconds; those that the calling thread waits for other processes should not count


class LengthPolicy:
    """Fixed length: every request gets as many drafts as fit, and all are verified."""

    def trim_drafts(self, decoding: Sequence[Request], num_prefill_rows: int) -> None:
        """Begin a step: cut `request.draft` of the requests that decode, beside about `num_prefill_rows` other rows."""

    def draft_quotas(self, plan: StepPlan, ready: Sequence[Request]) -> list[DraftQuota]:
        """Take in a committed step; return a quota for each of the `ready` requests, or [] to propose nothing."""
        return [DraftQuota(request.draft_room, request.draft_room) for request in ready]

    def on_drafts_proposed(self, requests: Sequence[Request]) -> None:
        """Take in that the requests hold what was proposed."""

    def finish_request(self, request: Request) -> None:
        """Drop the state of a request that ended."""

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Raise AssertionError if state of requests other than the live `requests` is kept."""

    def stats(self) -> DraftLengthStats:
        """Return counters and the current state."""
        return DraftLengthStats()
