# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: a layer beside the target drafts from the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy.core.request import NO_DRAFT, Draft, Request
from fastdeploy.spec_decode.base import DraftRunner, Proposer


class MTPProposer(Proposer):
    """Runs the layer once per draft, on its own output from the second on.

    It keeps nothing of a request: what the layer knows of it lies in the cache, under the request's own blocks.
    """

    name = "mtp"
    is_model = True
    needs_hidden_states = True

    def __init__(self, runner: DraftRunner, num_model_steps: int) -> None:
        self._runner = runner
        self._num_model_steps = num_model_steps

    def start(self, request: Request) -> None:
        """Need nothing of the request."""

    def observe(self, requests: Sequence[Request], emitted: Sequence[Sequence[int]]) -> None:
        """Need nothing of the tokens: the layer sees them with the target's states."""

    def propose(self, requests: Sequence[Request], caps: Sequence[int]) -> list[Draft]:
        """Draft for all requests together, one packed call per model step."""
        drafts = self._runner.draft(requests, [min(cap, self._num_model_steps) for cap in caps])
        return [Draft(tokens, self.name) if len(tokens) else NO_DRAFT for tokens in drafts]

    def finish(self, request: Request) -> None:
        """Have nothing to forget."""
