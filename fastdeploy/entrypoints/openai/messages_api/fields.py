# SPDX-License-Identifier: Apache-2.0
"""What is honoured, has no effect or is refused in bodies of /v1/messages, at every depth.

A test compares these tables with the types of the installed client, and docs/guide/request-fields.md shows them.
"""

from __future__ import annotations

from typing import Any

from fastdeploy.entrypoints.openai.field_rules import EXTENSIONS, NOTED_EXTENSIONS, FieldRules
from fastdeploy.entrypoints.openai.object_rules import ObjectRules, TypeRules

_SERVICE = "identifies the request in a hosted service"
_PREFIXES = "equal prefixes are found without it; `cache_salt` separates them"
_ONE_SPEED = "all requests run at the same speed"
_STORES_NOTHING = "nothing is stored between requests"
_HOSTED_TOOLS = "tools do not run on this server; define a custom tool and run it in the client"
_TEXT_ONLY = "this server reads and writes text only"
_NO_SCHEMA = "it has no schema that a model could be given; define a custom tool with an input_schema"
_ONE_MODEL = "one model answers; send the request again in the client"
_BUDGET_NAME = "its name in this protocol is thinking.budget_tokens"
_DIRECT: tuple[Any, ...] = (["direct"], {"type": "direct"}, [])

_COMMON_WITHOUT_EFFECT: dict[str, str] = {
    "cache_control": _PREFIXES,
    "betas": "is the header `anthropic-beta`; nothing depends on it",
    "user_profile_id": f"is a header, or {_SERVICE}",
    "workspace_id": f"is a header, or {_SERVICE}",
    "billing_policy": "nothing is billed",
    "speed": _ONE_SPEED,
}
_COMMON_REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "mcp_servers": (_HOSTED_TOOLS, ([],)),
    "compaction": ("summarize the conversation with a request of your own", ()),
}
MESSAGE_RULES = FieldRules(
    without_effect={
        **_COMMON_WITHOUT_EFFECT,
        "metadata": _SERVICE,
        "service_tier": _ONE_SPEED,
        "inference_geo": "the server runs where it was started",
        "diagnostics": "prompts are not compared with earlier ones; see `cache_read_input_tokens`",
        **EXTENSIONS,
    },
    noted=NOTED_EXTENSIONS,
    object_fields=EXTENSIONS,
    refused={
        **_COMMON_REFUSED,
        "container": (_HOSTED_TOOLS, ()),
        "fallbacks": (_ONE_MODEL, ([], "default")),
        "fallback_credit_token": (_ONE_MODEL, ()),
        "thread": (_STORES_NOTHING, ()),
        "stop": ("its name in this protocol is stop_sequences", ()),
        "max_completion_tokens": ("its name in this protocol is max_tokens", ()),
        "response_format": ("its name in this protocol is output_config.format", ()),
        "reasoning_effort": ("its name in this protocol is output_config.effort", ()),
        "thinking_token_budget": (_BUDGET_NAME, ()),
        "reasoning_max_tokens": (_BUDGET_NAME, ()),
        "parallel_tool_calls": ("its name in this protocol is tool_choice.disable_parallel_tool_use", (True,)),
    },
)
"""Fields of a body of /v1/messages that are not honoured."""
COUNT_RULES = FieldRules(without_effect=_COMMON_WITHOUT_EFFECT, refused=_COMMON_REFUSED)
"""Fields of a body of /v1/messages/count_tokens that are not honoured."""


_TYPE = {"type": "its type"}
_CACHE = {"cache_control": _PREFIXES}
_SERVER_RESULT = f"it is the result of a hosted tool; {_HOSTED_TOOLS}"
BLOCKS = TypeRules(
    honoured={
        "text": ObjectRules(
            {**_CACHE, "citations": "the text itself has what was quoted"},
            honoured={**_TYPE, "text": "the text"},
            required=("text",),
        ),
        "thinking": ObjectRules(
            {"signature": "it is not verified"},
            honoured={**_TYPE, "thinking": "the reasoning of an earlier turn"},
            required=("thinking",),
        ),
        "tool_use": ObjectRules(
            _CACHE,
            {"caller": ("only the model calls tools", _DIRECT), "toolset_name": (_NO_SCHEMA, ())},
            {**_TYPE, "id": "passed to the template", "name": "name of the tool", "input": "the arguments"},
            ("id", "name", "input"),
        ),
        "tool_result": ObjectRules(
            _CACHE,
            {"toolset_name": (_NO_SCHEMA, ())},
            {
                **_TYPE,
                "tool_use_id": "passed to the template",
                "content": "a text or text blocks",
                "is_error": "passed to the template",
            },
            ("tool_use_id",),
        ),
    },
    refused={
        "image": _TEXT_ONLY,
        "document": f"{_TEXT_ONLY}; send the document's text as a text block",
        "search_result": "send the text of the result as a text block",
        "redacted_thinking": "it is encrypted for another server",
        "server_tool_use": _HOSTED_TOOLS,
        "web_search_tool_result": _SERVER_RESULT,
        "web_fetch_tool_result": _SERVER_RESULT,
        "advisor_tool_result": _SERVER_RESULT,
        "code_execution_tool_result": _SERVER_RESULT,
        "bash_code_execution_tool_result": _SERVER_RESULT,
        "text_editor_code_execution_tool_result": _SERVER_RESULT,
        "tool_search_tool_result": _SERVER_RESULT,
        "tool_reference": _HOSTED_TOOLS,
        "browser_state": _TEXT_ONLY,
        "mcp_tool_use": _HOSTED_TOOLS,
        "mcp_tool_result": _SERVER_RESULT,
        "mcp_tool_listing": _HOSTED_TOOLS,
        "container_upload": _HOSTED_TOOLS,
        "compaction": "it is a summary that another server made; send its text as a text block",
        "tool_addition": "send all tools in `tools`",
        "tool_removal": "send the remaining tools in `tools`",
        "fallback": _ONE_MODEL,
    },
)
"""Content blocks; `input` says which of them belong into whose messages."""

