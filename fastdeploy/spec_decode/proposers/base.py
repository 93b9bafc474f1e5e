# SPDX-License-Identifier: Apache-2.0
"""What every proposer does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from fastdeploy.core.request import Draft, DraftQuota, Request
from fastdeploy.core.stats import SuffixCacheStats


class DraftRunner(Protocol):
    """Runs a drafting model for a proposer: see spec_decode.drafting.drafter.Drafter."""

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Return up to counts[i] tokens to follow the last one of requests[i]."""


class Proposer(ABC):
    """Guesses the tokens that follow a request's last one.

    A proposer sees a request from `start` to `finish`, reads what was emitted from `request.token_ids`, and may keep
    any state: drafts change the speed of decoding, never its text.
    """

    name: str
    needs_hidden_states = False
    is_model = False

    @abstractmethod
    def start(self, request: Request) -> None:
        """Meet a request whose prompt is known."""

    @abstractmethod
    def propose(self, requests: Sequence[Request], quotas: Sequence[DraftQuota]) -> list[Draft]:
        """Return one draft per request, within its quota; a draft may be empty."""

    @abstractmethod
    def finish(self, request: Request) -> None:
        """Forget a request that ended, for whatever reason."""

    def suffix_cache_stats(self) -> SuffixCacheStats | None:
        """Return what suffix decoding keeps; None where there is none."""
        return None

    def check_integrity(self, requests: Sequence[Request]) -> None:  # noqa: B027  # a proposer may keep no state
        """Raise AssertionError unless state is kept for exactly the live `requests`."""
