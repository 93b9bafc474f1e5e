# SPDX-License-Identifier: Apache-2.0
"""Predicts the times of steps and draft passes from measurements at start-up (worker/step_timing.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

MIN_SPEEDUP = 1.03  # predicted tokens per second with drafts over those without: below it, predictions are too coarse


class StepTimes:
    """Predicts the seconds of a decoding step from its rows, its requests and the length of their contexts."""

    def __init__(self, seconds: Mapping[int, float], request_s: float = 0.0, context_tokens: int = 0) -> None:
        """Interpolate between measurements (number of rows: seconds without the share of requests).

        Each request with `context_tokens` of context adds `request_s`, in proportion to its context if that is not 0.
        """
        rows = sorted(seconds)
        times = list(accumulate((seconds[r] for r in rows), max))  # more rows never take less time
        self._row_s: list[float] = np.interp(range(rows[-1] + 1), rows, times).tolist()
        self._slope_s = (times[-1] - times[0]) / max(1, rows[-1] - rows[0])
        self._request_s, self._context_tokens = request_s, context_tokens

    def contexts_s(self, num_requests: int, num_tokens: int) -> float:
        """Return what `num_requests` requests with contexts of `num_tokens` tokens in total add to a step."""
        return self._request_s * (num_tokens / self._context_tokens if self._context_tokens else num_requests)

    def rows_s(self, num_rows: int) -> float:
        """Return the seconds of a step without the share of its requests."""
        last = len(self._row_s) - 1
        return self._row_s[min(num_rows, last)] + self._slope_s * max(0, num_rows - last)

    def with_drafts(self, num_requests: int, contexts_s: float, num_drafts: int, num_prefill_rows: int) -> list[float]:
        """Return the seconds of decoding with 0 .. `num_drafts` drafts, without the share of the prefill rows."""
        first = num_requests + num_prefill_rows
        shift = contexts_s + self.rows_s(num_requests) - self.rows_s(first)
        return [self.rows_s(num_rows) + shift for num_rows in range(first, first + num_drafts + 1)]


class DraftPasses(NamedTuple):
    """The draft passes of a drafting model: their source, their maximum number and their predicted time."""

    source: str
    max_passes: int  # per step; each drafts one token per request
    pass_s: float  # seconds of a pass without the share of its requests
    request_s: float  # seconds that each request adds to a pass

    def seconds(self, num_requests: int, num_passes: int) -> float:
        """Return the time of `num_passes` passes for `num_requests` requests."""
        return num_passes * (self.pass_s + num_requests * self.request_s)


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