MESSAGE = ObjectRules(
    refused={
        "clear_at": ("the client chooses which messages it sends", ("never",)),
        "output_config": ("send the effort in the `output_config` of the body", ({},)),
    },
    honoured={"role": "user, assistant or system", "content": "a text or content blocks"},
    required=("role", "content"),
)
"""A message of the conversation."""

_CLIENT_TOOLS = (
    "bash_20241022",
    "bash_20250124",
    "text_editor_20241022",
    "text_editor_20250124",
    "text_editor_20250429",
    "text_editor_20250728",
    "computer_20241022",
    "computer_20250124",
    "computer_20251124",
    "computer_toolset_20260801",
    "browser_toolset_20260801",
    "memory_20250818",
)
_SERVER_TOOLS = (
    "code_execution_20250522",
    "code_execution_20250825",
    "code_execution_20260120",
    "code_execution_20260521",
    "web_search_20250305",
    "web_search_20260209",
    "web_search_20260318",
    "web_fetch_20250910",
    "web_fetch_20260209",
    "web_fetch_20260309",
    "web_fetch_20260318",
    "tool_search_tool_bm25",
    "tool_search_tool_bm25_20251119",
    "tool_search_tool_regex",
    "tool_search_tool_regex_20251119",
    "advisor_20260301",
)
_CUSTOM_TOOL = ObjectRules(
    {
        **_CACHE,
        "eager_input_streaming": "the input is always streamed as it is generated",
        "defer_loading": "all tools are in the prompt from the beginning",
    },
    {"allowed_callers": ("only the model calls tools", _DIRECT)},
    {
        "type": "custom, or absent",
        "name": "1 to 128 of the characters a-z, A-Z, 0-9, _ and -",
        "description": "what the tool does",
        "input_schema": "JSON schema of type object",
        "strict": "true enforces the schema",
        "input_examples": "passed to the template",
    },
    ("name", "input_schema"),
)
TOOLS = TypeRules(
    {"custom": _CUSTOM_TOOL},
    {"mcp_toolset": _HOSTED_TOOLS},
    default="custom",
    left_out={**dict.fromkeys(_CLIENT_TOOLS, _NO_SCHEMA), **dict.fromkeys(_SERVER_TOOLS, _HOSTED_TOOLS)},
)

_PARALLEL = {**_TYPE, "disable_parallel_tool_use": "true allows at most one call"}
TOOL_CHOICES = TypeRules(
    {
        "auto": ObjectRules(honoured=_PARALLEL),
        "any": ObjectRules(honoured=_PARALLEL),
        "tool": ObjectRules(
            {"disable_parallel_tool_use": "there is one call"},
            honoured={**_TYPE, "name": "name of the tool"},
            required=("name",),
        ),
        "none": ObjectRules(honoured=_TYPE),
    }
)

_THINKING = {**_TYPE, "display": "`omitted` leaves the text out of thinking blocks; `summarized` and `updates` do not"}
_UNVERIFIED = {"block_binding": "thinking blocks are not verified"}
_BUDGET = {"budget_tokens": "maximum number of reasoning tokens"}
THINKING = TypeRules(
    {
        "enabled": ObjectRules(_UNVERIFIED, honoured={**_THINKING, **_BUDGET}, required=("budget_tokens",)),
        "adaptive": ObjectRules(_UNVERIFIED, honoured=_THINKING),
        "between_tools": ObjectRules(honoured=_TYPE),
        "disabled": ObjectRules(honoured=_TYPE),
    }
)

OUTPUT_CONFIG = ObjectRules(
    refused={"task_budget": ("use max_tokens, and the budget of thinking", ())},
    honoured={"effort": "passed to the template as `reasoning_effort`", "format": "what the output must look like"},
)
OUTPUT_FORMATS = TypeRules(
    {
        "json_schema": ObjectRules(
            honoured={**_TYPE, "schema": "JSON schema that the output follows exactly"}, required=("schema",)
        )
    }
)

_EDIT = "this server does not change conversations; send the shorter one"
CONTEXT_MANAGEMENT = ObjectRules(honoured={"edits": "a list of edits"})
EDITS = TypeRules(
    {
        "clear_thinking_20251015": ObjectRules(
            {"keep": "the template chooses which reasoning stays in the prompt"}, honoured=_TYPE
        )
    },
    {"clear_tool_uses_20250919": _EDIT, "compact_20260112": _EDIT},
)

OBJECTS: dict[str, ObjectRules | TypeRules] = {
    "Messages": MESSAGE,
    "Content blocks": BLOCKS,
    "Tools": TOOLS,
    "`tool_choice`": TOOL_CHOICES,
    "`thinking`": THINKING,
    "`output_config`": OUTPUT_CONFIG,
    "`output_config.format` and `output_format`": OUTPUT_FORMATS,
    "`context_management`": CONTEXT_MANAGEMENT,
    "`context_management.edits`": EDITS,
}
"""Title of the table in the documentation -> what is in bodies of /v1/messages and /v1/messages/count_tokens."""
