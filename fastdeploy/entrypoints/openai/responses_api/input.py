# SPDX-License-Identifier: Apache-2.0
"""Translates the body of POST /v1/responses into a chat, and the chat's names of fields back into the body's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.json_types import shorten
from fastdeploy.core.notes import note_once
from fastdeploy.detokenize.messages import MAX_MESSAGE_ITEMS
from fastdeploy.entrypoints.openai.errors import ApiError
from fastdeploy.entrypoints.openai.object_rules import TypeRules
from fastdeploy.entrypoints.openai.protocol import FIELD_RANGES, ChatCompletionRequest
from fastdeploy.entrypoints.openai.responses_api.protocol import (
    CHAT_FIELDS,
    INCLUDES,
    INCLUDES_WITHOUT_EFFECT,
    INPUT_ITEMS,
    INPUT_PARTS,
    LOGPROBS,
    OUTPUT_PARTS,
    PROMPT_CACHE_OPTIONS,
    REASONING,
    REASONING_PARTS,
    STREAM_OPTIONS,
    SUMMARY_PARTS,
    TEXT,
    TEXT_FORMATS,
    ResponsesRequest,
)
from fastdeploy.entrypoints.openai.responses_api.tools import ToolSet, check_texts, joined_name

ROLES = ("user", "assistant", "system", "developer")
STATIC_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
}
"""Field of the chat -> field of the body."""


@dataclass
class _Message:
    """A message of the chat, and the places in the body that it was made of."""

    content: dict[str, Any]
    place: str
    reasoning_place: str = ""
    call_places: list[str] = field(default_factory=list)


@dataclass
class Translation:
    """The chat that a body asks for.

    Attributes:
        chat: its body.
        has_logprobs: the answer has log-probabilities.
        effort: `reasoning.effort`.
        text_format: `text.format`.
        tools: the functions and their names.
        tool_choice: as the answer repeats it.
    """

    chat: ChatCompletionRequest
    messages: Sequence[_Message]
    has_logprobs: bool
    effort: str | None
    text_format: dict[str, Any]
    tools: ToolSet
    tool_choice: str | dict[str, Any]

    def rename(self, name: str) -> str:
        """Return the body's name of a field of the chat."""
        names = self._names()
        head, rest = name, ""
        while head not in names:
            cut = max(head.rfind("."), head.rfind("["))
            if cut <= 0:
                return name
            head, rest = head[:cut], head[cut:] + rest
        return names[head] + rest

    def _names(self) -> dict[str, str]:
        names = dict(STATIC_NAMES)
        if self.chat.max_tokens is not None:
            names["max_tokens"] = "max_tokens"
        for i, place in enumerate(self.tools.places):
            names[f"tools[{i}]"] = names[f"tools[{i}].function"] = place
        for i, message in enumerate(self.messages):
            names[f"messages[{i}]"] = message.place
            if not message.place.endswith("]"):  # a field that is the content itself
                names[f"messages[{i}].content"] = message.place
            names[f"messages[{i}].reasoning_content"] = message.reasoning_place
            for k, place in enumerate(message.call_places):
                names[f"messages[{i}].tool_calls[{k}]"] = names[f"messages[{i}].tool_calls[{k}].function"] = place
        return names


def translate(body: ResponsesRequest, ignores_unknown: bool) -> Translation:
    """Return the chat that a body asks for.

    Args:
        ignores_unknown: leave unknown keys of objects out.

    Raises:
        InvalidRequestError: a value is invalid; names the field.
        ApiError: 400, a field is unknown, or refused by name.
    """
    _check_options(body, ignores_unknown)
    messages = _messages(body, ignores_unknown)
    text_format, effort = _text_format(body.text, ignores_unknown), _effort(body.reasoning, ignores_unknown)
    tools = ToolSet(body.tools or [], ignores_unknown)
    has_logprobs = _has_logprobs(body, tools)
    chat = ChatCompletionRequest(
        messages=[message.content for message in messages],
        max_completion_tokens=body.max_output_tokens,
        max_tokens=body.max_tokens,
        response_format=_chat_format(text_format) if text_format != {"type": "text"} else None,
        reasoning_effort=effort,
        tools=tools.chat_tools or None,
        tool_choice=tools.chat_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls if tools.places else None,
        logprobs=has_logprobs,
        top_logprobs=body.top_logprobs if has_logprobs else None,
        **{name: getattr(body, name) for name in CHAT_FIELDS},
    )
    tool_choice = body.tool_choice if body.tool_choice is not None else "auto"
    return Translation(chat, messages, has_logprobs, effort, text_format, tools, tool_choice)


