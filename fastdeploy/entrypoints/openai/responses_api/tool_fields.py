# SPDX-License-Identifier: Apache-2.0
"""Which tools of POST /v1/responses, and which choices of them, are honoured, left out or refused."""

from __future__ import annotations

from typing import Any

from fastdeploy.entrypoints.openai.object_rules import ObjectRules, TypeRules

TYPE = {"type": "the type"}
NO_PROGRAMS = "models do not call tools from programs here"
BACKGROUND_CALLS = "calls are made in the answer, not beside it"
_HOSTED = "there are no hosted tools; offer a function and run it in the client"
_CALLERS: tuple[Any, ...] = ([], ["direct"])

_FUNCTION = ObjectRules(
    {
        "output_schema": "what functions return is not checked",
        "defer_loading": "all functions are in the prompt from the beginning",
    },
    {"async": (BACKGROUND_CALLS, (False,)), "allowed_callers": (NO_PROGRAMS, _CALLERS)},
    honoured={
        **TYPE,
        "name": "name of the function",
        "description": "for the template",
        "parameters": "JSON schema of the arguments",
        "strict": "true enforces the schema",
    },
    required=("name",),
)
_CUSTOM = {"custom": "use a function with one parameter of type string"}
TOOLS = TypeRules(
    honoured={
        "function": _FUNCTION,
        "namespace": ObjectRules(
            honoured={
                **TYPE,
                "name": "name of the namespace; the prompt shows its functions as `NAMESPACE__FUNCTION`",
                "description": "in the prompt in front of the description of its first function",
                "tools": "its functions",
            },
            required=("name", "tools"),
        ),
    },
    left_out={
        **_CUSTOM,
        "programmatic_tool_calling": NO_PROGRAMS,
        **dict.fromkeys(
            (
                *("file_search", "computer", "computer_use_preview", "web_search", "web_search_2025_08_26"),
                *("web_search_preview", "web_search_preview_2025_03_11", "mcp", "code_interpreter"),
                *("image_generation", "local_shell", "shell", "tool_search", "apply_patch"),
            ),
            _HOSTED,
        ),
    },
)
NAMESPACE_TOOLS = TypeRules({"function": _FUNCTION}, left_out=_CUSTOM)

TOOL_CHOICES = TypeRules(
    honoured={
        "function": ObjectRules(
            honoured={**TYPE, "name": "the function that must be called", "namespace": "its namespace, if it has one"},
            required=("name",),
        ),
        "allowed_tools": ObjectRules(
            honoured={
                **TYPE,
                "mode": "`auto` or `required`",
                "tools": "what may be called: objects of type `function`, or `namespace` for all of its functions",
            },
            required=("mode", "tools"),
        ),
    },
    refused={
        "custom": "there are no custom tools; use functions",
        "programmatic_tool_calling": NO_PROGRAMS,
        **dict.fromkeys(
            (
                *("file_search", "web_search_preview", "web_search_preview_2025_03_11", "computer", "computer_use"),
                *("computer_use_preview", "image_generation", "code_interpreter", "mcp", "apply_patch", "shell"),
            ),
            _HOSTED,
        ),
    },
)

ALLOWED_TOOLS = TypeRules(
    {
        "function": TOOL_CHOICES.honoured["function"],
        "namespace": ObjectRules(honoured={**TYPE, "name": "name of the namespace"}, required=("name",)),
    },
    TOOLS.left_out,
)
