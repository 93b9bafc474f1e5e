# SPDX-License-Identifier: Apache-2.0
"""The interface of proposers."""

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
    """Proposes tokens to follow a request's last one.

    `start` and `finish` enclose all other calls for a request. Emitted tokens are read from `request.token_ids`. A
    proposer may keep any state, because drafts change the speed of decoding and never its output.

    Attributes:
        name: the source of its drafts.
    """

    name: str

    @abstractmethod
    def start(self, request: Request) -> None:
        """Allocate the state of a request, whose tokens so far are known: usually the prompt."""

    @abstractmethod
    def propose(self, requests: Sequence[Request], quotas: Sequence[DraftQuota]) -> list[Draft]:
        """Return one draft per request, within its quota; a draft may be empty."""

    @abstractmethod
    def finish(self, request: Request) -> None:
        """Free the state of a request that finished or was aborted."""

    def restart(self, request: Request) -> None:
        """Make the state of a running request anew, because `propose` raised."""
        self.finish(request)
        self.start(request)

    def suffix_cache_stats(self) -> SuffixCacheStats | None:
        """Return the counters of suffix decoding; None for other methods."""
        return None

    def check_integrity(self, requests: Sequence[Request]) -> None:  # noqa: B027  # a proposer may have no state
        """Raise AssertionError unless there is state for exactly the unfinished `requests`."""
