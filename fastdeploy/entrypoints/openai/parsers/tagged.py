# SPDX-License-Identifier: Apache-2.0
"""Calls written as tags, one per parameter: Qwen3-Coder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastdeploy.entrypoints.openai.parsers.tool_calls import ToolCallParser

MAX_TAG_LENGTH = 400  # characters: a longer one names no function
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


class TaggedCallParser(ToolCallParser):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`.

    A value is text; it becomes what the function's schema says of the parameter, or stays text if it is no such thing.
    A value is given out when it is whole.
    """

    opener = "<tool_call>"

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the parameters' schemas by function."""
        super().__init__()
        self._schemas = schemas
        self._properties: Mapping[str, Any] = {}
        self._num_values = 0

    def _head(self) -> bool:
        head = self._buffer[self._at : self._at + MAX_TAG_LENGTH]
        begin = head.lstrip()
        end = head.find(">")
        if end >= 0 and begin.startswith(_FUNCTION):
            name = head[:end].lstrip()[len(_FUNCTION) :].strip()
            return self._begin_function(name, self._at + end + 1) if name else self._reject()
        is_open = _FUNCTION.startswith(begin[: len(_FUNCTION)]) or begin.startswith(_FUNCTION)
        is_settled = not is_open or end >= 0 or len(head) == MAX_TAG_LENGTH or self._is_over
        return self._reject() if is_settled else False

    def _begin_function(self, name: str, num_consumed: int) -> bool:
        self._properties = self._schemas.get(name, {}).get("properties") or {}
        self._num_values = 0
        self._begin_call(name, num_consumed, self._between_parameters)
        self._give_arguments("{")
        return True

    def _between_parameters(self) -> bool:
        found = self._expect(_PARAMETER, _FUNCTION_END)
        if found is None:
            return False
        if found == _PARAMETER:
            self._scanned = 0
            self._state = self._parameter
            return True
        if self._is_over and not self._buffer.strip():  # the model was cut off here
            return False
        self._give_arguments("}")
        self._state = self._closing
        return True

    def _parameter(self) -> bool:
        end = self._buffer.find(_PARAMETER_END, self._scanned)
        if end < 0 and not self._is_over:
            self._scanned = max(0, len(self._buffer) - len(_PARAMETER_END) + 1)
            return False
        key, found, value = self._buffer[: end if end >= 0 else None].partition(">")
        text = self._argument(key.strip(), value) if found else json.dumps(key)
        separator = ", " if self._num_values else ""
        self._num_values += 1
        self._give_arguments(separator + text)
        self._buffer = self._buffer[end + len(_PARAMETER_END) :] if end >= 0 else ""
        self._state = self._between_parameters
        return True

    def _argument(self, key: str, value: str) -> str:
        text = value.removeprefix("\n").removesuffix("\n")
        made = convert(text, self._properties.get(key, {}))
        return f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(made, ensure_ascii=False)}"

    def _closing(self) -> bool:
        if self._expect("</tool_call>") is None:
            return False
        self._state = self._after_calls
        return True


def convert(text: str, schema: Any) -> Any:
    """Return what `text` says as a value of the type; text itself for texts and for what is no such value."""
    kinds = schema_kinds(schema)
    if "string" in kinds and not ("null" in kinds and text == "null"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def schema_kinds(schema: Any) -> set[str]:
    """Return the types that a schema allows, as far as it names them."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    kinds = {kind for kind in (given if isinstance(given, list) else [given]) if isinstance(kind, str)}
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else []:
            kinds |= schema_kinds(option)
    return kinds
