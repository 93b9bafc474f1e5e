# SPDX-License-Identifier: Apache-2.0
"""Plausible values of the fields of /v1/messages for the fuzz; some are wrong in ways that a deeper check finds."""

from __future__ import annotations

from typing import Any

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
MESSAGE_TOOL: dict[str, Any] = {"name": "f", "description": "adds", "input_schema": SCHEMA}
TEXT_BLOCK = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
TURNS: list[Any] = [
    {"role": "user", "content": "hi"},
    {"role": "user", "content": [TEXT_BLOCK, TEXT_BLOCK]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "so", "signature": "s"},
            {"type": "text", "text": "I add."},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "3", "is_error": True}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [TEXT_BLOCK]}, TEXT_BLOCK]},
    {"role": "assistant", "content": "so"},
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]},
    {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
]
FORMAT = {"type": "json_schema", "schema": SCHEMA}
PROMPT_FIELDS: dict[str, list[Any]] = {
    "messages": [*([turn] for turn in TURNS), TURNS[:4], TURNS[:6], TURNS],
    "system": ["be brief", "", [TEXT_BLOCK], [{"type": "text", "text": "x-anthropic-billing-header: a=1;"}], []],
    "tools": [[MESSAGE_TOOL], [MESSAGE_TOOL, MESSAGE_TOOL], [{"type": "web_search_20250305", "name": "w"}], []],
    "tool_choice": [
        {"type": "auto"},
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "f"},
        {"type": "none"},
    ],
    "thinking": [
        {"type": "enabled", "budget_tokens": 3},
        {"type": "adaptive", "display": "omitted"},
        {"type": "disabled"},
        {"type": "enabled", "budget_tokens": -1},
    ],
    "output_config": [{"effort": "low"}, {"effort": "huge"}, {"format": FORMAT}, {"format": {"type": "xml"}}, {}],
    "output_format": [FORMAT, None],
    "context_management": [{"edits": [{"type": "clear_thinking_20251015"}]}, {"edits": [{"type": "compact_20260112"}]}],
    "chat_template_kwargs": [{"enable_thinking": False}, {"x": [1, {"y": None}]}],
}
MESSAGES_FIELDS: dict[str, list[Any]] = {
    **PROMPT_FIELDS,
    "max_tokens": [0, 1, 5, 30],
    "stop_sequences": [["e"], ["a", "th"], []],
}
RICH_PROMPT: dict[str, Any] = {
    "messages": TURNS[1:4],
    "system": [TEXT_BLOCK],
    "tools": [MESSAGE_TOOL],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 3},
    "output_config": {"effort": "low", "format": FORMAT},
}
"""Fields that make a body rich in places."""
