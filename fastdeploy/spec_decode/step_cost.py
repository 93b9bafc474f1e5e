# SPDX-License-Identifier: Apache-2.0
"""How long steps and the calls of a drafting model take: timed at start-up, corrected by those that are computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

RATE = 0.01  # of the running moments
MOST_RATE = 0.2  # with which a step counts that stands for many
FIRST_WEIGHT = 4.0  # steps that the belief counts for with which steps of a kind begin
OUTLIER = 0.7  # a step counts at most as e^0.7 times the expected time, at least as its inverse
REFRESH = 16  # steps between computations of a line
MIN_LINE = 16  # rows that one has at least
MOST_LINES = 256  # kept where no step says anything, as all have prompts
CALL_RATE = 0.05  # of the running mean of what a request adds beyond what was timed
CALL_OUTLIER = 4.0  # times what was expected that a draft counts for at most
RIDGE = 0.02  # variance of log(rows) at which half of a seen tilt is believed


class StepCost:
    """Seconds of a decoding step: a line through the timed row counts, a cost per request, and what steps say of both.

    Steps are compared with the timed line, log(seconds / timed seconds), those without drafts by a level of their own:
    it is what drafts are held against, and handling drafts takes time whatever their number. Steps with drafts have a
    level and a tilt over log(rows), by a regression, so that they correct row counts that are never computed, too.
    While there are only steps without drafts, the other level goes the way of theirs and comes slowly back to it, and
    the tilt fades: whatever a bad moment taught about dear rows is forgotten, tried and learned again.
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
        self._num_plain = self._num_drafted = self._num_plain_in_a_row = 0
        self._plain_error = 0.0
        self._mean_rows = self._mean_error = self._variance = self._covariance = 0.0  # of steps with drafts

    def weight(self, num_requests: int, num_tokens: int) -> float:
        """Return as how many requests those count that have so many tokens together: `num_requests` hereafter."""
        return num_requests if self._request_tokens is None else round(4 * num_tokens / self._request_tokens) / 4

    def seconds(self, num_rows: int, num_requests: float) -> float:
        """Return the expected time of a step without drafts whose rows all verify."""
        return self._timed(num_rows, num_requests) * math.exp(self._plain_error)

    def line(self, num_rows: int, num_more: int, num_requests: float) -> list[float]:
        """Return the expected times of steps of num_rows rows and 0 .. num_more drafts or more, lately computed."""
        line = self._lines.get((num_rows, num_requests), [])
        if len(line) <= num_more:
            rows = np.arange(num_rows, num_rows + max(num_more, MIN_LINE) + 1)
            last = len(self._line) - 1
            timed = np.array(self._line)[np.minimum(rows, last)] + self._beyond_s * np.maximum(0, rows - last)
            error = self._mean_error + self._tilt * (np.log(rows) - self._mean_rows)
            error[0] = self._plain_error
            seconds = (timed + self._request_s * num_requests) * np.exp(error)
            line = np.maximum(seconds, seconds[0]).tolist()
            if len(self._lines) >= MOST_LINES:
                self._lines.clear()
            self._lines[num_rows, num_requests] = line
        return line

    def learn_plain(self, num_rows: int, num_requests: float, seconds: float, num_alike: int = 1) -> None:
        """Take in a step without drafts, which stands for `num_alike` steps."""
        error = self._error(num_rows, num_requests, seconds, self._plain_error)
        rate = max(min(num_alike * RATE, MOST_RATE), 1 / (FIRST_WEIGHT + self._num_plain))
        moved = rate * (error - self._plain_error)
        self._plain_error += moved
        self._num_plain += 1
        self._num_plain_in_a_row += 1
        if self._num_plain_in_a_row > 1:
            self._mean_error += moved + RATE * (self._plain_error - self._mean_error - moved)
            self._variance *= 1 - RATE
            self._covariance *= 1 - RATE
        self._refresh()

    def learn_drafted(self, num_rows: int, num_requests: float, seconds: float) -> None:
        """Take in a step with drafts."""
        above_rows = math.log(num_rows) - self._mean_rows
        believed = self._mean_error + self._tilt * above_rows
        above_error = self._error(num_rows, num_requests, seconds, believed) - self._mean_error
        rate = max(RATE, 1 / (FIRST_WEIGHT + self._num_drafted))
        self._mean_rows += (rate if self._num_drafted else 1.0) * above_rows
        self._mean_error += rate * above_error
        self._variance = (1 - rate) * (self._variance + rate * above_rows**2)
        self._covariance = (1 - rate) * (self._covariance + rate * above_rows * above_error)
        self._num_drafted += 1
        self._num_plain_in_a_row = 0
        self._refresh()

    @property
    def _tilt(self) -> float:
        return self._covariance / (self._variance + RIDGE)

    def _error(self, num_rows: int, num_requests: float, seconds: float, believed: float) -> float:
        """Return log(seconds / timed seconds), cut where it is too far from what was believed."""
        error = math.log(max(seconds, 1e-9) / self._timed(num_rows, num_requests))
        return max(believed - OUTLIER, min(believed + OUTLIER, error))

    def _refresh(self) -> None:
        if (self._num_plain + self._num_drafted) % REFRESH == 0:
            self._lines.clear()

    def _timed(self, num_rows: int, num_requests: float) -> float:
        last = len(self._line) - 1
        beyond_s = self._beyond_s * max(0, num_rows - last)
        return self._line[min(num_rows, last)] + beyond_s + self._request_s * num_requests


class CallCost:
    """Seconds of the calls of a drafting model: as timed, and what each request adds to that while serving.

    That is what a start-up does not show: a draft's handling with cold caches, and the matching that goes with it.
    """

    def __init__(self, call_s: float, request_s: float, row_s: float) -> None:
        """Start from what was timed.

        Args:
            call_s: seconds of a call without what its requests cost.
            request_s: that each request adds to a call.
            row_s: that each row adds by which a request's cache is behind its text.
        """
        self.call_s, self.request_s, self.row_s = call_s, request_s, row_s
        self.own_s = 0.0  # seconds that each request adds, however many its drafts
        self._num_asks = 0

    def seconds(self, counts: Sequence[int], num_rows: int) -> float:
        """Return what drafting counts[i] tokens for each request takes, after catching up with so many rows."""
        num_asked = len(counts) - counts.count(0)
        calls_s = max(counts) * self.call_s + sum(counts) * self.request_s
        return calls_s + num_rows * self.row_s + num_asked * self.own_s

    def learn(self, counts: Sequence[int], num_rows: int, seconds: float) -> None:
        """Take in what it took."""
        expected_s, num_asked = self.seconds(counts, num_rows), len(counts) - counts.count(0)
        surprise_s = min(seconds, CALL_OUTLIER * expected_s) - expected_s
        rate = max(CALL_RATE, 1 / (FIRST_WEIGHT + self._num_asks))
        self.own_s = max(0.0, self.own_s + rate * surprise_s / num_asked)
        self._num_asks += 1