def _check_options(body: ResponsesRequest, ignores_unknown: bool) -> None:
    """Check the fields that change nothing in the chat, and those that exclude each other."""
    if None not in (body.max_output_tokens, body.max_tokens) and body.max_output_tokens != body.max_tokens:
        raise InvalidRequestError("max_tokens", f"differs from max_output_tokens {body.max_output_tokens}")
    if body.stream_options is not None:
        STREAM_OPTIONS.read("stream_options", body.stream_options, ignores_unknown)
        if not body.stream:
            raise InvalidRequestError("stream_options", "needs stream: true")
    if body.prompt_cache_options is not None:
        PROMPT_CACHE_OPTIONS.read("prompt_cache_options", body.prompt_cache_options, ignores_unknown)
    if body.truncation == "auto":
        reason = "auto is not supported, because it drops parts of the conversation; send a shorter input"
        raise ApiError(400, f"truncation: {reason}", param="truncation", code="unsupported_parameter")
    if body.truncation not in (None, "disabled"):
        raise InvalidRequestError("truncation", f"expected disabled, got {shorten(body.truncation)}")


def _has_logprobs(body: ResponsesRequest, tools: ToolSet) -> bool:
    """Return whether the answer has log-probabilities; other things that it may include are not there."""
    for name in body.include or ():
        if name not in INCLUDES:
            message = f"include: {shorten(name)} is not available; expected {', '.join(INCLUDES)}"
            raise ApiError(400, message, param="include", code="unsupported_parameter")
        if name in INCLUDES_WITHOUT_EFFECT:
            note_once(f"/v1/responses: include {name} has no effect: {INCLUDES_WITHOUT_EFFECT[name]}")
    has_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs is not None:
        FIELD_RANGES["top_logprobs"].check("top_logprobs", body.top_logprobs)
        if body.top_logprobs and not has_logprobs:
            raise InvalidRequestError("top_logprobs", f'needs include: ["{LOGPROBS}"]')
    if has_logprobs and tools.places and body.tool_choice != "none":
        reason = "cannot be combined with tools that may be called: calls have no log-probabilities"
        raise InvalidRequestError("include", f"{LOGPROBS} {reason}")
    return has_logprobs


def _messages(body: ResponsesRequest, ignores_unknown: bool) -> list[_Message]:
    instructions = body.instructions
    messages = []
    if instructions is not None:
        messages.append(_Message({"role": "system", "content": instructions}, "instructions"))
    if body.input is None:
        raise InvalidRequestError("input", "is missing")
    if isinstance(body.input, str):
        return [*messages, _Message({"role": "user", "content": body.input}, "input")]
    if not body.input:
        raise InvalidRequestError("input", "expected a text, or at least one item")
    if len(body.input) > MAX_MESSAGE_ITEMS:
        raise InvalidRequestError("input", f"at most {MAX_MESSAGE_ITEMS} items, got {len(body.input)}")
    turns = _Turns(messages, ignores_unknown)
    for i, item in enumerate(body.input):
        turns.add(f"input[{i}]", item)
    return messages


