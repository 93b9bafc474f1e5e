# SPDX-License-Identifier: Apache-2.0
"""The tool parsers of Qwen3-Coder and GLM-4.5, whose calls have tags around each parameter."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.json_types import parse_json
from fastdeploy.entrypoints.openai.parsers.python_literal import parse_literal
from fastdeploy.entrypoints.openai.parsers.stream_parser import find_first, partial_match_length
from fastdeploy.entrypoints.openai.parsers.tool_parser import ConvertingToolParser, Schemas

MAX_TAG_LENGTH = 400  # characters; a longer tag is not a call
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_KEY, _VALUE_END = "<arg_key>", "</arg_value>"
_NAME = re.compile(r"[^\s<{]+")
_DEFINITION = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")


class TaggedToolParser(ConvertingToolParser):
    """Base of the parsers of calls with tags around each parameter.

    Models leave out end tags. A value without its end tag ends at the next parameter. If none follows, it ends at the
    first tag of another kind.

    A value is converted to the type in the function's schema, and remains text if that fails.

    Attributes:
        parameter: text that begins a parameter.
        parameter_end: text after its value.
        key_and_value: matches the text between these, with groups for name and value.
        other_tags: other tags than those of a parameter.
    """

    parameter = ""
    parameter_end = ""
    key_and_value = re.compile("")
    other_tags: Sequence[str] = ()

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._schema: Mapping[str, Any] = {}

    def _begin_function(self, name: str, num_consumed: int) -> bool:
        self._schema = self._schemas.get(name, {})
        return self._begin_members(name, num_consumed, self._between_parameters)

    def _between_parameters(self) -> bool:
        marker = self._consume(self.parameter, self.parameter_end, *self.end_markers)
        if marker is None or (not marker and self._is_truncated(self.parameter, self.parameter_end)):
            return False
        if marker == self.parameter:
            self._num_scanned = 0
            self._state = self._parse_parameter
        elif marker != self.parameter_end:
            self._end_members()
            self._state = self._after_calls
        return True

    def _parse_parameter(self) -> bool:
        ends = (self.parameter_end, self.parameter)
        end = find_first(self._buffer, ends, self._num_scanned)
        if end is None and not self._is_finished:
            self._num_scanned = max(0, len(self._buffer) - max(map(len, ends)) + 1)
            return False
        tags = (*ends, *self.end_markers)
        index, marker = end or (len(self._buffer) - partial_match_length(self._buffer, tags), "")
        if marker != self.parameter_end:
            index, _ = find_first(self._buffer, self.other_tags, end=index) or (index, "")
        self._emit_parameter(self._buffer[:index])
        self._buffer = self._buffer[index:].removeprefix(self.parameter_end)
        self._state = self._between_parameters
        return True

    def _emit_parameter(self, text: str) -> None:
        """Emit a parameter, given the text after its beginning, unless the text ends within the parameter's name."""
        match = self.key_and_value.fullmatch(text)
        if match is not None:
            key = match.group(1).strip()
            properties = self._schema.get("properties") or {}
            self._emit_member(key, convert(match.group(2), properties.get(key, {}), self._schema))


class Qwen3CoderToolParser(TaggedToolParser):
    """Parses `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`.

    Models leave out `<tool_call>`, too.
    """

    start_markers = (_CALL, _FUNCTION)
    parameter = _PARAMETER
    parameter_end = _PARAMETER_END
    key_and_value = re.compile(r"([^>]*)>\n?(.*?)\n?", re.DOTALL)
    end_markers = (_FUNCTION_END, _CALL_END)
    other_tags = (_FUNCTION_END, _CALL_END, _CALL, _FUNCTION)

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


class Glm45ToolParser(TaggedToolParser):
    """Parses `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>`."""

    start_markers = (_CALL,)
    parameter = _KEY
    parameter_end = _VALUE_END
    key_and_value = re.compile(r"(.*?)(?:</arg_key>\s*)?<arg_value>(.*)", re.DOTALL)
    end_markers = (_CALL_END,)
    other_tags = (_CALL_END, _CALL)

    def _parse_head(self) -> bool:
        head = self._buffer[self._head_start : self._head_start + MAX_TAG_LENGTH]
        text = head.strip()
        name, _, _ = text.partition("<")
        if _NAME.fullmatch(name.rstrip()) is None and text:
            return self._reject_call()
        rest = text[len(name) :]
        is_cut = self._is_finished and rest.startswith("</") and _CALL_END.startswith(rest)
        if rest.startswith((_KEY, _CALL_END)) or is_cut:
            return self._begin_function(name.rstrip(), self._head_start + head.index("<"))
        may_follow = _KEY.startswith(rest) or _CALL_END.startswith(rest)
        is_decided = not may_follow or len(head) == MAX_TAG_LENGTH or self._is_finished
        return self._reject_call() if is_decided else False


def convert(text: str, schema: Any, root: Mapping[str, Any] | None = None) -> Any:
    """Return `text` as a value of the schema's type, or unchanged if the type is string or the text does not fit.

    Values are written as JSON or, if the schema specifies a type, as Python literals, which some models prefer.

    Args:
        root: the schema that has the definitions to which `$ref` refers.
    """
    types = schema_types(schema, root)
    if "string" in types and not ("null" in types and text == "null"):
        return text
    for parse in (_parse_json, parse_literal) if types else (_parse_json,):
        try:
            return parse(text)
        except InvalidRequestError:
            continue
    return text


def _parse_json(text: str) -> Any:
    return parse_json("parameter", text)


def schema_types(schema: Any, root: Mapping[str, Any] | None = None) -> set[str]:
    """Return the types that a schema allows, as far as it specifies them; alternatives that are all texts are strings.

    Args:
        root: the schema that has the definitions to which `$ref` refers.
    """
    types, pending, seen = set[str](), [schema], set[int]()
    while pending:
        part = resolve_reference(pending.pop(), root)
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))  # a definition may contain itself
        declared = part.get("type")
        types |= {name for name in (declared if isinstance(declared, list) else [declared]) if isinstance(name, str)}
        if declared is None and is_text_only(part):
            types.add("string")
        for key in ("anyOf", "oneOf", "allOf"):
            options = part.get(key)
            pending += options if isinstance(options, list) else []
    return types


def is_text_only(schema: Mapping[str, Any]) -> bool:
    """Return whether `enum` or `const` allows nothing but certain texts."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return isinstance(values, list) and values != [] and all(isinstance(value, str) for value in values)


def resolve_reference(schema: Any, root: Mapping[str, Any] | None) -> Any:
    """Return the definition of `root` to which a schema refers by `$ref`; any other schema is returned unchanged."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    found = _DEFINITION.fullmatch(reference) if isinstance(reference, str) else None
    definitions = (root or {}).get(found.group(1)) if found else None
    return definitions.get(found.group(2), schema) if found and isinstance(definitions, Mapping) else schema
