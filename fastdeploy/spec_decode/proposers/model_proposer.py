# SPDX-License-Identifier: Apache-2.0
"""Speculation with a drafting model: a draft model, layers for multi-token prediction, or a trained head."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy.core.request import NO_DRAFT, Draft, DraftQuota, Request
from fastdeploy.spec_decode.proposers.base import DraftRunner, Proposer


class ModelProposer(Proposer):
    """Drafts with a drafting model, which takes one draft pass per token unless its drafts do not depend on each other.

    It has no state per request: the model's keys and values are in its KV cache, under the block ids of the request.
    """

    def __init__(self, name: str, runner: DraftRunner, max_draft_passes: int) -> None:
        """Store the model's runner.

        Args:
            name: the source of its drafts: the method.
            runner: of the model.
            max_draft_passes: most draft passes of a step.
        """
        self.name = name
        self._runner = runner
        self._max_draft_passes = max_draft_passes

    def start(self, request: Request) -> None:
        """Do nothing."""

    def propose(self, requests: Sequence[Request], quotas: Sequence[DraftQuota]) -> list[Draft]:
        """Draft for all requests together."""
        counts = [
            min(quota.max_drafts, quota.max_draft_passes, self._max_draft_passes) if request.drafts_by_model else 0
            for request, quota in zip(requests, quotas)
        ]
        if not any(counts):
            return [NO_DRAFT] * len(requests)
        drafts = self._runner.draft(requests, counts)
        return [Draft(token_ids, self.name) if token_ids else NO_DRAFT for token_ids in drafts]

    def finish(self, request: Request) -> None:
        """Do nothing."""
