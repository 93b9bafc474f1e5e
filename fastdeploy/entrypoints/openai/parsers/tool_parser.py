# SPDX-License-Identifier: Apache-2.0
"""The base class of tool parsers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.json_types import parse_json
from fastdeploy.entrypoints.openai.parsers.stream_parser import (
    JsonScanner,
    StreamParser,
    find_first,
    is_beginning,
    length_before,
    partial_match_length,
)

Schemas = Mapping[str, Mapping[str, Any]]
"""Function -> schema of its arguments, for the functions that may be called."""

MAX_SURPLUS_LENGTH = 64  # characters; a longer run of brackets is text
_SURPLUS = " \t\r\n)]}"  # what models write before the end marker of a call, besides the brackets that belong there


class ToolParser(StreamParser):
    """Splits an answer into content and calls: parts of kind content, call and arguments.

    A call begins when its head is complete: the function's name and the start of its arguments. After that its
    arguments are emitted as they arrive. Text that begins like a call without a valid head is content and is emitted
    unchanged. What ends a call is no content: white space around it, its end markers, as often as they are written, the
    part of one with which the output ends, and closing brackets before them.

    Attributes:
        start_markers: texts that begin a call or a list of calls.
        end_markers: texts that end a call or a list of calls, which models may omit.
        inner_markers: further texts that may follow arguments.
        closing_bracket: text after arguments that belongs to their call.
        unmarked_start: character that begins a call without a start marker, at the beginning of the text; "" for none.
            Such a call names a function of the request.
        num_calls: calls so far.
    """

    start_markers: tuple[str, ...] = ()
    end_markers: tuple[str, ...] = ()
    inner_markers: tuple[str, ...] = ()
    closing_bracket = ""
    unmarked_start = ""

    def __init__(self, schemas: Schemas) -> None:
        """Create a parser of one message."""
        super().__init__(self._parse_start if self.unmarked_start else self._parse_content)
        self._schemas = schemas
        self.num_calls = 0
        self._is_marked = False
        self._head_start = 0  # length of the start marker in the buffer, which is content if no call follows it
        self._scanner = JsonScanner()
        self._num_scanned = 0

    def begins_with_call(self, text: str, is_last: bool) -> bool | None:
        """Return whether a text that begins with a start marker begins with a call; None if that depends on its rest.

        After None, `text` of the next call is the next piece.

        Args:
            is_last: the text ends here.
        """
        self._buffer += text
        self._is_finished = is_last
        while not self._parts and self._state():
            pass
        return self._parts[0].kind == "call" if self._parts else None

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
            self._is_marked = True
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

    def _may_call(self, name: str) -> bool:
        """Return whether a call of this function is taken for one: without a marker, it must be known."""
        return self._is_marked or name in self._schemas

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
        if self._scanner.is_broken and self.end_markers:
            self._state = partial(self._parse_broken, self._emit_arguments, self._after_arguments)
        return True

    def _parse_broken(self, emit: Callable[[str], None], next_state: Callable[[], bool]) -> bool:
        """Pass what is not JSON to `emit` up to the next marker, as the model wrote it."""
        markers = (*self.end_markers, *self.inner_markers, *self.start_markers)
        first = find_first(self._buffer, markers)
        if first is not None:
            emit(self._buffer[: first[0]].rstrip().removesuffix(self.closing_bracket).rstrip())
            self._buffer = self._buffer[first[0] :]
            self._state = next_state
            return True
        text = self._buffer[: len(self._buffer) - partial_match_length(self._buffer, markers)]
        text = text if self._is_finished else text.rstrip(_SURPLUS)
        emit(text)
        self._buffer = "" if self._is_finished else self._buffer[len(text) :]
        return False

    def _after_arguments(self) -> bool:
        """Consume the end of a call."""
        raise NotImplementedError

    def _after_calls(self) -> bool:
        """Drop white space and end markers between calls and at the end."""
        if not self._buffer.strip():
            return False
        marker = self._consume_end(*self.end_markers)
        if marker is None:
            return False
        if not marker:
            self._state = self._parse_content
        return True

    def _consume_end(self, *markers: str) -> str | None:
        """Consume a marker that may follow a call, with white space and closing brackets before it.

        Returns:
            The marker; "" if another text follows or the output ends, be it within a marker; None if more is needed.
        """
        match = _end_pattern(markers).match(self._buffer)
        if match is not None:
            self._buffer = self._buffer[match.end() :]
            return match.group(1)
        text = self._buffer.lstrip()
        rest = text.lstrip(_SURPLUS)
        if len(text) - len(rest) > MAX_SURPLUS_LENGTH or not any(is_beginning(rest, marker) for marker in markers):
            return ""
        if not self._is_finished:
            return None
        self._buffer = ""
        return ""


class ConvertingToolParser(ToolParser):
    """Base of the parsers of formats whose arguments are not JSON. An argument is emitted when it is complete."""

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
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

    def _is_truncated(self, *markers: str) -> bool:
        """Return whether the output ends here, or within one of the markers."""
        rest = self._buffer.lstrip()
        return self._is_finished and (not rest or any(is_beginning(rest, marker) for marker in markers))


@cache
def _end_pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of a marker after white space and surplus characters."""
    surplus = f"[{re.escape(_SURPLUS)}]{{0,{MAX_SURPLUS_LENGTH}}}?"
    return re.compile(rf"\s*+{surplus}({'|'.join(map(re.escape, markers))})")


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
