# SPDX-License-Identifier: Apache-2.0
"""Checks of the messages and tools of a conversation; shared by `LLM` and the server."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastdeploy.core.errors import InvalidRequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_KEYS = ("name", "tool_call_id", "reasoning_content")
REFUSED_KEYS = {
    "function_call": "is OpenAI's older spelling; use tool_calls",
    "audio": "this server reads and writes text only",
}
FUNCTION_NAME = re.compile("[a-zA-Z0-9_-]{1,64}")


def check_messages(given: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages as templates want them: contents are texts, developer is system, what is null is left out.

    Keys that are not known here stay: the template may read them.

    Raises:
        InvalidRequestError: naming `messages[i].field`.
    """
    if not given:
        raise InvalidRequestError("messages", "expected at least one message")
    return [_message(f"messages[{at}]", message) for at, message in enumerate(given)]


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(where, f"expected an object, got {message!r:.64}")
    role = message.get("role")
    if role == "function":
        raise InvalidRequestError(f"{where}.role", "'function' is OpenAI's older spelling; use tool")
    if role not in ROLES:
        raise InvalidRequestError(f"{where}.role", f"expected one of {', '.join(ROLES)}, got {role!r:.64}")
    for key, reason in REFUSED_KEYS.items():
        if message.get(key) is not None:
            raise InvalidRequestError(f"{where}.{key}", reason)
    made = {str(key): value for key, value in message.items() if value is not None}
    if "reasoning" in made:  # another spelling of it
        made.setdefault("reasoning_content", made.pop("reasoning"))
    for key in TEXT_KEYS:
        if not isinstance(made.get(key, ""), str):
            raise InvalidRequestError(f"{where}.{key}", f"expected text, got {made[key]!r:.64}")
    if (calls := made.pop("tool_calls", None)) not in (None, []):
        made["tool_calls"] = _calls(f"{where}.tool_calls", role, calls)
    made["content"] = _content(f"{where}.content", made)
    made["role"] = "system" if role == "developer" else role
    return made


def _content(where: str, message: Mapping[str, Any]) -> str | None:
    content, role = message.get("content"), message["role"]
    if content is None and role == "assistant":
        if isinstance(message.get("refusal"), str):
            return str(message["refusal"])
        if "tool_calls" in message or "reasoning_content" in message:
            return None
    if isinstance(content, Mapping) and role == "tool":
        return json.dumps(content, ensure_ascii=False)
    return _text(where, content, ("text", "refusal") if role == "assistant" else ("text",))


def _text(where: str, content: Any, kinds: Sequence[str]) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(where, f"expected text or a list of text parts, got {content!r:.64}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in kinds or not isinstance(part.get(kind), str):
            raise InvalidRequestError(
                where, f"expected parts of type {' or '.join(kinds)}, got {kind!r:.64}: this server reads text only"
            )
        texts.append(part[kind])
    return "\n".join(texts)


def _calls(where: str, role: str, given: Any) -> list[dict[str, Any]]:
    if role != "assistant":
        raise InvalidRequestError(where, f"belongs to role assistant, not to {role}")
    if not isinstance(given, list):
        raise InvalidRequestError(where, "expected a list")
    return [_call(f"{where}[{at}]", call) for at, call in enumerate(given)]


def _call(where: str, call: Any) -> dict[str, Any]:
    """Return a call with its arguments as text."""
    if not isinstance(call, Mapping) or call.get("type", "function") != "function":
        raise InvalidRequestError(where, "expected an object of type function")
    if not isinstance(call.get("id", ""), str):
        raise InvalidRequestError(f"{where}.id", "expected text")
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where}.function", "expected an object with name and arguments")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        raise InvalidRequestError(f"{where}.function.arguments", "expected JSON text")
    return {**call, "type": "function", "function": {**function, "arguments": arguments or "{}"}}


def check_tools(given: Sequence[Any]) -> list[dict[str, Any]]:
    """Return tools in OpenAI's shape.

    Raises:
        InvalidRequestError: naming `tools[i].field`.
    """
    tools = [_tool(f"tools[{at}]", tool) for at, tool in enumerate(given)]
    names = [tool["function"]["name"] for tool in tools]
    for at, name in enumerate(names):
        if name in names[:at]:
            raise InvalidRequestError(f"tools[{at}].function.name", f"{name!r} is given twice")
    return tools


def _tool(where: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise InvalidRequestError(f"{where}.type", "expected function")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{where}.function", "expected an object")
    name = function.get("name")
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{where}.function.name", f"expected 1 to 64 of the characters a-z, A-Z, 0-9, _ and -, got {name!r:.80}"
        )
    _check_type(f"{where}.function.description", function.get("description"), str, "text")
    _check_type(f"{where}.function.strict", function.get("strict"), bool, "true or false")
    _check_parameters(f"{where}.function.parameters", function.get("parameters"))
    return {**tool, "function": dict(function)}


def _check_parameters(where: str, schema: Any) -> None:
    if schema is None:
        return
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise InvalidRequestError(where, "expected a JSON schema of type object")
    _check_type(f"{where}.properties", schema.get("properties"), Mapping, "an object")
    for name, value in (schema.get("properties") or {}).items():
        if not isinstance(value, (Mapping, bool)):
            raise InvalidRequestError(f"{where}.properties", f"expected a schema for {name!r:.64}, got {value!r:.64}")
    _check_type(f"{where}.required", schema.get("required"), list, "a list of names")


def _check_type(where: str, value: Any, kind: type, name: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise InvalidRequestError(where, f"expected {name}, got {value!r:.64}")
