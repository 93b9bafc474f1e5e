# SPDX-License-Identifier: Apache-2.0
"""Bodies of /v1/messages and /v1/messages/count_tokens; `fields` has what is in them.

The docstrings describe the fields in the OpenAPI document and in the documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from fastdeploy.entrypoints.openai.field_rules import FieldRules
from fastdeploy.entrypoints.openai.messages_api.fields import (
    COUNT_RULES,
    MESSAGE,
    MESSAGE_RULES,
    THINKING,
    TOOL_CHOICES,
    TOOLS,
)
from fastdeploy.entrypoints.openai.protocol import RequestFields

_OBJECTS = {"type": "object"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "messages": {"minItems": 1, "items": {**_OBJECTS, "required": list(MESSAGE.required)}},
    "tools": {"items": {**_OBJECTS, "required": list(TOOLS.honoured[TOOLS.default].required)}},
    "tool_choice": {"properties": {"type": {"enum": list(TOOL_CHOICES.honoured)}}, "required": ["type"]},
    "thinking": {"properties": {"type": {"enum": list(THINKING.honoured)}}, "required": ["type"]},
}
"""Field -> what its schema says beyond its type and its range."""


class MessagesRequest(RequestFields, kw_only=True):
    """Body of POST /v1/messages.

    Attributes:
        max_tokens: required; maximum number of output tokens, reasoning included; the end of the context is a limit
            as well
        messages: the conversation; roles user, assistant and system; an assistant's message at the end is continued
        system: the system prompt, a text or text blocks; the line with which Claude Code attributes its requests is
            left out, because it would be different in each request
        stop_sequences: texts at which the output ends
        tools: custom tools that the model may call, at most 1024; tools of other types are left out if they stand
            beside custom ones
        tool_choice: `auto`, `any`, `tool` or `none`
        thinking: `enabled` with `budget_tokens`, `adaptive`, `between_tools` or `disabled`; no effect without
            --reasoning-parser
        output_config: `format` is the schema that the output must follow, `effort` is passed to the template
        output_format: the older place of the `format` in `output_config`
        context_management: `clear_thinking_20251015` has no effect, because the template chooses which reasoning stays
            in the prompt; other edits are refused
        chat_template_kwargs: further variables for the template
    """

    rules: ClassVar[FieldRules] = MESSAGE_RULES
    schemas: ClassVar[Mapping[str, dict[str, Any]]] = SCHEMAS

    max_tokens: int | None = None
    messages: list[dict[str, Any]] | None = None
    system: str | list[Any] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens.

    Attributes:
        model, messages, system, tools, tool_choice, thinking, output_config, output_format: as in `/v1/messages`
        context_management, chat_template_kwargs: as in `/v1/messages`
    """

    rules: ClassVar[FieldRules] = COUNT_RULES
    schemas: ClassVar[Mapping[str, dict[str, Any]]] = SCHEMAS

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    system: str | list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
