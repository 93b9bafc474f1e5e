# SPDX-License-Identifier: Apache-2.0
"""Where a text that diverged from its source is expected to return to, by looking at all of its tokens since."""

from __future__ import annotations

from collections.abc import Sequence

LONG_MATCH = MAX_RESUME_MATCH = 16
AHEAD, MAX_DIVERGED = 112, 64


class AnchorOracle:
    """A position in a source; `tokens` are those of the text since it was there."""

    def __init__(
        self, source: Sequence[int], first: int, position: int, match_len: int, has_diverged: bool = False
    ) -> None:
        self.source, self.position = list(source[: position + AHEAD]), position
        self.match_len, self.has_diverged = match_len, has_diverged
        self.first = max(first, position - MAX_RESUME_MATCH)
        self.tokens: list[int] = []

    def _num_copied(self) -> int | None:
        """Return the number of tokens that equal the source before the divergence; None if there is none."""
        if self.has_diverged:
            return 0
        ahead = self.source[self.position :]
        pairs = enumerate(zip(self.tokens, ahead))
        same = next((i for i, (a, b) in pairs if a != b), min(len(self.tokens), len(ahead)))
        return None if same == len(self.tokens) else same

    def needs_update(self) -> bool:
        """Return whether the next long match replaces this anchor."""
        remaining = len(self.source) - self.position - len(self.tokens)
        return self._num_copied() is not None or remaining < AHEAD // 2

    def find(self, tail: Sequence[int] = ()) -> tuple[int, int]:
        """Return the length of the best match after the divergence and its position in the source; (0, 0) if none."""
        own, self.tokens = self.tokens, self.tokens + list(tail)
        copied = self._num_copied()
        diverged = [] if copied is None else self.tokens[copied:]
        self.tokens = own
        if copied is None or len(diverged) > MAX_DIVERGED:
            return 0, 0
        here = self.position + copied
        positions = [*range(here + 1, len(self.source)), *range(here, min(here + 1, len(self.source)))]
        best = (0, 0)
        for position in positions:
            match_len = 0
            while (
                match_len < min(MAX_RESUME_MATCH, len(diverged), position - self.first)
                and self.source[position - 1 - match_len] == diverged[-1 - match_len]
            ):
                match_len += 1
            best = max(best, (match_len, position), key=lambda found: found[0])
        return best
