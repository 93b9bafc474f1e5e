# SPDX-License-Identifier: Apache-2.0
"""Translates bodies of /v1/messages into those of a chat, and errors of the chat back to the client's fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.json_types import json_type, shorten, to_integer
from fastdeploy.core.notes import note_once
from fastdeploy.entrypoints.openai.messages_api.fields import (
    BLOCKS,
    CONTEXT_MANAGEMENT,
    EDITS,
    MESSAGE,
    OUTPUT_CONFIG,
    OUTPUT_FORMATS,
    THINKING,
    TOOL_CHOICES,
    TOOLS,
)
from fastdeploy.entrypoints.openai.messages_api.protocol import CountTokensRequest, MessagesRequest
from fastdeploy.entrypoints.openai.protocol import ChatCompletionRequest

PLACES = {
    "user": ("text", "tool_result"),
    "assistant": ("thinking", "text", "tool_use"),
    "system": ("text",),
    "tool_result": ("text",),
}
"""Where content blocks are -> the types that belong there."""
EFFORTS = ("low", "medium", "high", "xhigh", "max")
DISPLAYS = ("summarized", "omitted", "updates")
ATTRIBUTION = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n?", re.IGNORECASE)
ATTRIBUTION_NOTE = (
    "/v1/messages: lines x-anthropic-billing-header at the beginning of system blocks are left out of prompts: they "
    "differ in each request, so that no prefix after them could be found in the cache"
)
THINKING_NOTE = "/v1/messages: `thinking` has no effect, because the server has no --reasoning-parser"
_CHAT_MESSAGE = re.compile(r"messages\[(\d+)\]")
_CHAT_TOOL = re.compile(r"tools\[(\d+)\](?:\.function\b)?")
_NAMES = {
    "stop": "stop_sequences",
    "reasoning_max_tokens": "thinking.budget_tokens",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "tool_choice.function.name": "tool_choice.name",
    "continue_final_message": "messages",
}
"""Field of a chat -> field of /v1/messages."""


@dataclass
class ChatInput:
    """A body as the body of a chat.

    Attributes:
        places: where each message of the chat is in the client's body.
        tool_places: where each tool of the chat is in the client's body.
        format_field: the client's field that says what the output must look like.
        hides_thinking: the text of the reasoning is left out of the answer.
    """

    request: ChatCompletionRequest
    places: Sequence[str]
    tool_places: Sequence[str] = ()
    format_field: str = "output_config.format"
    hides_thinking: bool = False

    def client_field(self, name: str) -> str:
        """Return the client's name of a field of the chat."""
        if (found := _CHAT_MESSAGE.match(name)) is not None:
            return self.places[int(found.group(1))]
        if name.startswith("response_format"):
            return self.format_field
        if (found := _CHAT_TOOL.match(name)) is not None:
            rest = name[found.end() :]
            if rest.startswith(".parameters"):
                rest = ".input_schema" + rest.removeprefix(".parameters")
            return self.tool_places[int(found.group(1))] + rest
        return _NAMES.get(name, name)


def chat_input(
    body: MessagesRequest | CountTokensRequest, has_reasoning: bool, ignores_unknown: bool = False
) -> ChatInput:
    """Return the body of the chat that a body of /v1/messages describes.

    Args:
        has_reasoning: the server separates the reasoning of the model.
        ignores_unknown: unknown keys of objects are left out (--ignore-unknown-fields).

    Raises:
        InvalidRequestError: naming the field.
        ApiError: 400, an object has an unknown or a refused key, or a refused type.
    """
    conversation = _Conversation(ignores_unknown)
    conversation.add_system(body.system)
    for i, message in enumerate(body.messages or []):
        conversation.add(f"messages[{i}]", message)
    _check_edits(body.context_management, ignores_unknown)
    config = OUTPUT_CONFIG.read("output_config", body.output_config or {}, ignores_unknown)
    values: dict[str, Any] = {"model": body.model, "messages": conversation.messages()}
    if conversation.is_continued():
        values["continue_final_message"] = True
    tools = _functions(body.tools or [], ignores_unknown)
    values["tools"] = [*tools.values()] or None
    if body.tool_choice is not None:
        values |= _tool_choice(body.tool_choice, ignores_unknown)
    if "effort" in config:
        values["reasoning_effort"] = _one_of("output_config.effort", config["effort"], EFFORTS)
    format_field, response_format = _response_format(config.get("format"), body.output_format, ignores_unknown)
    thinking = _Thinking.read(body.thinking, has_reasoning, ignores_unknown)
    values |= {
        "chat_template_kwargs": thinking.template_variables(body.chat_template_kwargs),
        "reasoning_max_tokens": thinking.budget,
        "response_format": response_format,
    }
    if isinstance(body, MessagesRequest):
        values |= _generation_values(body)
    return ChatInput(ChatCompletionRequest(**values), conversation.places, [*tools], format_field, thinking.is_hidden)


