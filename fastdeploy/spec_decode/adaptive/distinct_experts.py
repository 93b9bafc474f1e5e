# SPDX-License-Identifier: Apache-2.0
"""Predicts how many distinct experts a step reads, from what the routers have reported of earlier steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import expm1, log, log1p

from numpy.typing import NDArray

INITIAL_EXPONENT = 0.8  # of a source without steps; if it were too high, its drafts would never be tried
MEAN_WEIGHT = 0.2  # weight of a step in the exponents, which therefore follow the last five steps
MIN_IDLE_SHARE = 0.02  # of the experts: if fewer have no row, their number says little about the rows


class DistinctExperts:
    """The number of distinct experts of a step, all layers together, and the seconds that reading them takes.

    A row that is routed independently of the others leaves the share 1 - k / E of the idle experts idle. Rows that are
    routed alike count for fewer: m rows of a request for m ** exponent, with an exponent for each source of drafts, and
    B requests for B ** exponent. The exponents are learned from the steps.
    """

    def __init__(self, load: NDArray, num_experts: int, num_chosen: int, expert_s: float) -> None:
        """Start with independent requests.

        Args:
            load: [layers, 2] int32; in each step the routers set its first column to the number of distinct experts.
            num_experts, num_chosen: experts of a layer (E), and of them those of a row (k).
            expert_s: seconds of reading one expert.
        """
        self.expert_s = expert_s
        self._load, self._num_experts = load, num_experts * len(load)
        self._log_idle = log1p(-num_chosen / num_experts)  # logarithm of the share that a row leaves idle
        self._requests = 1.0  # exponent of requests
        self._sources: defaultdict[str, float] = defaultdict(lambda: INITIAL_EXPONENT)  # exponents

    def seconds(self, num_requests: int, sources: Sequence[str] = (), counts: Iterable[int] = (0,)) -> list[float]:
        """Return the seconds that experts take in steps with counts[i] drafts of requests with these sources."""
        return [self.expert_s * num_experts for num_experts in self.expected(num_requests, sources, counts)]

    def expected(self, num_requests: int, sources: Sequence[str], counts: Iterable[int]) -> list[float]:
        """Return the expected number of distinct experts of such steps."""
        drafting, exponent = len(sources) or 1, self._exponent(sources)
        log_idle = self._log_idle * num_requests ** (self._requests - 1)
        rows = [num_requests + drafting * ((1 + count / drafting) ** exponent - 1) for count in counts]
        return [-self._num_experts * expm1(log_idle * num_rows) for num_rows in rows]

    def update(self, num_requests: int, sources: Sequence[str], num_drafts: int) -> None:
        """Learn from the step that has just run, which had no prefill rows.

        Steps without drafts tell how requests are routed, those with drafts how the rows of each request are.
        """
        idle_share = 1 - float(self._load[:, 0].sum()) / self._num_experts
        if idle_share < MIN_IDLE_SHARE:
            return
        rows = log(idle_share) / self._log_idle  # so many independent rows have as many experts
        if num_drafts:
            rows = 1 + (rows * num_requests ** (1 - self._requests) - num_requests) / len(sources)
            change = MEAN_WEIGHT * (_exponent(rows, 1 + num_drafts / len(sources)) - self._exponent(sources))
            for source in set(sources):
                self._sources[source] += change
        elif num_requests > 1:
            self._requests += MEAN_WEIGHT * (_exponent(rows, num_requests) - self._requests)

    def limit_evidence(self) -> None:
        """Let the exponents of sources be learned anew."""
        self._sources.clear()

    def _exponent(self, sources: Sequence[str]) -> float:
        return sum([self._sources[source] for source in sources]) / len(sources) if sources else 1.0


def _exponent(independent: float, rows: float) -> float:
    """Return the exponent in [0, 1] with which so many rows count for so many independent rows."""
    return min(1.0, log(max(1.0, independent)) / log(rows))
