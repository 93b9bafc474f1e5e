# SPDX-License-Identifier: Apache-2.0
"""Plain decoding: no drafts."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy.core.request import NO_DRAFT, Draft, DraftQuota, Request
from fastdeploy.spec_decode.proposers.base import Proposer


class NaiveProposer(Proposer):
    """Proposes nothing; the baseline of every comparison."""

    name = "naive"

    def start(self, request: Request) -> None:
        """Do nothing."""

    def propose(self, requests: Sequence[Request], quotas: Sequence[DraftQuota]) -> list[Draft]:
        """Return an empty draft per request."""
        return [NO_DRAFT] * len(requests)

    def finish(self, request: Request) -> None:
        """Do nothing."""
