# SPDX-License-Identifier: Apache-2.0
"""The tool parser of models that write calls as a Python list: Llama 3.2 and Llama 4."""

from __future__ import annotations

import re
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.entrypoints.openai.parsers.python_literal import LiteralScanner, parse_literal
from fastdeploy.entrypoints.openai.parsers.tool_parser import ConvertingToolParser, Schemas

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
KEYWORD = re.compile(r"[\w.-]+")
MAX_HEAD_LENGTH = 400  # characters of a call's beginning, or of a parameter's name; what is longer is neither
_NAME = r"[\w.-]+"
_HEAD = re.compile(rf"\s*(?:\[\s*)?({_NAME})\s*\(\s*(?=\)|{KEYWORD.pattern}\s*=)")
_PARTIAL_HEAD = re.compile(rf"\s*(?:\[\s*)?(?:{_NAME}\s*(?:\(\s*(?:{KEYWORD.pattern}\s*)?)?)?")
_KEY = re.compile(rf"\s*({KEYWORD.pattern})\s*=")
_PARTIAL_KEY = re.compile(rf"\s*(?:{KEYWORD.pattern}\s*)?")


class PythonicToolParser(ConvertingToolParser):
    """Parses `[NAME(KEY=VALUE, ...), ...]` at the beginning of the text or after a start marker.

    Values are Python literals or JSON; another text is a string. A value is emitted when it is complete.
    """

    start_markers = (PYTHON_START,)
    end_markers = (PYTHON_END,)
    unmarked_start = "["

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._key = ""
        self._literal = LiteralScanner()

    def _parse_head(self) -> bool:
        head = self._buffer[self._head_start : self._head_start + MAX_HEAD_LENGTH]
        if (match := _HEAD.match(head)) and self._may_call(match.group(1)):
            return self._begin_members(match.group(1), self._head_start + match.end(), self._parse_key)
        may_follow = _PARTIAL_HEAD.fullmatch(head) is not None
        is_decided = not may_follow or len(head) == MAX_HEAD_LENGTH or self._is_finished
        return self._reject_call() if is_decided else False

    def _parse_key(self) -> bool:
        head = self._buffer[:MAX_HEAD_LENGTH]
        if match := _KEY.match(head):
            self._key = match.group(1)
            self._buffer = self._buffer[match.end() :]
            self._literal, self._num_scanned = LiteralScanner(), 0
            self._state = self._parse_value
            return True
        if _PARTIAL_KEY.fullmatch(head) and len(head) < MAX_HEAD_LENGTH:
            return False
        return self._end_call()

    def _parse_value(self) -> bool:
        self._num_scanned = self._literal.feed(self._buffer, self._num_scanned)
        if not self._literal.is_done and not self._is_finished:
            return False
        if not self._literal.is_done:
            self._num_scanned = len(self._buffer)
        text = self._buffer[: self._num_scanned].strip()
        if text or self._literal.is_done:
            self._emit_member(self._key, _convert(text))
        self._buffer = self._buffer[self._num_scanned :]
        self._state = self._after_value
        return True

    def _after_value(self) -> bool:
        if self._consume(",") is None or self._is_truncated():
            return False
        self._state = self._parse_key
        return True

    def _end_call(self) -> bool:
        self._end_members()
        self._buffer = self._buffer.lstrip().removeprefix(")")
        self._state = self._between_calls
        return True

    def _between_calls(self) -> bool:
        marker = self._consume_end(",", "]")
        if marker is None:
            return False
        self._state = self._after_calls
        if marker == ",":
            self._buffer = marker + self._buffer
            self._begin_head(len(marker))
        return True


def _convert(text: str) -> Any:
    """Return the value of a literal, or the text itself if it is none."""
    try:
        return parse_literal(text)
    except InvalidRequestError:
        return text
