# SPDX-License-Identifier: Apache-2.0
"""What asking for drafts costs, and what it may cost."""

from __future__ import annotations

FIRST_TIMES = 8  # of which the fastest is believed: the first do what only first ones do
COST_RATE = 0.05  # of the running mean
COST_OUTLIER = 4.0  # times that mean that one time counts for at most
MOST_SAVED = 10.0  # looks: about as many as a new request is asked in


class Price:
    """What something costs that is done again and again: the least of the first times, then a running mean."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._num_asks = 0

    @property
    def is_known(self) -> bool:
        """True once it was done a few times."""
        return self._num_asks >= FIRST_TIMES

    def learn(self, cost_s: float) -> None:
        """Take in what it took this time."""
        self._num_asks += 1
        if self._num_asks == 1:
            self.seconds = cost_s
        elif self._num_asks <= FIRST_TIMES:
            self.seconds = min(cost_s, self.seconds)
        else:
            self.seconds += COST_RATE * (min(cost_s, COST_OUTLIER * self.seconds) - self.seconds)


class Purse:
    """What drafts have brought lately, less what looking for them took: where it is empty, nobody looks.

    A look is more than what a proposer takes: whom to ask is decided, too. All of it is paid for when the next look
    begins.
    """

    def __init__(self) -> None:
        self._saved_s = self._spent_s = 0.0
        self._look = Price()

    @property
    def is_empty(self) -> bool:
        """True if the next look would have to be paid out of what decoding earns."""
        return self._saved_s < 0.0

    @property
    def look_s(self) -> float:
        """Seconds that a look takes, a model's calls aside; 0 before the first one."""
        return self._look.seconds

    def earn(self, seconds: float) -> None:
        """Take in what a step may spend, or what its drafts bring."""
        self._saved_s = min(self._saved_s + seconds, MOST_SAVED * self._look.seconds)

    def spend(self, seconds: float) -> None:
        """Add to what the last look has taken."""
        self._spent_s += seconds

    def begin_look(self) -> None:
        """Pay for the last one; the first ones, by which the price is learned, are free."""
        if self._spent_s:
            self._look.learn(self._spent_s)
            if self._look.is_known:
                self._saved_s -= min(self._spent_s, COST_OUTLIER * self._look.seconds)
        self._spent_s = 0.0
