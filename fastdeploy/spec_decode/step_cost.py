# SPDX-License-Identifier: Apache-2.0
"""How long steps and the calls of a drafting model take: timed at start-up, corrected by those that are computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import accumulate
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Times = TypeVar("Times", float, NDArray[np.float64])

RATE = 0.01  # of the running moments
MOST_RATE = 0.4  # with which a step counts that stands for many
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

    Steps are compared with the timed line, and each doubling of the requests has a level of its own for that: what a
    step takes beside its rows, as Python, is a large part of it for few and a small one for many. A level begins as the
    one of the steps before.
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
        self._levels: dict[int, _Level] = {}
        self._last = _Level()
        self._num_steps = 0

    def weight(self, num_requests: int, num_tokens: int) -> float:
        """Return as how many requests those count that have so many tokens together."""
        return num_requests if self._request_tokens is None else round(4 * num_tokens / self._request_tokens) / 4

    def seconds(self, num_requests: int, weight: float) -> float:
        """Return the expected time of a step without drafts."""
        return self._timed(num_requests, weight) * math.exp(self._level(num_requests).plain)

    def line(self, num_requests: int, num_more: int, weight: float, num_prompt_rows: int = 0) -> list[float]:
        """Return the expected times of steps with 0 .. num_more drafts or more, lately computed."""
        key = num_requests, num_prompt_rows, weight
        line = self._lines.get(key, [])
        if len(line) <= num_more:
            first, last = num_requests + num_prompt_rows, len(self._line) - 1
            rows, level = np.arange(first, first + max(num_more, MIN_LINE) + 1), self._level(num_requests)
            timed = self._line[np.minimum(rows, last)] + self._beyond_s * np.maximum(0, rows - last)
            plain_s = self._timed(num_requests, weight)
            more = (timed - timed[0]) / plain_s
            more[1:] += level.surplus(more[1:])
            seconds = self._timed(first, weight) + plain_s * np.maximum(0.0, more)
            line = (math.exp(level.plain) * seconds).tolist()
            if len(self._lines) >= MOST_LINES:
                self._lines.clear()
            self._lines[key] = line
        return line

    def learn_plain(self, num_requests: int, weight: float, seconds: float, num_alike: int = 1) -> None:
        """Take in a step without drafts, which stands for `num_alike` steps."""
        level = self._learning_level(num_requests)
        level.learn_plain(_log_ratio(seconds, self._timed(num_requests, weight), level.plain), num_alike)

    def learn_drafted(self, num_requests: int, num_drafts: int, weight: float, seconds: float) -> None:
        """Take in a step with drafts."""
        level, plain_s = self._learning_level(num_requests), self._timed(num_requests, weight)
        more = self._timed(num_requests + num_drafts, weight) / plain_s - 1.0
        level.learn_drafted(more, seconds / plain_s)

    def _level(self, num_requests: int) -> _Level:
        """Return the level of about so many requests; what another one learned last, where there is none."""
        return self._levels.get(num_requests.bit_length(), self._last)

    def _learning_level(self, num_requests: int) -> _Level:
        kind = num_requests.bit_length()
        if kind not in self._levels:
            self._levels[kind] = self._last.begin_another() if self._levels else self._last
        self._last = self._levels[kind]
        self._num_steps += 1
        if self._num_steps % REFRESH == 0:
            self._lines.clear()
        return self._last

    def _timed(self, num_rows: int, weight: float) -> float:
        last = len(self._line) - 1
        beyond_s = self._beyond_s * max(0, num_rows - last)
        return float(self._line[min(num_rows, last)]) + beyond_s + self._request_s * weight


class _Level:
    """What steps take beyond what was timed, with and without drafts.

    Those without are a factor, as a logarithm. It is what drafts are held against, and they are seen beside it: in steps
    without drafts, their rows were timed to take so much more, and take a surplus of that, in part for
    handling drafts, whatever their number, in part with their rows. A regression parts these, so that row counts are
    corrected that are never computed. While there are only steps without drafts, the surplus fades: whatever a bad
    moment taught about dear rows is forgotten, tried and learned again. Before the first step without drafts those with
    them move the factor.

    Attributes:
        plain: of steps without drafts.
    """

    def __init__(self) -> None:
        self.plain = 0.0
        self._num_plain = self._num_drafted = self._num_plain_in_a_row = 0
        self._mean_more = self._mean_surplus = self._variance = self._covariance = 0.0

    def begin_another(self) -> _Level:
        """Return one that believes the same until it has steps of its own."""
        level = copy(self)
        level._num_plain = level._num_plain_in_a_row = 0
        level._num_drafted = min(1, self._num_drafted)
        return level

    def surplus(self, more: Times) -> Times:
        """Return what rows take beyond the `more` that they were timed to add, all in steps without drafts."""
        tilt = self._covariance / (self._variance + RIDGE)
        return self._mean_surplus + tilt * (more - self._mean_more)

    def learn_plain(self, error: float, num_alike: int) -> None:
        """Take in log(seconds / timed seconds) of a step without drafts, which stands for `num_alike` steps."""
        first = 1 / (1 + self._num_plain) if self._num_plain_in_a_row == 0 else 1 / (FIRST_WEIGHT + self._num_plain)
        moved = max(min(num_alike * RATE, MOST_RATE), first) * (error - self.plain)
        self.plain += moved
        self._num_plain += 1
        self._num_plain_in_a_row += 1
        if self._num_plain_in_a_row > 1:
            self._mean_surplus *= 1 - RATE
            self._variance *= 1 - RATE
            self._covariance *= 1 - RATE
        elif self._num_drafted:
            tilt = self._covariance / (self._variance + RIDGE)
            self._mean_surplus = (1.0 + self._mean_more + self._mean_surplus) * math.exp(-moved) - 1.0 - self._mean_more
            self._covariance = ((1.0 + tilt) * math.exp(-moved) - 1.0) * (self._variance + RIDGE)

    def learn_drafted(self, more: float, ratio: float) -> None:
        """Take in a step with drafts: `more` as for `surplus`, and its seconds over the timed ones without drafts."""
        believed = 1.0 + max(0.0, more + self.surplus(more))
        error = _log_ratio(ratio, believed * math.exp(self.plain), 0.0)
        rate = max(RATE, 1 / (FIRST_WEIGHT + self._num_drafted))
        above_more = more - self._mean_more
        above_surplus = believed * math.exp(error) - 1.0 - more - self._mean_surplus
        self._mean_more += (rate if self._num_drafted else 1.0) * above_more
        self._mean_surplus += rate * above_surplus
        self._variance = (1 - rate) * (self._variance + rate * above_more**2)
        self._covariance = (1 - rate) * (self._covariance + rate * above_more * above_surplus)
        self._num_drafted += 1
        self._num_plain_in_a_row = 0


def _log_ratio(seconds: float, timed_s: float, believed: float) -> float:
    """Return log(seconds / timed seconds), cut where it is too far from what was believed."""
    return max(believed - OUTLIER, min(believed + OUTLIER, math.log(max(seconds, 1e-9) / timed_s)))


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
