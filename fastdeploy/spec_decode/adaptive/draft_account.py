# SPDX-License-Identifier: Apache-2.0
"""What drafts have brought and what asking for them takes."""

from __future__ import annotations

# Steps without drafts. With few requests luck changes from step to step: divided by their number, the second of each
# pair is added to the first.
START, START_ALONE = 1.5, 1.5  # that drafts may lose before they have brought anything
MOST_SAVED, MOST_SAVED_ALONE = 2.0, 8.0  # the same of what they have brought
SAVED_SHARE = 0.004  # of the time: most that drafts may lose where they do not pay
STAKE = 2.0  # steps that have been saved when drafts that had lost all are tried again
TRIAL = 3  # bookings before which all drafts are asked for and nobody chooses; what was tried before has one
REPAYMENTS = 32.0  # in which what a request's first draft takes more is paid for
FIRST_TIMES = 8  # of which the fastest is believed: the first do what only first ones do
COST_RATE = 0.05  # of the running mean
COST_OUTLIER = 4.0  # times that mean that one time counts for at most


class Account:
    """Seconds that drafts have lately brought, less what they took: they are asked for while there are any.

    What is left over from better times is little, so that drafts which turn bad soon rest. Those that rest save for the
    next trial, and what they lost beyond what they had comes first: in the long run drafts lose no more than what they
    have brought and the share of the time that may be saved.
    """

    def __init__(self) -> None:
        self.is_open = True
        self._balance_s = self._owed_s = 0.0
        self._num_booked = 0

    @property
    def is_on_trial(self) -> bool:
        """True while too little is known of these drafts to choose among them."""
        return self._num_booked < TRIAL

    def owe(self, seconds: float) -> None:
        """Take in what is paid for little by little, or at once when the account closes."""
        self._owed_s += seconds

    def book(self, gain_s: float, step_s: float, num_requests: int, may_close: bool = True) -> bool:
        """Take in what drafts brought, which may be less than nothing; without a balance the account closes.

        Args:
            step_s: seconds of a step without drafts.
            num_requests: of that step.
            may_close: otherwise it is left to the caller to `close` or `renew` it.

        Returns:
            False if nothing is left.
        """
        if not self._num_booked:
            self._balance_s = max(self._balance_s, (START + START_ALONE / num_requests) * step_s)
        self._num_booked += 1
        paid_s = self._owed_s / REPAYMENTS
        self._owed_s -= paid_s
        most_s = (MOST_SAVED + MOST_SAVED_ALONE / num_requests) * step_s
        self._balance_s = min(self._balance_s + gain_s - paid_s, most_s)
        has_any = self._balance_s >= 0.0
        if not has_any and may_close:
            self.close()
        return has_any

    def close(self) -> None:
        """Let the drafts rest; what is owed comes first when they save for a trial."""
        self.is_open = False
        self._balance_s -= self._owed_s
        self._owed_s = 0.0

    def renew(self, step_s: float, num_requests: int) -> None:
        """Begin again as at first: what drafts brought was held against something wrong."""
        self._balance_s = (START + START_ALONE / num_requests) * step_s

    def save(self, seconds: float, step_s: float) -> None:
        """Take in the time of steps; a closed account puts its share aside and opens for a trial when it has enough."""
        if self.is_open:
            return
        self._balance_s += SAVED_SHARE * seconds
        if self._balance_s >= STAKE * step_s:
            self.is_open = True
            self._num_booked = 1


class Price:
    """What something costs that is done again and again: the least of the first times, then a running mean."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._num_asks = 0

    def learn(self, cost_s: float) -> None:
        """Take in what it took this time."""
        self._num_asks += 1
        if self._num_asks == 1:
            self.seconds = cost_s
        elif self._num_asks <= FIRST_TIMES:
            self.seconds = min(cost_s, self.seconds)
        else:
            self.seconds += COST_RATE * (min(cost_s, COST_OUTLIER * self.seconds) - self.seconds)
