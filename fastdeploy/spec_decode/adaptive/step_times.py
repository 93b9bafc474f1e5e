# SPDX-License-Identifier: Apache-2.0
"""Predicts the times of steps and draft passes from measurements at start-up (worker/step_timing.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from fastdeploy.spec_decode.adaptive.distinct_experts import DistinctExperts

MIN_SPEEDUP = 1.03  # predicted tokens per second with drafts over those without: below it, predictions are too coarse


class StepTimes:
    """Predicts the seconds of a decoding step from its rows, its requests and the length of their contexts.

    The `experts` of a mixture of experts add their share; None for dense models. Where drafts are described by their
    sources, there is one for each request that has a draft.
    """

    def __init__(
        self,
        seconds: Mapping[int, float],
        request_s: float = 0.0,
        context_tokens: int = 0,
        experts: DistinctExperts | None = None,
        row_context_s: float = 0.0,
    ) -> None:
        """Interpolate between measurements (number of rows: seconds without the other shares).

        Each request with `context_tokens` of context adds `request_s`, in proportion to its context if that is not 0.
        Each row, a request's first one too, adds `row_context_s` per token of its context.
        """
        rows = sorted(seconds)
        times = list(accumulate((seconds[r] for r in rows), max))  # more rows never take less time
        self._row_s: list[float] = np.interp(range(rows[-1] + 1), rows, times).tolist()
        self._slope_s = (times[-1] - times[0]) / max(1, rows[-1] - rows[0])
        self._request_s, self._context_tokens, self.experts = request_s, context_tokens, experts
        self._row_context_s = row_context_s

    def requests_s(self, num_requests: int, num_tokens: int) -> float:
        """Return what requests with contexts of `num_tokens` tokens in total add to a step without drafts."""
        contexts_s = self._request_s * (num_tokens / self._context_tokens if self._context_tokens else num_requests)
        contexts_s += self._row_context_s * num_tokens
        return contexts_s + self.experts.seconds(num_requests)[0] if self.experts and num_requests else contexts_s

    def rows_s(self, num_rows: int) -> float:
        """Return the seconds of a step without the shares of its requests and experts."""
        last = len(self._row_s) - 1
        return self._row_s[min(num_rows, last)] + self._slope_s * max(0, num_rows - last)

    def drafts_s(self, num_requests: int, num_tokens: int, sources: Sequence[str], num_drafts: int) -> float:
        """Return what drafts add to a step without prefill rows; the arguments are those of `requests_s`."""
        rows_s = self.rows_s(num_requests + num_drafts) - self.rows_s(num_requests)
        rows_s += num_drafts * self._draft_context_s(num_requests, num_tokens)
        if self.experts is None:
            return rows_s
        plain_s, drafted_s = self.experts.seconds(num_requests, sources, (0, num_drafts))
        return rows_s + drafted_s - plain_s

    def with_drafts(
        self, num_requests: int, num_tokens: int, sources: Sequence[str], num_drafts: int, num_prefill_rows: int
    ) -> list[float]:
        """Return the seconds of decoding with 0 .. `num_drafts` drafts, without the share of the prefill rows."""
        first = num_requests + num_prefill_rows
        shift = self.requests_s(num_requests, num_tokens) + self.rows_s(num_requests) - self.rows_s(first)
        context_s = self._draft_context_s(num_requests, num_tokens)
        times = [self.rows_s(first + n) + shift + n * context_s for n in range(num_drafts + 1)]
        if self.experts is None:
            return times
        experts_s = self.experts.seconds(first, sources, range(num_drafts + 1))
        return [rows_s + drafted_s - experts_s[0] for rows_s, drafted_s in zip(times, experts_s)]

    def _draft_context_s(self, num_requests: int, num_tokens: int) -> float:
        """Return what attending to a context of average length adds for each draft."""
        return self._row_context_s * num_tokens / max(1, num_requests)


class DraftPasses(NamedTuple):
    """The draft passes of a drafting model: their source, their maximum number and their predicted times."""

    source: str
    max_passes: int  # per step; each drafts one token per request
    first: StepTimes  # of the first pass and all that is done once, by the requests
    other: StepTimes  # of each further pass, by the requests

    def seconds(self, num_requests: int, num_passes: int) -> float:
        """Return the time of `num_passes` passes, at least one, for `num_requests` requests."""
        return self.first.rows_s(num_requests) + (num_passes - 1) * self.other.rows_s(num_requests)


def most_profitable(acceptance: Sequence[Sequence[float]], num_requests: int, times: Sequence[float]) -> list[int]:
    """Return how many drafts of each request give the most tokens per second.

    acceptance[i][j] is the probability that draft tokens 0 .. j are all accepted; a step with n drafts takes times[n].
    """
    likeliest = sorted([(p, i) for i, probabilities in enumerate(acceptance) for p in probabilities], reverse=True)
    num_emitted, best = float(num_requests), 0
    best_rate = MIN_SPEEDUP * num_emitted / times[0]
    for count, (probability, _) in enumerate(likeliest, 1):
        num_emitted += probability
        if num_emitted > best_rate * times[count]:
            best, best_rate = count, num_emitted / times[count]
    lengths = [0] * len(acceptance)
    for _, i in likeliest[:best]:
        lengths[i] += 1
    return lengths
