# SPDX-License-Identifier: Apache-2.0
"""What the parsers of tool calls share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastdeploy.entrypoints.openai.parsers.json_scan import JsonScanner
from fastdeploy.entrypoints.openai.parsers.machine import Machine, num_before


class ToolCallParser(Machine):
    """Makes parts of kind content, call and arguments.

    A call is one as soon as its head is complete: the function's name and the beginning of its arguments. From there on
    its arguments are given out as the model writes them. What looks like a call and has no such head is content, every
    character of it. White space around calls belongs to them.

    Attributes:
        opener: marker that begins a call or a list of them.
        num_calls: calls begun so far.
    """

    opener = ""

    def __init__(self) -> None:
        super().__init__(self._text)
        self.num_calls = 0
        self._at = 0  # the buffer's first characters, up to here, are content if no call follows them
        self._scanner = JsonScanner()
        self._scanned = 0

    def _text(self) -> bool:
        """Give out content up to the next opener."""
        found = self.opener in self._buffer
        if self._is_over and not found:
            self._give("content", len(self._buffer))
            return False
        self._give("content", num_before(self._buffer, self.opener))
        if found:
            self._begin_head(self._buffer.index(self.opener) + len(self.opener))
        return found

    def _begin_head(self, at: int) -> None:
        self._at = self._scanned = at
        self._scanner = JsonScanner()
        self._state = self._head

    def _head(self) -> bool:
        """Read a call's head behind `_at`; begin the call or `_reject`."""
        raise NotImplementedError

    def _reject(self) -> bool:
        """No call: what came before the head is content, and the rest is looked at again."""
        self._give("content", self._at)
        self._state = self._text
        return True

    def _begin_call(self, name: str, num_consumed: int, state: Callable[[], bool]) -> bool:
        self._add("call", name, self.num_calls)
        self.num_calls += 1
        self._buffer = self._buffer[num_consumed:]
        self._scanner = JsonScanner()
        self._state = state
        return True

    def _give_arguments(self, text: str) -> None:
        self._add("arguments", text, self.num_calls - 1)

    def _arguments(self) -> bool:
        """Give out the JSON value as it comes."""
        end = self._scanner.feed(self._buffer)
        self._give_arguments(self._buffer[:end])
        self._buffer = self._buffer[end:]
        if not self._scanner.is_done and not self._scanner.is_broken:
            return False
        self._state = self._after_arguments
        return True

    def _after_arguments(self) -> bool:
        """Consume what closes a call."""
        raise NotImplementedError

    def _after_calls(self) -> bool:
        """White space that only further calls or the end follow is left out."""
        if not self._buffer.strip():
            return False
        self._state = self._text
        return True


def arguments_text(value: Any) -> str | None:
    """Return the JSON text of a call's arguments, which some models quote once more; None if they are no object."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if value is None:
        return "{}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else None
