# SPDX-License-Identifier: Apache-2.0
"""The tool parser of Qwen3-Coder, whose calls have one tag per parameter."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.json_types import parse_json
from fastdeploy.entrypoints.openai.parsers.stream_parser import find_first
from fastdeploy.entrypoints.openai.parsers.tool_parser import ToolParser

MAX_TAG_LENGTH = 400  # characters; a longer tag is not a call
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_OTHER_TAGS = (_FUNCTION_END, _CALL_END, _CALL, _FUNCTION)
VALUE_ENDS = (_PARAMETER_END, _PARAMETER)
_NAME = re.compile(r"[^\s<]+")


class Qwen3CoderToolParser(ToolParser):
    """Parses `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`.

    Models leave out `<tool_call>` and end tags. A value without `</parameter>` ends at the next parameter. If none
    follows, it ends at the first tag of another kind.

    A value is converted to the type in the function's schema, and remains text if that fails. A value is emitted when
    it is complete.
    """

    start_markers = (_CALL, _FUNCTION)

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """Create a parser for functions, given the schema of each function's parameters."""
        super().__init__()
        self._schemas = schemas
        self._properties: Mapping[str, Any] = {}
        self._num_values = 0

    def _parse_head(self) -> bool:
        start = self._head_start
        if self._buffer.endswith(_FUNCTION, 0, start):
            start -= len(_FUNCTION)
        head = self._buffer[start : start + MAX_TAG_LENGTH]
        text = head.lstrip()
        end = head.find(">")
        if end >= 0 and text.startswith(_FUNCTION):
            name = head[:end].lstrip()[len(_FUNCTION) :].strip()
            is_name = _NAME.fullmatch(name) is not None
            return self._begin_function(name, start + end + 1) if is_name else self._reject_call()
        may_be_function = _FUNCTION.startswith(text[: len(_FUNCTION)]) or text.startswith(_FUNCTION)
        is_decided = not may_be_function or end >= 0 or len(head) == MAX_TAG_LENGTH or self._is_finished
        return self._reject_call() if is_decided else False

    def _begin_function(self, name: str, num_consumed: int) -> bool:
        self._properties = self._schemas.get(name, {}).get("properties") or {}
        self._num_values = 0
        self._begin_call(name, num_consumed, self._between_parameters)
        self._emit_arguments("{")
        return True

    def _between_parameters(self) -> bool:
        marker = self._consume(_PARAMETER, _FUNCTION_END)
        if marker is None:
            return False
        if marker == _PARAMETER:
            self._num_scanned = 0
            self._state = self._parse_parameter
            return True
        if self._is_finished and not self._buffer.strip():  # the output was truncated here
            return False
        self._emit_arguments("}")
        self._state = self._parse_end
        return True

    def _parse_parameter(self) -> bool:
        end = find_first(self._buffer, VALUE_ENDS, self._num_scanned)
        if end is None and not self._is_finished:
            self._num_scanned = max(0, len(self._buffer) - max(map(len, VALUE_ENDS)) + 1)
            return False
        index, marker = end or (len(self._buffer), "")
        if marker != _PARAMETER_END:
            index, _ = find_first(self._buffer, _OTHER_TAGS, end=index) or (index, "")
        self._emit_parameter(self._buffer[:index])
        self._buffer = self._buffer[index:].removeprefix(_PARAMETER_END)
        self._state = self._between_parameters
        return True

    def _emit_parameter(self, text: str) -> None:
        """Emit a parameter, given the text after `<parameter=`."""
        key, bracket, value = text.partition(">")
        separator = ", " if self._num_values else ""
        self._num_values += 1
        self._emit_arguments(separator + (self._format_argument(key.strip(), value) if bracket else json.dumps(key)))

    def _format_argument(self, key: str, text: str) -> str:
        value = convert(text.removeprefix("\n").removesuffix("\n"), self._properties.get(key, {}))
        return f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"

    def _parse_end(self) -> bool:
        if self._consume(_CALL_END) is None:
            return False
        self._state = self._after_calls
        return True


def convert(text: str, schema: Any) -> Any:
    """Return `text` as a value of the schema's type, or unchanged if the type is string or the text does not fit."""
    types = schema_types(schema)
    if "string" in types and not ("null" in types and text == "null"):
        return text
    try:
        return parse_json("parameter", text)
    except InvalidRequestError:
        return text


def schema_types(schema: Any) -> set[str]:
    """Return the types that a schema allows, as far as it specifies them."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    types = {name for name in (declared if isinstance(declared, list) else [declared]) if isinstance(name, str)}
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else []:
            types |= schema_types(option)
    return types
