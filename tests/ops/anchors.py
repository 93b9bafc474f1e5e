# SPDX-License-Identifier: Apache-2.0
"""What a text that left its source is expected to come back to, by looking at everything said since."""

from __future__ import annotations

from collections.abc import Sequence

LONG_MATCH = MAX_EVIDENCE = 16
AHEAD, MAX_SAID = 112, 64


class AnchorOracle:
    """A place in a source; `said` is all that the text has said since it stood there."""

    def __init__(self, source: Sequence[int], first: int, place: int, match_len: int, has_left: bool = False) -> None:
        self.source, self.place = list(source[: place + AHEAD]), place
        self.match_len, self.has_left = match_len, has_left
        self.first = max(first, place - MAX_EVIDENCE)
        self.said: list[int] = []

    def _left(self) -> int | None:
        """Return the number of tokens that were said as the source has them; None while all were."""
        if self.has_left:
            return 0
        ahead = self.source[self.place :]
        same = next((i for i, (a, b) in enumerate(zip(self.said, ahead)) if a != b), min(len(self.said), len(ahead)))
        return None if same == len(self.said) else same

    def is_worn(self) -> bool:
        """True where another place is wanted."""
        return self._left() is not None or len(self.source) - self.place - len(self.said) < AHEAD // 2

    def find(self, tail: Sequence[int] = ()) -> tuple[int, int]:
        """Return the evidence and the place in the source that it speaks for; (0, 0) without any."""
        kept, self.said = self.said, self.said + list(tail)
        left = self._left()
        since = [] if left is None else self.said[left:]
        self.said = kept
        if left is None or len(since) > MAX_SAID:
            return 0, 0
        here = self.place + left
        places = [*range(here + 1, len(self.source)), *range(here, min(here + 1, len(self.source)))]
        best = (0, 0)
        for place in places:
            evidence = 0
            while (
                evidence < min(MAX_EVIDENCE, len(since), place - self.first)
                and self.source[place - 1 - evidence] == since[-1 - evidence]
            ):
                evidence += 1
            best = max(best, (evidence, place), key=lambda found: found[0])
        return best
