# SPDX-License-Identifier: Apache-2.0
"""What proposers that run a model share."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy.core.request import NO_DRAFT, Draft, DraftQuota, Request
from fastdeploy.spec_decode.proposers.base import DraftRunner, Proposer


class ModelProposer(Proposer):
    """Runs its model once per draft.

    It keeps nothing of a request: what the model knows of it lies in the cache, under the request's own blocks.
    """

    is_model = True

    def __init__(self, runner: DraftRunner, num_model_steps: int) -> None:
        self._runner = runner
        self._num_model_steps = num_model_steps

    def start(self, request: Request) -> None:
        """Need nothing of the request."""

    def propose(self, requests: Sequence[Request], quotas: Sequence[DraftQuota]) -> list[Draft]:
        """Draft for all requests together, one packed call per draft pass."""
        counts = [min(quota.max_drafts, quota.max_draft_passes, self._num_model_steps) for quota in quotas]
        if not any(counts):
            return [NO_DRAFT] * len(requests)
        drafts = self._runner.draft(requests, counts)
        return [Draft(tokens, self.name) if len(tokens) else NO_DRAFT for tokens in drafts]

    def finish(self, request: Request) -> None:
        """Have nothing to forget."""
