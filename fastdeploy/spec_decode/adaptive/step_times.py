# SPDX-License-Identifier: Apache-2.0
"""Predicted times of steps and draft passes, from measurements at start-up (worker/step_timing.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

HURDLE = 1.03  # tokens per second of a step with drafts, over those without, that drafts must promise


class StepTimes:
    """Predicts the seconds of a decoding step from its rows, its requests and the length of their contexts."""

    def __init__(self, seconds: Mapping[int, float], request_s: float = 0.0, context_tokens: int = 0) -> None:
        """Join measurements by straight lines.

        Args:
            seconds: number of rows: seconds of the step without the share of its requests. The last line goes on
                beyond the largest number of rows.
            request_s: seconds that each request adds, most of them for reading its keys and values.
            context_tokens: context of each request in that measurement; 0 if the length makes no difference.
        """
        rows = sorted(seconds)
        times = list(accumulate((seconds[r] for r in rows), max))  # more rows never take less time
        self._row_s: list[float] = np.interp(range(rows[-1] + 1), rows, times).tolist()
        self._slope_s = (times[-1] - times[0]) / (rows[-1] - rows[0]) if len(rows) > 1 else 0.0
        self._request_s, self._context_tokens = request_s, context_tokens

    def contexts_s(self, num_requests: int, num_tokens: int) -> float:
        """Return what `num_requests` requests with `num_tokens` tokens of context in all add to a step."""
        weight = num_tokens / self._context_tokens if self._context_tokens else num_requests
        return self._request_s * weight

    def rows_s(self, num_rows: int) -> float:
        """Return the seconds of a step without the share of its requests."""
        last = len(self._row_s) - 1
        return self._row_s[num_rows] if num_rows <= last else self._row_s[last] + self._slope_s * (num_rows - last)

    def with_drafts(self, num_requests: int, contexts_s: float, num_drafts: int, num_prefill_rows: int) -> list[float]:
        """Return the seconds of decoding with 0, 1, ... `num_drafts` drafts.

        Beside prefill rows the drafts are charged with what they add to the whole step.
        """
        first = num_requests + num_prefill_rows
        if first + num_drafts < len(self._row_s):
            times = self._row_s[first : first + num_drafts + 1]
        else:
            times = [self.rows_s(first + count) for count in range(num_drafts + 1)]
        shift = contexts_s + self.rows_s(num_requests) - times[0]
        return [seconds + shift for seconds in times]


@dataclass(frozen=True)
class DraftPasses:
    """A drafting model and the predicted time of its draft passes.

    Attributes:
        source: name of the drafts in `Draft.source`.
        max_passes: tokens that the model drafts at most for a request, one per pass.
        pass_s: seconds of a pass without the share of its requests.
        request_s: seconds that each request adds to a pass.
    """

    source: str
    max_passes: int
    pass_s: float
    request_s: float

    def seconds(self, num_requests: int, num_passes: int) -> float:
        """Return the time of drafting `num_passes` tokens for each of `num_requests` requests."""
        return num_passes * (self.pass_s + num_requests * self.request_s)


def most_profitable(acceptance: Sequence[Sequence[float]], num_requests: int, times: Sequence[float]) -> list[int]:
    """Return how many drafts of each request give the most tokens per second.

    The probabilities fall along a draft, so that the likeliest tokens of all drafts are a prefix of each.

    Args:
        acceptance: of each draft's tokens, the probability that it and all tokens before it are accepted.
        num_requests: that decode, with or without drafts.
        times: seconds of a step with 0, 1, ... drafts.
    """
    likeliest = sorted([(p, i) for i, probabilities in enumerate(acceptance) for p in probabilities], reverse=True)
    emitted, best = float(num_requests), 0
    best_rate = HURDLE * emitted / times[0]
    for count, (probability, _) in enumerate(likeliest, 1):
        emitted += probability
        if emitted > best_rate * times[count]:
            best, best_rate = count, emitted / times[count]
    lengths = [0] * len(acceptance)
    for _, i in likeliest[:best]:
        lengths[i] += 1
    return lengths
