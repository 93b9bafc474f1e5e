# SPDX-License-Identifier: Apache-2.0
"""Validation of the messages and tools of a conversation, for `LLM` and the server."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.json_types import check_json, check_unicode, shorten

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of OpenAI's API. Templates know others; `ChatTemplates.render` checks that they do."""
REASONING_KEYS = ("reasoning_content", "reasoning")  # two names of one text
TEXT_KEYS = ("name", "tool_call_id", *REASONING_KEYS)
REFUSED_KEYS = {
    "function_call": "is deprecated in OpenAI's API; use tool_calls",
    "audio": "this server supports text only",
}
MAX_MESSAGE_ITEMS = 16384
"""Maximum number of messages, content parts and tool calls in a conversation; templates take time for each."""
MAX_TOOLS = 1024
MAX_JSON_LENGTH = 2**20
"""Maximum length of tools, template variables and structured values in messages, in characters of JSON."""
FUNCTION_NAME = re.compile("[a-zA-Z0-9_-]{1,128}")


def check_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the messages with contents that are a text or a list of text parts; nulls are dropped.

    An assistant's content may be missing, and is None then. Its reasoning has both names, `reasoning` and
    `reasoning_content`. Unknown keys are kept, because the template may use them. `shape_messages` makes of this what a
    template reads.

    Raises:
        InvalidRequestError: a message is invalid; the field is `messages[i].KEY`, or `messages` if there are too many.
    """
    if not messages:
        raise InvalidRequestError("messages", "expected at least one message")
    num_items = len(messages)
    if num_items <= MAX_MESSAGE_ITEMS:
        num_items += sum(map(_num_parts, messages))
    if num_items > MAX_MESSAGE_ITEMS:
        raise InvalidRequestError(
            "messages", f"at most {MAX_MESSAGE_ITEMS} messages, parts and tool calls in all, got {num_items}"
        )
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _num_parts(message: Any) -> int:
    """Return the number of parts and tool calls of a message that need not be valid."""
    if not isinstance(message, Mapping):
        return 0
    lists = (message.get("content"), message.get("tool_calls"))
    return sum(len(value) for value in lists if isinstance(value, list))


def _message(field: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(field, f"expected an object, got {shorten(message)}")
    role = message.get("role")
    if role == "function":
        raise InvalidRequestError(f"{field}.role", "'function' is deprecated in OpenAI's API; use tool")
    if not isinstance(role, str) or not role:
        expected = f"expected {', '.join(ROLES)} or another role that the chat template knows"
        raise InvalidRequestError(f"{field}.role", f"{expected}, got {shorten(role)}")
    for key, reason in REFUSED_KEYS.items():
        if message.get(key) is not None:
            raise InvalidRequestError(f"{field}.{key}", reason)
    result = {str(key): value for key, value in message.items() if value is not None}
    for key, value in result.items():
        if not key.isascii() or not isinstance(value, str) or not value.isascii():
            check_unicode(field, key)
            _check_value(f"{field}.{key[:64]}", key, value)
    for key in TEXT_KEYS:
        if not isinstance(result.get(key, ""), str):
            raise InvalidRequestError(f"{field}.{key}", f"expected text, got {shorten(result[key])}")
    if "reasoning" in result or "reasoning_content" in result:
        _add_reasoning(field, result)
    if (calls := result.pop("tool_calls", None)) not in (None, []):
        result["tool_calls"] = _calls(f"{field}.tool_calls", role, calls)
    result["content"] = _content(f"{field}.content", result)
    return result


def _check_value(field: str, key: str, value: Any) -> None:
    """Check a value of a message before any of it is converted; texts and parts are limited by the context."""
    if isinstance(value, str):
        check_unicode(field, value)
    else:
        check_json(field, value, None if key == "content" and isinstance(value, list) else MAX_JSON_LENGTH)


def _add_reasoning(field: str, message: dict[str, Any]) -> None:
    """Give the reasoning of a message both of its names."""
    texts = {message[key] for key in REASONING_KEYS if key in message}
    if len(texts) > 1:
        raise InvalidRequestError(f"{field}.reasoning", "differs from reasoning_content; send one of them")
    message.update(dict.fromkeys(REASONING_KEYS, texts.pop()))


def _content(field: str, message: Mapping[str, Any]) -> str | list[dict[str, Any]] | None:
    """Return the content of a message; None for an assistant's message without content."""
    content, role = message.get("content"), message["role"]
    if content is None and role == "assistant":
        return message["refusal"] if isinstance(message.get("refusal"), str) else None
    if isinstance(content, Mapping) and role == "tool":
        return json.dumps(content, ensure_ascii=False)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(field, f"expected text or a list of text parts, got {shorten(content)}")
    kinds = ("text", "refusal") if role == "assistant" else ("text",)
    return [_part(field, part, kinds) for part in content]


