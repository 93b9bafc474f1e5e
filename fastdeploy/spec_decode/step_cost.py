# SPDX-License-Identifier: Apache-2.0
"""How long a step takes, by its number of rows: timed at start-up, corrected by the steps that are really computed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate

RATE = 0.03  # of the running means; a step's time is noisy, and what a few rows add to it is small
OUTLIER = 1.25  # a step counts at most as this many times the expected time, at least as its inverse
NEIGHBOUR = (
    0.6  # of a step's correction that the next timed row count takes over: it is likely to be wrong the same way
)
FORGETTING = 0.998  # of the correction at a row count, per step that has other rows


class StepCost:
    """Seconds of a decoding step against its rows: a line through the row counts that were timed.

    A scale follows all steps (longer contexts, a busy machine), a correction at each timed row count what the timing
    got wrong there. A correction fades while no step comes near, so that no bad moment is believed for ever.
    """

    def __init__(self, timings: Mapping[int, float]) -> None:
        """Start from `timings`, rows: seconds; beyond the last of them the line goes on as between the last two."""
        self._rows = sorted(timings)
        self._timed = list(accumulate((timings[r] for r in self._rows), max))  # more rows never cost less
        self._corrections = [(1.0, 0)] * len(self._rows)  # factor, step of its last measure
        self._scale = 1.0
        self._num_steps = 0

    def seconds(self, num_rows: int) -> float:
        """Return the expected time of a step with `num_rows` rows that all verify."""
        at, share = self._place(num_rows)
        if not share:
            return self._scale * self._knot(at)
        low = self._knot(at)
        return self._scale * (low + share * max(0.0, self._knot(at + 1) - low))

    def learn(self, num_rows: int, seconds: float) -> None:
        """Take in a step that was computed."""
        if seconds <= 0.0:
            return
        self._num_steps += 1
        change = RATE * (min(OUTLIER, max(1 / OUTLIER, seconds / self.seconds(num_rows))) - 1)
        at, share = self._place(num_rows)
        self._scale *= 1 + change
        for knot in range(len(self._rows)):
            weight = NEIGHBOUR ** abs(knot - at - min(share, 1.0))
            self._corrections[knot] = self._correction(knot) * (1 + weight * change), self._num_steps

    def _place(self, num_rows: int) -> tuple[int, float]:
        """Return the knot at or below `num_rows`, and how far on the way to the next one it is; above 1 beyond all."""
        at = min(bisect_right(self._rows, num_rows), max(1, len(self._rows) - 1)) - 1
        if len(self._rows) == 1:
            return 0, 0.0
        return at, (num_rows - self._rows[at]) / (self._rows[at + 1] - self._rows[at])

    def _knot(self, at: int) -> float:
        return self._timed[at] * self._correction(at)

    def _correction(self, at: int) -> float:
        factor, step = self._corrections[at]
        return 1.0 if factor == 1.0 else 1.0 + (factor - 1.0) * FORGETTING ** (self._num_steps - step)
