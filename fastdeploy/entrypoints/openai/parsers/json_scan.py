# SPDX-License-Identifier: Apache-2.0
"""Finds where a JSON value ends in a text that arrives in pieces."""

from __future__ import annotations

import re

_PLAIN = re.compile(r'[^"\\]*')
_BETWEEN = re.compile(r"[\s,:0-9a-zA-Z.+-]*")
_CLOSERS = {"{": "}", "[": "]"}


class JsonScanner:
    """Follows brackets and strings of one object or array.

    Attributes:
        is_done: the value has ended.
        is_broken: the text cannot be a part of a JSON value; nothing after this is looked at.
    """

    def __init__(self, opened: str = "") -> None:
        """Start before the value, or inside of it, after the brackets `opened`."""
        self._stack = [_CLOSERS[bracket] for bracket in opened]
        self._in_string = False
        self._is_escaped = False
        self.is_done = False
        self.is_broken = False

    def feed(self, text: str, at: int = 0) -> int:
        """Read `text` from `at`; return where the value ended or broke, or the text's length if neither did."""
        while at < len(text) and not self.is_done and not self.is_broken:
            at = self._in_a_string(text, at) if self._in_string else self._between(text, at)
        return at

    def _in_a_string(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        at = _PLAIN.match(text, at).end()  # type: ignore[union-attr]
        if at < len(text):
            self._is_escaped = text[at] == "\\"
            self._in_string = self._is_escaped
            at += 1
        return at

    def _between(self, text: str, at: int) -> int:
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
        if at == len(text):
            return at
        char = text[at]
        if char == '"':
            self._in_string = True
        elif char in _CLOSERS:
            self._stack.append(_CLOSERS[char])
        elif self._stack and char == self._stack[-1]:
            self._stack.pop()
            self.is_done = not self._stack
        else:
            self.is_broken = True
            return at
        return at + 1
