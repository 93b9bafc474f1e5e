# SPDX-License-Identifier: Apache-2.0
"""The base class of tool parsers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.json_types import parse_json
from fastdeploy.entrypoints.openai.parsers.stream_parser import JsonScanner, StreamParser, find_first, length_before


class ToolParser(StreamParser):
    """Splits an answer into content and calls: parts of kind content, call and arguments.

    A call begins when its head is complete: the function's name and the start of its arguments. After that its
    arguments are emitted as they arrive. Text that begins like a call without a valid head is content and is emitted
    unchanged. White space around calls is dropped.

    Attributes:
        start_markers: texts that begin a call or a list of calls.
        unmarked_start: character that begins a call without a start marker, at the beginning of the text; "" for none.
        num_calls: calls so far.
    """

    start_markers: tuple[str, ...] = ()
    unmarked_start = ""

    def __init__(self) -> None:
        super().__init__(self._parse_start if self.unmarked_start else self._parse_content)
        self.num_calls = 0
        self._head_start = 0  # length of the start marker in the buffer, which is content if no call follows it
        self._scanner = JsonScanner()
        self._num_scanned = 0

    def _parse_start(self) -> bool:
        """Parse a text that begins like a call as a call."""
        text = self._buffer.lstrip()
        if not text:
            return self._is_finished and self._parse_content()
        if text.startswith(self.unmarked_start):
            self._begin_head(len(self._buffer) - len(text))
        else:
            self._state = self._parse_content
        return True

    def _parse_content(self) -> bool:
        """Emit content up to the next start marker."""
        if self._is_finished and find_first(self._buffer, self.start_markers) is None:
            self._emit_buffer("content", len(self._buffer))
            return False
        self._emit_buffer("content", length_before(self._buffer, self.start_markers))
        first = find_first(self._buffer, self.start_markers)
        if first is not None:
            index, marker = first
            self._begin_head(index + len(marker))
        return first is not None

    def _begin_head(self, start: int) -> None:
        self._head_start = self._num_scanned = start
        self._scanner = JsonScanner()
        self._state = self._parse_head

    def _parse_head(self) -> bool:
        """Parse the head of a call at `_head_start`, then call `_begin_call` or `_reject_call`."""
        raise NotImplementedError

    def _reject_call(self) -> bool:
        """Emit the start marker as content and parse the text after it again."""
        self._emit_buffer("content", self._head_start)
        self._state = self._parse_content
        return True

    def _begin_call(self, name: str, num_consumed: int, state: Callable[[], bool]) -> bool:
        self._emit("call", name, self.num_calls)
        self.num_calls += 1
        self._buffer = self._buffer[num_consumed:]
        self._scanner = JsonScanner()
        self._state = state
        return True

    def _emit_arguments(self, text: str) -> None:
        self._emit("arguments", text, self.num_calls - 1)

    def _parse_arguments(self) -> bool:
        """Emit the JSON value of the arguments as it arrives."""
        end = self._scanner.feed(self._buffer)
        self._emit_arguments(self._buffer[:end])
        self._buffer = self._buffer[end:]
        if not self._scanner.is_done and not self._scanner.is_broken:
            return False
        self._state = self._after_arguments
        return True

    def _after_arguments(self) -> bool:
        """Consume the end of a call."""
        raise NotImplementedError

    def _after_calls(self) -> bool:
        """Drop white space between calls and at the end."""
        if not self._buffer.strip():
            return False
        self._state = self._parse_content
        return True


class ConvertingToolParser(ToolParser):
    """Base of the parsers of formats whose arguments are not JSON. An argument is emitted when it is complete."""

    def __init__(self) -> None:
        super().__init__()
        self._num_members = 0

    def _begin_members(self, name: str, num_consumed: int, state: Callable[[], bool]) -> bool:
        """Begin a call and the object of its arguments."""
        self._begin_call(name, num_consumed, state)
        self._emit_arguments("{")
        self._num_members = 0
        return True

    def _emit_member(self, key: str, value: Any) -> None:
        separator = ", " if self._num_members else ""
        self._num_members += 1
        self._emit_arguments(
            f"{separator}{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
        )

    def _end_members(self) -> None:
        self._emit_arguments("}")

    def _is_truncated(self) -> bool:
        """Return whether the output ends here."""
        return self._is_finished and not self._buffer.strip()


def arguments_text(value: Any) -> str | None:
    """Return the JSON text of arguments, which some models write as a quoted text; None if they are not an object."""
    if isinstance(value, str):
        try:
            value = parse_json("arguments", value)
        except InvalidRequestError:
            return None
    if value is None:
        return "{}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else None