def _generation_values(body: MessagesRequest) -> dict[str, Any]:
    """Return the fields of the chat that say how to generate."""
    if body.max_tokens is None:
        raise InvalidRequestError("max_tokens", "is missing")
    shared = ("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "speculative", "cache_salt", "max_tokens")
    return {"stop": body.stop_sequences, **{name: getattr(body, name) for name in shared}}


@dataclass
class _ChatMessage:
    """A message of the chat; the texts of its content are joined at the end."""

    place: str
    role: str
    texts: list[str] = field(default_factory=list)
    others: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the message; the texts of an assistant are pieces of one text, those of others are parts."""
        content: Any = "".join(self.texts)
        if self.role == "assistant" and not self.texts and self.others:
            content = None
        elif self.role != "assistant" and len(self.texts) > 1:
            content = [{"type": "text", "text": text} for text in self.texts]
        return {"role": self.role, "content": content, **self.others}


class _Conversation:
    """The messages of the chat; messages of one role that follow each other become one."""

    def __init__(self, ignores_unknown: bool) -> None:
        self._messages: list[_ChatMessage] = []
        self._ignores_unknown = ignores_unknown

    @property
    def places(self) -> list[str]:
        """Where each message is in the client's body."""
        return [message.place for message in self._messages]

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages of the chat."""
        return [message.to_dict() for message in self._messages]

    def is_continued(self) -> bool:
        """Return whether the last message is the beginning of the answer.

        Raises:
            InvalidRequestError: it has calls of tools, whose results come next.
        """
        last = self._messages[-1] if self._messages else None
        if last is None or last.role != "assistant":
            return False
        if "tool_calls" in last.others:
            raise InvalidRequestError(last.place, "expected a message with a tool_result after this one")
        return True

    def add_system(self, content: Any) -> None:
        """Add the system prompt, if there is one, without the line that attributes requests to a client."""
        if content is None:
            return
        texts = [_without_attribution(text) for _, text in _texts("system", content, "system", self._ignores_unknown)]
        if texts := [text for text in texts if text is not None]:
            self._messages.append(_ChatMessage("system", "system", texts))

    def add(self, place: str, given: Any) -> None:
        """Add a message of the client."""
        message = MESSAGE.read(place, given, self._ignores_unknown)
        role = _one_of(f"{place}.role", message["role"], ("user", "assistant", "system"))
        content = message["content"]
        if not content:  # an empty text or list
            self._message(place, role)
        for block_place, kind, block in _blocks(f"{place}.content", content, role, self._ignores_unknown):
            if kind == "tool_result":
                self._messages.append(_tool_message(block_place, block, self._ignores_unknown))
            elif kind == "thinking":
                others = self._message(block_place, role).others
                text = _text(f"{block_place}.thinking", block["thinking"])
                others["reasoning_content"] = others.get("reasoning_content", "") + text
            elif kind == "tool_use":
                others = self._message(block_place, role).others
                others.setdefault("tool_calls", []).append(_call(block_place, block))
            else:
                self._message(block_place, role).texts.append(_text(f"{block_place}.text", block["text"]))

    def _message(self, place: str, role: str) -> _ChatMessage:
        """Return the last message if it has this role, else a new one."""
        if not self._messages or self._messages[-1].role != role or role == "system":
            self._messages.append(_ChatMessage(place, role))
        return self._messages[-1]


def _tool_message(place: str, block: Mapping[str, Any], ignores_unknown: bool) -> _ChatMessage:
    content = block.get("content", "")
    texts = [text for _, text in _texts(f"{place}.content", content, "tool_result", ignores_unknown)]
    others: dict[str, Any] = {"tool_call_id": _text(f"{place}.tool_use_id", block["tool_use_id"])}
    if "is_error" in block:
        others["is_error"] = _boolean(f"{place}.is_error", block["is_error"])
    return _ChatMessage(place, "tool", texts, others)


def _call(place: str, block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = block["input"]
    if not isinstance(arguments, Mapping):
        raise InvalidRequestError(f"{place}.input", f"expected an object, got {json_type(arguments)}")
    function = {"name": _text(f"{place}.name", block["name"]), "arguments": arguments}
    return {"id": _text(f"{place}.id", block["id"]), "type": "function", "function": function}


def _texts(place: str, content: Any, owner: str, ignores_unknown: bool) -> Iterator[tuple[str, str]]:
    """Yield place and text of each text block."""
    for block_place, _, block in _blocks(place, content, owner, ignores_unknown):
        yield block_place, _text(f"{block_place}.text", block["text"])


def _blocks(place: str, content: Any, owner: str, ignores_unknown: bool) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield place, type and keys of each content block; a text is one block."""
    if isinstance(content, str):
        if content:
            yield place, "text", {"text": content}
        return
    if not isinstance(content, list):
        raise InvalidRequestError(place, f"expected a text or a list of content blocks, got {shorten(content)}")
    for i, block in enumerate(content):
        block_place = f"{place}[{i}]"
        kind, keys = BLOCKS.read(block_place, block, ignores_unknown)
        if kind not in PLACES[owner]:
            raise InvalidRequestError(
                f"{block_place}.type", f"expected one of {', '.join(PLACES[owner])} here, got {kind}"
            )
        yield block_place, kind, keys


def _without_attribution(text: str) -> str | None:
    """Return a system text without its attribution line; None if nothing else is in it."""
    found = ATTRIBUTION.match(text)
    if found is None:
        return text
    note_once(ATTRIBUTION_NOTE)
    return text[found.end() :] or None


def _functions(given: Sequence[Any], ignores_unknown: bool) -> dict[str, dict[str, Any]]:
    """Return the tools in the format of a chat, by their places in the body, without those that are left out.

    Nothing is left out if nothing would be left, but refused: such a request asks for what this server cannot do.
    Claude Code searches the web with one, and would take an answer without a search for its results.
    """
    leaves_out = not all(map(TOOLS.is_left_out, given))
    functions = {}
    for i, one in enumerate(given):
        if leaves_out and TOOLS.leaves_out("/v1/messages: tools", one):
            continue
        _, tool = TOOLS.read(f"tools[{i}]", one, ignores_unknown)
        tool.pop("type", None)
        tool["parameters"] = tool.pop("input_schema")
        functions[f"tools[{i}]"] = {"type": "function", "function": tool}
    return functions


def _tool_choice(given: Any, ignores_unknown: bool) -> dict[str, Any]:
    """Return `tool_choice` and `parallel_tool_calls` of the chat."""
    kind, choice = TOOL_CHOICES.read("tool_choice", given, ignores_unknown)
    values: dict[str, Any] = {"tool_choice": "required" if kind == "any" else kind}
    if kind == "tool":
        name = _text("tool_choice.name", choice["name"])
        values["tool_choice"] = {"type": "function", "function": {"name": name}}
    if _boolean("tool_choice.disable_parallel_tool_use", choice.get("disable_parallel_tool_use", False)):
        values["parallel_tool_calls"] = False
    return values


def _response_format(in_config: Any, older: Any, ignores_unknown: bool) -> tuple[str, dict[str, Any] | None]:
    """Return the client's field of the format, and `response_format` of the chat."""
    if in_config is not None and older is not None and in_config != older:
        raise InvalidRequestError("output_format", "differs from output_config.format; send one of them")
    place, given = ("output_config.format", in_config) if in_config is not None else ("output_format", older)
    if given is None:
        return place, None
    _, keys = OUTPUT_FORMATS.read(place, given, ignores_unknown)
    schema = keys["schema"]
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(f"{place}.schema", f"expected an object, got {json_type(schema)}")
    return place, {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}


@dataclass(frozen=True)
class _Thinking:
    """What `thinking` asks for.

    Attributes:
        is_on: None leaves it to the template.
        budget: maximum number of reasoning tokens; None for no limit.
        is_hidden: the text of the reasoning is left out of the answer.
    """

    is_on: bool | None = None
    budget: int | None = None
    is_hidden: bool = False

    @classmethod
    def read(cls, given: Any, has_reasoning: bool, ignores_unknown: bool) -> _Thinking:
        """Read the field; without a parser of reasoning it is checked, and has no effect."""
        if given is None:
            return cls()
        kind, keys = THINKING.read("thinking", given, ignores_unknown)
        display = _one_of("thinking.display", keys.get("display", "summarized"), DISPLAYS)
        budget = to_integer(keys.get("budget_tokens"))
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
            raise InvalidRequestError("thinking.budget_tokens", f"expected a number of tokens, got {shorten(budget)}")
        if not has_reasoning:
            note_once(THINKING_NOTE)
            return cls()
        return cls(kind in ("enabled", "adaptive"), budget, display == "omitted")

    def template_variables(self, given: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the variables of the template with those that turn the reasoning on or off."""
        if self.is_on is None:
            return given
        names = dict(given or {})
        for name in ("enable_thinking", "thinking"):  # templates read one of them
            if names.setdefault(name, self.is_on) != self.is_on:
                raise InvalidRequestError("chat_template_kwargs", f"{name!r} contradicts thinking")
        return names


def _check_edits(given: Any, ignores_unknown: bool) -> None:
    if given is None:
        return
    edits = CONTEXT_MANAGEMENT.read("context_management", given, ignores_unknown).get("edits", [])
    if not isinstance(edits, list):
        raise InvalidRequestError("context_management.edits", f"expected a list, got {shorten(edits)}")
    for i, edit in enumerate(edits):
        EDITS.read(f"context_management.edits[{i}]", edit, ignores_unknown)


def _text(place: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(place, f"expected text, got {shorten(value)}")
    return value


def _boolean(place: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequestError(place, f"expected true or false, got {shorten(value)}")
    return value


def _one_of(place: str, value: Any, expected: Sequence[str]) -> str:
    if value not in expected:
        raise InvalidRequestError(place, f"expected one of {', '.join(expected)}, got {shorten(value)}")
    return str(value)
