# SPDX-License-Identifier: Apache-2.0
"""What every proposer does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from fastdeploy.core.request import Draft, Request
from fastdeploy.core.stats import SuffixCacheStats


class DraftRunner(Protocol):
    """Runs a drafting model for a proposer: see spec_decode.drafting.drafter.Drafter."""

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Return up to counts[i] tokens to follow the last one of requests[i]."""


class Proposer(ABC):
    """Guesses the tokens that follow a request's last one.

    A proposer sees a request from `start` to `finish`, is told by `observe` what was really emitted, and may keep
    whatever state it likes: drafts change the speed of decoding, never its text.
    """

    name: str
    needs_hidden_states = False
    is_model = False

    @abstractmethod
    def start(self, request: Request) -> None:
        """Meet a request whose prompt is known."""

    @abstractmethod
    def observe(self, requests: Sequence[Request], emitted: Sequence[Sequence[int]]) -> None:
        """Learn the tokens that a step emitted; they already stand in `request.token_ids`."""

    @abstractmethod
    def propose(
        self, requests: Sequence[Request], caps: Sequence[int], steps: Sequence[int] | None = None
    ) -> list[Draft]:
        """Return one draft per request; a draft may be empty.

        Args:
            caps: most tokens of each, at least 1.
            steps: most calls of a drafting model for each; None: as many as it takes.
        """

    @abstractmethod
    def finish(self, request: Request) -> None:
        """Forget a request that ended, for whatever reason."""

    def suffix_cache_stats(self) -> SuffixCacheStats | None:
        """Return what suffix decoding keeps; None where there is none."""
        return None

    def check_integrity(self, requests: Sequence[Request]) -> None:  # noqa: B027  # a proposer may keep no state
        """Raise AssertionError unless state is kept for exactly the live `requests`."""
