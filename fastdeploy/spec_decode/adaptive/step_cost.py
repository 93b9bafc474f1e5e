# SPDX-License-Identifier: Apache-2.0
"""How long steps and the calls of a drafting model take: timed at start-up, corrected by those that are computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

RATE = 0.01  # of the running moments
KNOWN = 8  # steps of a kind without drafts that are enough to hold drafts against
MOST_RATE = 0.2  # with which a step counts that stands for many
FIRST_WEIGHT = 4.0  # steps that the belief counts for with which steps of a kind begin
OUTLIER = 0.7  # a step counts at most as e^0.7 times the expected time, at least as its inverse
REFRESH = 16  # steps between computations of a line
MIN_LINE = 16  # rows that one has at least
MOST_LINES = 256  # kept where no step says anything, as all have prompts
CALL_RATE = 0.05  # of the running mean of what a request adds beyond what was timed
CALL_OUTLIER = 4.0  # times what was expected that a draft counts for at most
RIDGE = 0.02  # variance of what rows add, in steps, at which half of a seen tilt is believed


class StepCost:
    """Seconds of a decoding step: a line through the timed row counts, a cost per request, and what steps say of both.

    Steps without drafts are compared with the timed line, log(seconds / timed seconds), by a level for every doubling
    of the requests and of their tokens: it is what drafts are held against. Steps with drafts are seen beside those:
    in steps without, their rows were timed to take so much more, and take a surplus of that, in part for handling
    drafts, whatever their number, in part with their rows. A regression parts these, so that row counts are corrected
    that are never computed. While there are only steps without drafts the surplus fades: whatever a bad moment taught
    about dear rows is forgotten, tried and learned again.
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
        self._line = np.interp(range(rows[-1] + 1), rows, seconds)
        self._lines: dict[tuple[int, int, float], list[float]] = {}  # of which the next few steps make use
        self._beyond_s = (seconds[-1] - seconds[0]) / (rows[-1] - rows[0]) if len(rows) > 1 else 0.0
        self._request_s = request_s
        self._num_steps = self._num_drafted = self._num_plain_in_a_row = 0
        self._levels: dict[tuple[int, int], tuple[float, int]] = {}  # of steps without drafts: error, number of steps
        self._last = 0.0, 0  # what begins as the level of another kind of steps
        self._mean_more = self._mean_surplus = self._variance = self._covariance = 0.0  # of steps with drafts

    def weight(self, num_requests: int, num_tokens: int) -> float:
        """Return as how many requests those count that have so many tokens together."""
        return num_requests if self._request_tokens is None else round(4 * num_tokens / self._request_tokens) / 4

    def seconds(self, num_requests: int, weight: float) -> float:
        """Return the expected time of a step without drafts."""
        return self._timed(num_requests, weight) * math.exp(self._level(num_requests, weight))

    def is_known(self, num_requests: int, weight: float) -> bool:
        """Return True if enough steps without drafts were seen of about so many requests of about that length."""
        return self._levels.get(_kind(num_requests, weight), self._last)[1] >= KNOWN

    def line(self, num_requests: int, num_more: int, weight: float, num_prompt_rows: int = 0) -> list[float]:
        """Return the expected times of steps with 0 .. num_more drafts or more, lately computed."""
        key = num_requests, num_prompt_rows, weight
        line = self._lines.get(key, [])
        if len(line) <= num_more:
            first, last = num_requests + num_prompt_rows, len(self._line) - 1
            rows = np.arange(first, first + max(num_more, MIN_LINE) + 1)
            timed = self._line[np.minimum(rows, last)] + self._beyond_s * np.maximum(0, rows - last)
            plain_s = self._timed(num_requests, weight)
            more = (timed - timed[0]) / plain_s
            more[1:] += self._mean_surplus + self._tilt * (more[1:] - self._mean_more)
            seconds = self._timed(first, weight) + plain_s * np.maximum(0.0, more)
            line = (math.exp(self._level(num_requests, weight)) * seconds).tolist()
            if len(self._lines) >= MOST_LINES:
                self._lines.clear()
            self._lines[key] = line
        return line

    def learn_plain(
        self, num_requests: int, weight: float, seconds: float, num_alike: int = 1, most_rate: float = MOST_RATE
    ) -> None:
        """Take in a step without drafts, which stands for `num_alike` steps, with a rate of `most_rate` at most."""
        kind = _kind(num_requests, weight)
        level, count = self._levels.get(kind, self._last)
        error = math.log(max(seconds, 1e-9) / self._timed(num_requests, weight)) - level
        rate = max(min(num_alike * RATE, most_rate), 1 / (1 + count))
        level += rate * max(-OUTLIER, min(OUTLIER, error))
        self._levels[kind] = level, count + 1
        self._last = level, 0
        self._num_plain_in_a_row += 1
        if self._num_plain_in_a_row > 1:
            self._mean_surplus *= 1 - RATE
            self._variance *= 1 - RATE
            self._covariance *= 1 - RATE
        self._refresh()

    def learn_drafted(self, num_requests: int, num_drafts: int, weight: float, seconds: float) -> None:
        """Take in a step with drafts."""
        plain_s = self._timed(num_requests, weight)
        more = self._timed(num_requests + num_drafts, weight) / plain_s - 1.0
        above_more = more - self._mean_more
        believed = 1.0 + max(0.0, more + self._mean_surplus + self._tilt * above_more)
        error = math.log(max(seconds, 1e-9) / (plain_s * believed)) - self._level(num_requests, weight)
        taken = believed * math.exp(max(-OUTLIER, min(OUTLIER, error)))
        above_surplus = taken - 1.0 - more - self._mean_surplus
        rate = max(RATE, 1 / (FIRST_WEIGHT + self._num_drafted))
        self._mean_more += (rate if self._num_drafted else 1.0) * above_more
        self._mean_surplus += rate * above_surplus
        self._variance = (1 - rate) * (self._variance + rate * above_more**2)
        self._covariance = (1 - rate) * (self._covariance + rate * above_more * above_surplus)
        self._num_drafted += 1
        self._num_plain_in_a_row = 0
        self._refresh()

    @property
    def _tilt(self) -> float:
        return self._covariance / (self._variance + RIDGE)

    def _level(self, num_requests: int, weight: float) -> float:
        return self._levels.get(_kind(num_requests, weight), self._last)[0]

    def _refresh(self) -> None:
        self._num_steps += 1
        if self._num_steps % REFRESH == 0:
            self._lines.clear()

    def _timed(self, num_rows: int, weight: float) -> float:
        last = len(self._line) - 1
        beyond_s = self._beyond_s * max(0, num_rows - last)
        return float(self._line[min(num_rows, last)]) + beyond_s + self._request_s * weight


def _kind(num_requests: int, weight: float) -> tuple[int, int]:
    return num_requests.bit_length(), int(4 * weight).bit_length()


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