def _part(field: str, part: Any, kinds: Sequence[str]) -> dict[str, Any]:
    """Return a part of a content as a text part."""
    if isinstance(part, str):  # vLLM takes such parts, too
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in kinds:
        got = f"type {shorten(kind)}" if kind else shorten(part)
        raise InvalidRequestError(
            field, f"expected parts of type {' or '.join(kinds)}, got {got}: this server supports text only"
        )
    if not isinstance(part.get(kind), str):
        raise InvalidRequestError(field, f"expected a text as {kind} of a part, got {shorten(part.get(kind))}")
    return {**part, "type": "text", "text": part[kind]}


def _calls(field: str, role: str, calls: Any) -> list[dict[str, Any]]:
    if role != "assistant":
        raise InvalidRequestError(field, f"allowed only for role assistant, got role {role}")
    if not isinstance(calls, list):
        raise InvalidRequestError(field, "expected a list")
    return [_call(f"{field}[{i}]", call) for i, call in enumerate(calls)]


def _call(field: str, call: Any) -> dict[str, Any]:
    """Return a call with JSON text as arguments; nulls are dropped."""
    if not isinstance(call, Mapping) or call.get("type") not in (None, "function"):
        raise InvalidRequestError(field, "expected an object of type function")
    call = _without_nulls(call)
    if not isinstance(call.get("id", ""), str):
        raise InvalidRequestError(f"{field}.id", "expected text")
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{field}.function", "expected an object with name and arguments")
    function = _without_nulls(function)
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        raise InvalidRequestError(f"{field}.function.arguments", "expected JSON text")
    return {**call, "type": "function", "function": {**function, "arguments": arguments or "{}"}}


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an object that are not null: null counts as absent."""
    return {name: value for name, value in fields.items() if value is not None}


def check_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the tools, validated, in OpenAI's format.

    Raises:
        InvalidRequestError: a tool is invalid; the field is `tools[i].KEY`.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError("tools", f"at most {MAX_TOOLS} tools, got {len(tools)}")
    check_json("tools", tools, MAX_JSON_LENGTH)
    checked = [_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools)]
    names = set()
    for i, tool in enumerate(checked):
        name = tool["function"]["name"]
        if name in names:
            raise InvalidRequestError(f"tools[{i}].function.name", f"{name!r} is not unique")
        names.add(name)
    return checked


def _tool(field: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise InvalidRequestError(f"{field}.type", "expected function")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{field}.function", "expected an object")
    name = function.get("name")
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{field}.function.name", f"expected 1 to 128 of the characters a-z, A-Z, 0-9, _ and -, got {shorten(name)}"
        )
    _check_type(f"{field}.function.description", function.get("description"), str, "text")
    _check_type(f"{field}.function.strict", function.get("strict"), bool, "true or false")
    _check_parameters(f"{field}.function.parameters", function.get("parameters"))
    return {**_without_nulls(tool), "function": _without_nulls(function)}


def _check_parameters(field: str, schema: Any) -> None:
    if schema is None:
        return
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise InvalidRequestError(field, "expected a JSON schema of type object")
    _check_type(f"{field}.properties", schema.get("properties"), Mapping, "an object")
    for name, value in (schema.get("properties") or {}).items():
        if not isinstance(value, (Mapping, bool)):
            raise InvalidRequestError(
                f"{field}.properties", f"expected a schema for {shorten(name)}, got {shorten(value)}"
            )
    _check_type(f"{field}.required", schema.get("required"), list, "a list of names")


def _check_type(field: str, value: Any, expected: type, name: str) -> None:
    if value is not None and not isinstance(value, expected):
        raise InvalidRequestError(field, f"expected {name}, got {shorten(value)}")
