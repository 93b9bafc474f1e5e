# SPDX-License-Identifier: Apache-2.0
"""How long steps and the calls of a drafting model take: timed at start-up, corrected by those that are computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

RATE = 0.01  # of the running moments
MOST_RATE = 0.2  # with which a step counts that stands for many
OUTLIER = 0.7  # a step counts at most as e^0.7 times the expected time, at least as its inverse
REFRESH = 16  # steps between computations of a line
MIN_LINE = 16  # rows that one has at least
MOST_LINES = 256  # kept where no step says anything, as all have prompts
CALL_RATE = 0.05  # of the running mean of what calls take
CALL_OUTLIER = 4.0  # times what was expected that a draft counts for at most
RIDGE = 0.02  # variance of log(rows) at which half of a seen tilt is believed


class StepCost:
    """Seconds of a decoding step: a line through the timed row counts, a cost per request, and what steps say of both.

    Steps are compared with the timed line by a regression of log(seconds / timed seconds) on log(rows): a level and a
    tilt. Every step so corrects all row counts, those that are never computed among them. While steps have the same
    number of rows there is nothing to see a tilt in, and the timed line comes back: whatever a bad moment taught about
    dear rows is forgotten, tried and learned again.
    """

    def __init__(self, timings: Mapping[int, float], request_s: float = 0.0, request_tokens: int | None = None) -> None:
        """Start from a line and a slope.

        Args:
            timings: rows: seconds without what the requests cost; beyond the last of them the line goes straight on.
            request_s: seconds that each request adds.
            request_tokens: that a request has for that, others in proportion; None if its length does not matter.
        """
        self._request_tokens = request_tokens
        rows = sorted(timings)
        seconds = list(accumulate((timings[r] for r in rows), max))  # more rows never cost less
        self._line: list[float] = np.interp(range(rows[-1] + 1), rows, seconds).tolist()
        self._lines: dict[tuple[int, float], list[float]] = {}  # of which the next few steps make use
        self._beyond_s = (seconds[-1] - seconds[0]) / (rows[-1] - rows[0]) if len(rows) > 1 else 0.0
        self._request_s = request_s
        self._num_steps = 0
        self._mean_rows = self._mean_error = self._variance = self._covariance = 0.0

    def weight(self, num_requests: int, num_tokens: int) -> float:
        """Return as how many requests those count that have so many tokens together: `num_requests` hereafter."""
        return num_requests if self._request_tokens is None else round(4 * num_tokens / self._request_tokens) / 4

    def seconds(self, num_rows: int, num_requests: float) -> float:
        """Return the expected time of a step whose rows all verify."""
        error = self._mean_error + self._tilt * (math.log(num_rows) - self._mean_rows)
        return self._timed(num_rows, num_requests) * math.exp(error)

    def line(self, num_rows: int, num_more: int, num_requests: float) -> list[float]:
        """Return the expected times of steps of num_rows .. num_rows + num_more rows or more, lately computed."""
        line = self._lines.get((num_rows, num_requests), [])
        if len(line) <= num_more:
            rows = np.arange(num_rows, num_rows + max(num_more, MIN_LINE) + 1)
            last = len(self._line) - 1
            timed = np.array(self._line)[np.minimum(rows, last)] + self._beyond_s * np.maximum(0, rows - last)
            error = self._mean_error + self._tilt * (np.log(rows) - self._mean_rows)
            line = ((timed + self._request_s * num_requests) * np.exp(error)).tolist()
            if len(self._lines) >= MOST_LINES:
                self._lines.clear()
            self._lines[num_rows, num_requests] = line
        return line

    def learn(self, num_rows: int, num_requests: float, seconds: float, num_alike: int = 1) -> None:
        """Take in a step that was computed, and stands for `num_alike` steps."""
        expected = self.seconds(num_rows, num_requests)
        surprise = max(-OUTLIER, min(OUTLIER, math.log(max(seconds, 1e-9) / expected)))
        error = surprise + math.log(expected / self._timed(num_rows, num_requests))
        self._num_steps += 1
        rate = max(min(num_alike * RATE, MOST_RATE), 1 / self._num_steps)
        above_rows, above_error = math.log(num_rows) - self._mean_rows, error - self._mean_error
        self._mean_rows += rate * above_rows
        self._mean_error += rate * above_error
        self._variance = (1 - rate) * (self._variance + rate * above_rows**2)
        self._covariance = (1 - rate) * (self._covariance + rate * above_rows * above_error)
        if self._num_steps % REFRESH == 0:
            self._lines.clear()

    @property
    def _tilt(self) -> float:
        return self._covariance / (self._variance + RIDGE)

    def _timed(self, num_rows: int, num_requests: float) -> float:
        last = len(self._line) - 1
        beyond_s = self._beyond_s * max(0, num_rows - last)
        return self._line[min(num_rows, last)] + beyond_s + self._request_s * num_requests


class CallCost:
    """Seconds of the calls of a drafting model: as timed, times a level that follows what they take."""

    def __init__(self, call_s: float, request_s: float, row_s: float) -> None:
        """Start from what was timed.

        Args:
            call_s: seconds of a call without what its requests cost.
            request_s: that each request adds to a call.
            row_s: that each row adds by which a request's cache is behind its text.
        """
        self._call_s, self._request_s, self._row_s = call_s, request_s, row_s
        self._level = 1.0

    @property
    def call_s(self) -> float:
        """Seconds of a call without what its requests cost."""
        return self._level * self._call_s

    @property
    def request_s(self) -> float:
        """Seconds that a request adds to a call."""
        return self._level * self._request_s

    @property
    def row_s(self) -> float:
        """Seconds that a row adds that is caught up with."""
        return self._level * self._row_s

    def seconds(self, counts: Sequence[int], num_rows: int) -> float:
        """Return what drafting counts[i] tokens for each request takes, after catching up with so many rows."""
        return max(counts) * self.call_s + sum(counts) * self.request_s + num_rows * self.row_s

    def learn(self, counts: Sequence[int], num_rows: int, seconds: float) -> None:
        """Take in what it took."""
        surprise = min(seconds / self.seconds(counts, num_rows), CALL_OUTLIER)
        self._level *= 1.0 + CALL_RATE * (surprise - 1.0)
