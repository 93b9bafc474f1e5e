# SPDX-License-Identifier: Apache-2.0
"""Parsing of a text that arrives in pieces: the state machine of all parsers, and a scanner for JSON values.

A state examines the text that is not emitted yet, and either consumes some of it or waits for more. It decides by a
prefix of that text alone, so the result does not depend on how the text is divided into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_STRING_CONTENT = re.compile(r'[^"\\]*')
_BETWEEN_STRINGS = re.compile(r"[\s,:0-9a-zA-Z.+-]*")
_CLOSING_BRACKETS = {"{": "}", "[": "]"}


@dataclass
class Part:
    """A piece of a message.

    Attributes:
        kind: reasoning, content, call (a new call, `text` is the function's name) or arguments (of the latest call).
        index: index of the call, for the last two kinds.
    """

    kind: str
    text: str
    index: int = 0


class StreamParser:
    """Base of the parsers: the current state, the text that is not emitted yet, and the parts since the last `push`.

    A state is a method that returns True after it has consumed text or changed the state, and False to wait for more
    text.
    """

    def __init__(self, state: Callable[[], bool]) -> None:
        self._state = state
        self._buffer = ""
        self._is_finished = False
        self._parts: list[Part] = []

    def push(self, text: str) -> list[Part]:
        """Append `text`; return the parts that no later text can change."""
        self._buffer += text
        while self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[Part]:
        """Return the remaining parts at the end of the text."""
        self._is_finished = True
        return self.push("")

    def _emit(self, kind: str, text: str, index: int = 0) -> None:
        """Add a part, or extend the last one if it has the same kind and index."""
        last = self._parts[-1] if self._parts else None
        if last is not None and (last.kind, last.index) == (kind, index) and kind != "call":
            last.text += text
        elif text:
            self._parts.append(Part(kind, text, index))

    def _emit_buffer(self, kind: str, length: int) -> None:
        """Emit the first `length` characters of the buffer."""
        self._emit(kind, self._buffer[:length])
        self._buffer = self._buffer[length:]

    def _consume(self, *markers: str) -> str | None:
        """Consume white space and a marker; return the marker, "" if another text follows, None if more is needed."""
        rest = self._buffer.lstrip()
        for marker in markers:
            if rest.startswith(marker):
                self._buffer = rest[len(marker) :]
                return marker
        may_follow = not self._is_finished and any(marker.startswith(rest) for marker in markers)
        return None if may_follow else ""


def partial_match_length(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of a marker."""
    longest = 0
    for marker in markers:
        if marker[0] not in text:  # nearly always
            continue
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


def is_beginning(text: str, marker: str) -> bool:
    """Return whether a text is the beginning of a marker; a character at its end that was cut off is U+FFFD."""
    whole = text.removesuffix("\ufffd")
    following = marker[len(whole) : len(whole) + 1]
    return marker.startswith(whole) and (whole == text or not following.isascii())


def find_first(text: str, markers: Sequence[str], start: int = 0, end: int | None = None) -> tuple[int, str] | None:
    """Return the index and text of the marker that comes first in `text[start:end]`; None if it contains none."""
    first, end = None, len(text) if end is None else end
    for marker in markers:
        limit = end if first is None else min(end, first[0] + len(marker) - 1)  # an earlier one only
        index = text.find(marker, start, limit)
        if index >= 0:
            first = index, marker
    return first


def length_before(text: str, markers: Sequence[str]) -> int:
    """Return how many characters of `text` precede the first of the markers, or a partial match at the end.

    White space before a marker does not count.
    """
    first = find_first(text, markers)
    index = first[0] if first is not None else len(text) - partial_match_length(text, markers)
    return len(text[:index].rstrip())


class JsonScanner:
    """Finds the end of a JSON object or array in a text that arrives in pieces, by its brackets and strings.

    Attributes:
        is_done: the value is complete.
        is_broken: the text is not JSON; nothing after this position is examined.
    """

    def __init__(self, opened: str = "") -> None:
        """Start before the value, or within it after the brackets `opened`."""
        self._stack = [_CLOSING_BRACKETS[bracket] for bracket in opened]
        self._in_string = False
        self._is_escaped = False
        self.is_done = False
        self.is_broken = False

    def feed(self, text: str, start: int = 0) -> int:
        """Scan `text` from `start`; return where the value ends or breaks, or the length of the text."""
        position = start
        while position < len(text) and not self.is_done and not self.is_broken:
            scan = self._scan_string if self._in_string else self._scan_structure
            position = scan(text, position)
        return position

    def _scan_string(self, text: str, start: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return start + 1
        position = _STRING_CONTENT.match(text, start).end()  # type: ignore[union-attr]
        if position == len(text):
            return position
        self._is_escaped = text[position] == "\\"
        self._in_string = self._is_escaped
        return position + 1

    def _scan_structure(self, text: str, start: int) -> int:
        position = _BETWEEN_STRINGS.match(text, start).end()  # type: ignore[union-attr]
        if position == len(text):
            return position
        char = text[position]
        if char == '"':
            self._in_string = True
        elif char in _CLOSING_BRACKETS:
            self._stack.append(_CLOSING_BRACKETS[char])
        elif self._stack and char == self._stack[-1]:
            self._stack.pop()
            self.is_done = not self._stack
        else:
            self.is_broken = True
            return position
        return position + 1