class _Turns:
    """Joins items to messages: reasoning, text and calls of the assistant that follow one another are one message."""

    def __init__(self, messages: list[_Message], ignores_unknown: bool) -> None:
        """Append to `messages`."""
        self._messages = messages
        self._ignores_unknown = ignores_unknown
        self._readers: dict[str, Callable[[str, dict[str, Any]], None]] = {
            "message": self._add_message,
            "function_call": self._add_call,
            "function_call_output": self._add_output,
            "reasoning": self._add_reasoning,
        }
        self._open: _Message | None = None  # the assistant's last message, if nothing of another role follows it

    def add(self, place: str, item: Any) -> None:
        """Add an item."""
        if isinstance(item, dict) and item.get("type") is None and "role" not in item and "id" in item:
            item = {**item, "type": "item_reference"}
        kind, given = INPUT_ITEMS.read(place, item, self._ignores_unknown)
        self._readers[kind](place, given)

    def _add_message(self, place: str, given: dict[str, Any]) -> None:
        role, content = given["role"], given["content"]
        if role not in ROLES:
            raise InvalidRequestError(f"{place}.role", f"expected one of {', '.join(ROLES)}, got {shorten(role)}")
        if not isinstance(content, str):
            parts = self._read_parts(f"{place}.content", content, INPUT_PARTS)
            content = [_chat_part(*one, role) for one in parts]
        if role != "assistant":
            self._append(place, {"role": role, "content": content})
            self._open = None
            return
        message = self._assistant(place, ("content", "tool_calls"))
        message.content["content"] = content
        message.place = place

    def _add_call(self, place: str, given: dict[str, Any]) -> None:
        check_texts(place, given, ("name", "namespace", "arguments", "call_id"))
        message = self._assistant(place, ())
        name = joined_name(given["name"], given.get("namespace"))
        function = {"name": name, "arguments": given["arguments"]}
        calls = message.content.setdefault("tool_calls", [])
        calls.append({"id": given["call_id"], "type": "function", "function": function})
        message.call_places.append(place)

    def _add_output(self, place: str, given: dict[str, Any]) -> None:
        check_texts(place, given, ("call_id", "name", "namespace"))
        output = given["output"]
        if not isinstance(output, str):
            parts = self._read_parts(f"{place}.output", output, OUTPUT_PARTS)
            output = [_chat_part(*one, "tool") for one in parts]
        message = {"role": "tool", "tool_call_id": given["call_id"], "content": output}
        if "name" in given:
            message["name"] = joined_name(given["name"], given.get("namespace"))
        self._append(place, message)
        self._open = None

    def _add_reasoning(self, place: str, given: dict[str, Any]) -> None:
        summary = self._texts(f"{place}.summary", given.get("summary", []), SUMMARY_PARTS)
        text = self._texts(f"{place}.content", given.get("content", []), REASONING_PARTS) or summary
        message = self._assistant(place, ("content", "tool_calls", "reasoning_content"))
        if text:
            message.content["reasoning_content"] = text
        message.reasoning_place = f"{place}.content"

    def _assistant(self, place: str, closing: Sequence[str]) -> _Message:
        """Return the assistant's open message; a new one if it has one of the keys `closing`."""
        if self._open is None or any(key in self._open.content for key in closing):
            self._open = self._append(place, {"role": "assistant"})
        return self._open

    def _read_parts(self, place: str, given: Any, rules: TypeRules) -> list[tuple[str, str, dict[str, Any]]]:
        """Return place, type and keys of each part of a list."""
        if not isinstance(given, list):
            raise InvalidRequestError(place, f"expected a text or a list of parts, got {shorten(given)}")
        places = [f"{place}[{i}]" for i in range(len(given))]
        return [(one, *rules.read(one, part, self._ignores_unknown)) for one, part in zip(places, given, strict=True)]

    def _texts(self, place: str, given: Any, rules: TypeRules) -> str:
        """Return the joined texts of a list of parts."""
        parts = self._read_parts(place, given, rules)
        for part_place, _, part in parts:
            check_texts(part_place, part, ("text",))
        return "\n".join(part["text"] for _, _, part in parts)

    def _append(self, place: str, content: dict[str, Any]) -> _Message:
        self._messages.append(_Message(content, place))
        return self._messages[-1]


def _chat_part(place: str, kind: str, given: dict[str, Any], role: str) -> dict[str, Any]:
    key = "refusal" if kind == "refusal" else "text"
    if kind != "input_text" and role != "assistant":
        raise InvalidRequestError(f"{place}.type", f"expected input_text for role {role}, got {kind}")
    check_texts(place, given, (key,))
    return {"type": key, key: given[key]}


def _text_format(text: dict[str, Any] | None, ignores_unknown: bool) -> dict[str, Any]:
    given = TEXT.read("text", text or {}, ignores_unknown).get("format")
    if given is None:
        return {"type": "text"}
    kind, keys = TEXT_FORMATS.read("text.format", given, ignores_unknown)
    return {**keys, "type": kind}


def _chat_format(text_format: dict[str, Any]) -> dict[str, Any]:
    if text_format["type"] != "json_schema":
        return text_format
    schema = {key: value for key, value in text_format.items() if key != "type"}
    return {"type": "json_schema", "json_schema": schema}


def _effort(reasoning: dict[str, Any] | None, ignores_unknown: bool) -> str | None:
    effort = REASONING.read("reasoning", reasoning or {}, ignores_unknown).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise InvalidRequestError("reasoning.effort", f"expected text, got {shorten(effort)}")
    return effort
