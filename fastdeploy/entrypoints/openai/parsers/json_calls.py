# SPDX-License-Identifier: Apache-2.0
"""Calls written as JSON objects with name and arguments: Hermes, Qwen and ERNIE, Llama 3, a plain array."""

from __future__ import annotations

import json
import re
from typing import Any

from fastdeploy.entrypoints.openai.parsers.json_scan import JsonScanner
from fastdeploy.entrypoints.openai.parsers.tool_calls import ToolCallParser, arguments_text

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_FIRST_KEY = re.compile(r'\s*\{\s*"([^"\\]*)"')
_NO_CALL = re.compile(r'\s*(?:[^\s{]|\{\s*[^\s"])')
_KEYS = ("name", "arguments", "parameters", "type", "id", "function")


class JsonCallParser(ToolCallParser):
    """`{"name": ..., "arguments": {...}}` behind an opener.

    Arguments are streamed if the name stands first, as models are trained to write it; an object with other keys or
    another order is read when it is whole.

    Attributes:
        closer: marker behind a call; may be left out.
        separator: text between two calls.
        is_bare: a call may begin the text without the opener.
    """

    closer = ""
    separator = ""
    is_bare = False

    def __init__(self) -> None:
        super().__init__()
        if self.is_bare:
            self._state = self._start

    def _start(self) -> bool:
        """A text that begins with an object may be a call."""
        begin = self._buffer.lstrip()
        if not begin:
            return self._is_over and self._text()
        if begin.startswith("{"):
            self._begin_head(len(self._buffer) - len(begin))
        else:
            self._state = self._text
        return True

    def _head(self) -> bool:
        if found := _HEAD.match(self._buffer, self._at):
            return self._begin_call(found.group(1), found.end(), self._arguments)
        key = _FIRST_KEY.match(self._buffer, self._at)
        if _NO_CALL.match(self._buffer, self._at) or (key and key.group(1) not in _KEYS):
            return self._reject()
        self._scanned = self._scanner.feed(self._buffer, self._scanned)
        if self._scanner.is_done:
            return self._whole_object(self._buffer[self._at : self._scanned])
        if self._scanner.is_broken or self._is_over:
            return self._reject()
        return False

    def _whole_object(self, text: str) -> bool:
        name, arguments = _read_call(text)
        if name is None or arguments is None:
            return self._reject()
        self._begin_call(name, self._scanned, self._between_calls)
        self._give_arguments(arguments)
        return True

    def _after_arguments(self) -> bool:
        found = self._expect("}", ",")
        if found is None:
            return False
        self._scanner = JsonScanner(opened="{")
        self._state = self._further_keys if found == "," else self._between_calls
        return True

    def _further_keys(self) -> bool:
        """Leave out what an object says behind its arguments."""
        self._buffer = self._buffer[self._scanner.feed(self._buffer) :]
        if not self._scanner.is_done and not self._scanner.is_broken:
            return False
        self._state = self._between_calls
        return True

    def _between_calls(self) -> bool:
        found = self._expect(*filter(None, (self.closer, self.separator)))
        if found is None:
            return False
        self._state = self._after_calls
        if found and found == self.separator:
            self._buffer = found + self._buffer
            self._begin_head(len(found))
        return True


class HermesParser(JsonCallParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once per call: Hermes, Qwen, ERNIE."""

    opener = "<tool_call>"
    closer = "</tool_call>"


class Llama3Parser(JsonCallParser):
    """`{"name": ..., "parameters": {...}}`, perhaps behind `<|python_tag|>`, several separated by `;`: Llama 3.1."""

    opener = "<|python_tag|>"
    separator = ";"
    is_bare = True


class JsonArrayParser(JsonCallParser):
    """`[{"name": ..., "parameters": {...}}, ...]`: what the grammar of required calls makes without another format."""

    opener = "["
    closer = "]"
    separator = ","


class NamedCallParser(ToolCallParser):
    """The whole text is the arguments of one function: what the grammar of a named function makes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._state = self._whole_text

    def _whole_text(self) -> bool:
        if self._buffer and not self.num_calls:
            self._begin_call(self._name, 0, self._whole_text)
        self._give_arguments(self._buffer)
        self._buffer = ""
        return False


def _read_call(text: str) -> tuple[str | None, str | None]:
    """Return name and arguments of a call that is one whole object; None for what is missing."""
    try:
        call: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None, None
    call = call["function"] if isinstance(call.get("function"), dict) else call
    name = call.get("name")
    found: Any = next((call[key] for key in ("arguments", "parameters") if key in call), {})
    return name if isinstance(name, str) and name else None, arguments_text(found)
