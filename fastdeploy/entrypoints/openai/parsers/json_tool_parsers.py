# SPDX-License-Identifier: Apache-2.0
"""Tool parsers for formats with arguments in JSON: Hermes, Qwen and ERNIE, Llama 3, DeepSeek, arrays of calls."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.json_types import parse_json
from fastdeploy.entrypoints.openai.parsers.stream_parser import JsonScanner
from fastdeploy.entrypoints.openai.parsers.tool_parser import ToolParser, arguments_text

MAX_NAME_LENGTH = 256  # characters; a call of a longer name is parsed when it is complete
_NAME_FIRST = re.compile(rf'\s*\{{\s*"name"\s*:\s*"([^"\\]{{1,{MAX_NAME_LENGTH}}})"')
_ARGUMENTS = re.compile(r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_FIRST_KEY = re.compile(rf'\s*\{{\s*"([^"\\]{{0,{MAX_NAME_LENGTH}}}+)[^\\]')
_NOT_A_CALL = re.compile(r'\s*(?:[^\s{]|\{\s*[^\s"])')
_KEYS = ("name", "arguments", "parameters", "type", "id", "function")

DEEPSEEK_LIST_BEGIN, DEEPSEEK_LIST_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL_BEGIN, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
MAX_HEAD_LENGTH = 400  # characters; a longer head is not a call

_NAME = r"([^\s<{]+)"
_V3_HEAD = rf"function{DEEPSEEK_SEPARATOR}\s*{_NAME}\s*```(?:json)?\s*"
_V31_HEAD = rf"{_NAME}\s*{DEEPSEEK_SEPARATOR}\s*"
_DEEPSEEK_HEAD = re.compile(rf"\s*{DEEPSEEK_CALL_BEGIN}\s*(?:{_V3_HEAD}|{_V31_HEAD})$")


class JsonToolParser(ToolParser):
    """Parses `{"name": ..., "arguments": {...}}` after a start marker.

    Arguments are streamed if the object begins with the name, as models are trained to write it. An object with other
    keys or another order is parsed when it is complete.

    Attributes:
        separator: text between two calls.
    """

    closing_bracket = "}"
    separator = ""

    def _parse_head(self) -> bool:
        name = _NAME_FIRST.match(self._buffer, self._head_start)
        if name and not self._may_call(name.group(1)):
            return self._reject_call()
        if name and (arguments := _ARGUMENTS.match(self._buffer, name.end())):
            return self._begin_call(name.group(1), arguments.end(), self._parse_arguments)
        key = _FIRST_KEY.match(self._buffer, self._head_start)
        if _NOT_A_CALL.match(self._buffer, self._head_start) or (key and key.group(1) not in _KEYS):
            return self._reject_call()
        self._num_scanned = self._scanner.feed(self._buffer, self._num_scanned)
        if self._scanner.is_done:
            return self._parse_complete_object(self._buffer[self._head_start : self._num_scanned])
        if self._scanner.is_broken or self._is_finished:
            return self._reject_call()
        return False

    def _parse_complete_object(self, text: str) -> bool:
        name, arguments = _parse_call(text, needs_arguments=not self._is_marked)
        if name is None or arguments is None or not self._may_call(name):
            return self._reject_call()
        self._begin_call(name, self._num_scanned, self._between_calls)
        self._emit_arguments(arguments)
        return True

    def _after_arguments(self) -> bool:
        marker = self._consume("}", ",")
        if marker is None:
            return False
        self._scanner = JsonScanner(opened="{")
        self._state = self._skip_other_keys if marker == "," else self._between_calls
        return True

    def _skip_other_keys(self) -> bool:
        """Drop the keys after the arguments."""
        self._buffer = self._buffer[self._scanner.feed(self._buffer) :]
        if not self._scanner.is_done and not self._scanner.is_broken:
            return False
        self._state = self._between_calls
        if self._scanner.is_broken and self.end_markers:
            self._state = partial(self._parse_broken, lambda text: None, self._between_calls)
        return True

    def _between_calls(self) -> bool:
        marker = self._consume_end(*self.end_markers, *filter(None, [self.separator]))
        if marker is None:
            return False
        self._state = self._after_calls
        if marker and marker == self.separator:
            self._buffer = marker + self._buffer
            self._begin_head(len(marker))
        return True


class HermesToolParser(JsonToolParser):
    """Parses `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once per call: Hermes, Qwen, ERNIE."""

    start_markers = ("<tool_call>",)
    end_markers = ("</tool_call>",)


class Llama3JsonToolParser(JsonToolParser):
    """Parses `{"name": ..., "parameters": {...}}`, separated by `;`, optionally after `<|python_tag|>`: Llama 3.1."""

    start_markers = ("<|python_tag|>",)
    separator = ";"
    unmarked_start = "{"


class JsonArrayToolParser(JsonToolParser):
    """Parses `[{"name": ..., "parameters": {...}}, ...]`, which the grammar of required calls enforces by default."""

    start_markers = ("[",)
    end_markers = ("]",)
    separator = ","


class NamedToolParser(ToolParser):
    """Takes the whole text as the arguments of one function, which the grammar of a named function enforces."""

    def __init__(self, name: str) -> None:
        super().__init__({})
        self._name = name
        self._state = self._parse_all

    def _parse_all(self) -> bool:
        if self._buffer and not self.num_calls:
            self._begin_call(self._name, 0, self._parse_all)
        self._emit_arguments(self._buffer)
        self._buffer = ""
        return False


class DeepSeekToolParser(ToolParser):
    """Parses a list of calls with DeepSeek's special tokens.

    V3 and R1 write type, separator, name and a fenced JSON object; V3.1 writes name, separator and object.
    """

    start_markers = (DEEPSEEK_LIST_BEGIN,)
    end_markers = (DEEPSEEK_CALL_END, DEEPSEEK_LIST_END)
    inner_markers = ("```", DEEPSEEK_CALL_BEGIN)

    def _parse_head(self) -> bool:
        head = self._buffer[self._head_start : self._head_start + MAX_HEAD_LENGTH]
        brace = head.find("{")
        if brace >= 0 and (match := _DEEPSEEK_HEAD.match(head[:brace])):
            name = match.group(1) or match.group(2)
            return self._begin_call(name, self._head_start + brace, self._parse_arguments)
        is_complete = brace >= 0 or DEEPSEEK_CALL_END in head or len(head) == MAX_HEAD_LENGTH or self._is_finished
        return self._reject_call() if is_complete else False

    def _after_arguments(self) -> bool:
        marker = self._consume_end(*self.end_markers, *self.inner_markers)
        if marker is None:
            return False
        if marker == DEEPSEEK_CALL_BEGIN:
            self._buffer = marker + self._buffer
            self._begin_head(0)
        elif marker in ("", DEEPSEEK_LIST_END):
            self._state = self._after_calls
        return True


def _parse_call(text: str, needs_arguments: bool) -> tuple[str | None, str | None]:
    """Return name and arguments of a complete call; None for what is missing or wrong.

    Args:
        needs_arguments: a call without arguments is none.
    """
    try:
        call: Any = parse_json("call", text)
    except InvalidRequestError:
        return None, None
    call = call["function"] if isinstance(call.get("function"), dict) else call
    name = call.get("name")
    keys = [key for key in ("arguments", "parameters") if key in call]
    arguments = arguments_text(call[keys[0]] if keys else {}) if keys or not needs_arguments else None
    return name if isinstance(name, str) and name else None, arguments
