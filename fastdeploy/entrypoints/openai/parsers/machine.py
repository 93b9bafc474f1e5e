# SPDX-License-Identifier: Apache-2.0
"""State machines over a text that arrives in pieces.

A state looks at the text that is not given out yet and either consumes some of it or waits for more. It decides by a
prefix of that text alone, so the pieces in which the text came make no difference: the whole text is one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Part:
    """A piece of a message.

    Attributes:
        kind: reasoning, content, call (a call begins, `text` is the function's name) or arguments (more of the call's).
        index: which call, for the last two kinds.
    """

    kind: str
    text: str
    index: int = 0


class Machine:
    """What the machines share: the text not given out yet, the state, and the parts made.

    A state is a method that returns True after it did something and False when it waits for more text.
    """

    def __init__(self, state: Callable[[], bool]) -> None:
        self._state = state
        self._buffer = ""
        self._is_over = False
        self._parts: list[Part] = []

    def push(self, text: str) -> list[Part]:
        """Append `text`; return the parts that are certain now."""
        self._buffer += text
        while self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[Part]:
        """Return what was held back, at the end of the text."""
        self._is_over = True
        return self.push("")

    def _add(self, kind: str, text: str, index: int = 0) -> None:
        """Give out a part; pieces of the same thing are joined."""
        last = self._parts[-1] if self._parts else None
        if last is not None and (last.kind, last.index) == (kind, index) and kind != "call":
            last.text += text
        elif text:
            self._parts.append(Part(kind, text, index))

    def _give(self, kind: str, length: int) -> None:
        """Give out the first `length` characters of the buffer."""
        self._add(kind, self._buffer[:length])
        self._buffer = self._buffer[length:]

    def _expect(self, *markers: str) -> str | None:
        """Consume white space and the marker after it; return it, "" if none follows, None if that is open yet."""
        rest = self._buffer.lstrip()
        for marker in markers:
            if rest.startswith(marker):
                self._buffer = rest[len(marker) :]
                return marker
        is_open = not self._is_over and any(marker.startswith(rest) for marker in markers)
        return None if is_open else ""


def num_partial(text: str, marker: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def num_before(text: str, marker: str) -> int:
    """Return how many characters of `text` are certainly before `marker` and the white space in front of it."""
    at = text.find(marker)
    if at < 0:
        at = len(text) - num_partial(text, marker)
    return len(text[:at].rstrip())
