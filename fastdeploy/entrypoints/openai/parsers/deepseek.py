# SPDX-License-Identifier: Apache-2.0
"""Calls as DeepSeek models write them, between tokens of their own."""

from __future__ import annotations

import re

from fastdeploy.entrypoints.openai.parsers.tool_calls import ToolCallParser

LIST_BEGIN, LIST_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
MAX_HEAD_LENGTH = 400  # characters: a longer one names no function

_NAME = r"([^\s<{]+)"
_V3 = rf"function{SEPARATOR}\s*{_NAME}\s*```(?:json)?\s*"
_V31 = rf"{_NAME}\s*{SEPARATOR}\s*"
_HEAD = re.compile(rf"\s*{CALL_BEGIN}\s*(?:{_V3}|{_V31})$")


class DeepSeekParser(ToolCallParser):
    """A list of calls: V3 and R1 write type, separator, name and a fenced object; V3.1 name, separator and object."""

    opener = LIST_BEGIN

    def _head(self) -> bool:
        head = self._buffer[self._at : self._at + MAX_HEAD_LENGTH]
        brace = head.find("{")
        if brace >= 0 and (found := _HEAD.match(head[:brace])):
            return self._begin_call(found.group(1) or found.group(2), self._at + brace, self._arguments)
        is_settled = brace >= 0 or CALL_END in head or len(head) == MAX_HEAD_LENGTH or self._is_over
        return self._reject() if is_settled else False

    def _after_arguments(self) -> bool:
        found = self._expect("```", CALL_END, CALL_BEGIN, LIST_END)
        if found is None:
            return False
        if found == CALL_BEGIN:
            self._buffer = found + self._buffer
            self._begin_head(0)
        elif found in ("", LIST_END):
            self._state = self._after_calls
        return True
