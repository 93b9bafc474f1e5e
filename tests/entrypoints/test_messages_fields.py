# SPDX-License-Identifier: Apache-2.0
"""The tables of /v1/messages have every field, block, tool and key of the installed client, beta included."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params

from fastdeploy.entrypoints.openai.messages_api.fields import (
    BLOCKS,
    CONTEXT_MANAGEMENT,
    COUNT_RULES,
    EDITS,
    MESSAGE,
    MESSAGE_RULES,
    OUTPUT_CONFIG,
    OUTPUT_FORMATS,
    THINKING,
    TOOL_CHOICES,
    TOOLS,
)
from fastdeploy.entrypoints.openai.messages_api.protocol import CountTokensRequest, MessagesRequest
from fastdeploy.entrypoints.openai.object_rules import ObjectRules, TypeRules
from tests.entrypoints.chat_server import says
from tests.entrypoints.client_types import keys_of, missing_fields, missing_keys, missing_types, objects_in, type_names
from tests.entrypoints.server_process import ServerProcess

CREATE: list[Any] = [
    message_create_params.MessageCreateParamsStreaming,
    message_create_params.MessageCreateParamsNonStreaming,
    beta_create_params.MessageCreateParamsStreaming,
]
COUNT: list[Any] = [
    message_count_tokens_params.MessageCountTokensParams,
    beta_count_tokens_params.MessageCountTokensParams,
]
HEADERS = {"anthropic-beta": "betas", "anthropic-user-profile-id": "user_profile_id"}
HEADERS["anthropic-workspace-id"] = "workspace_id"


def fields_of(body: type) -> dict[str, Any]:
    """Return the parameters of a request by their names in Python, where some are sent as headers."""
    return {HEADERS.get(name, name): kind for name, kind in keys_of(body).items()}


def models_at(*path: str) -> list[type]:
    """Return the object types at a place of any of the bodies."""
    models = [*CREATE, *COUNT]
    for key in path:
        found = [(one, fields_of(one)) for one in models]
        models = [kind for _, keys in found if key in keys for kind in objects_in(keys[key])]
    return list(dict.fromkeys(models))


@pytest.mark.parametrize("body", CREATE)
def test_every_field_of_messages_is_in_one_class(body: type) -> None:
    assert list(missing_fields(MessagesRequest, MESSAGE_RULES, fields_of(body))) == []


@pytest.mark.parametrize("body", COUNT)
def test_every_field_of_counts_is_in_one_class(body: type) -> None:
    assert list(missing_fields(CountTokensRequest, COUNT_RULES, fields_of(body))) == []


def test_every_block_in_messages_and_results_is_in_one_class() -> None:
    blocks = models_at("messages", "content") + models_at("system")
    results = [keys_of(block)["content"] for block in blocks if type_names(block) == ("tool_result",)]
    assert len(results) == 2
    blocks += [block for content in results for block in objects_in(content)]
    assert list(missing_types(BLOCKS, dict.fromkeys(blocks))) == []


def test_every_key_of_a_message_is_in_one_class() -> None:
    for model in models_at("messages"):
        assert list(missing_keys(MESSAGE, keys_of(model))) == []


@pytest.mark.parametrize(
    ("path", "rules"),
    [
        (("tools",), TOOLS),
        (("tool_choice",), TOOL_CHOICES),
        (("thinking",), THINKING),
        (("output_config", "format"), OUTPUT_FORMATS),
        (("context_management", "edits"), EDITS),
    ],
)
def test_every_type_is_in_one_class(path: tuple[str, ...], rules: TypeRules) -> None:
    assert list(missing_types(rules, models_at(*path))) == []


@pytest.mark.parametrize(
    ("path", "rules"), [(("output_config",), OUTPUT_CONFIG), (("context_management",), CONTEXT_MANAGEMENT)]
)
def test_every_key_is_in_one_class(path: tuple[str, ...], rules: ObjectRules) -> None:
    for model in models_at(*path):
        assert list(missing_keys(rules, keys_of(model))) == []


def test_the_comparison_finds_what_is_missing() -> None:
    tools = TypeRules({"custom": TOOLS.honoured["custom"]}, {"bash_20250124": "no"}, default="custom")
    assert "web_search_20250305" in set(missing_types(tools, models_at("tools")))
    assert list(missing_keys(ObjectRules(honoured={"effort": ""}), keys_of(models_at("output_config")[0]))) == [
        "format"
    ]
    assert "thinking" in [kind for one in models_at("messages", "content") for kind in keys_of(one)]


WITHOUT_EFFECT: dict[str, Any] = {
    "cache_control": {"type": "ephemeral", "ttl": "1h"},
    "metadata": {"user_id": "u"},
    "service_tier": "auto",
    "inference_geo": "eu",
    "speed": "fast",
    "diagnostics": {"previous_message_id": None},
    "billing_policy": {"type": "billing_policy", "bill_to": "self"},
    "betas": ["x"],
    "user_profile_id": "p",
    "workspace_id": "w",
    "container": None,
    "mcp_servers": [],
    "fallbacks": [],
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "unknown": None,
}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_fields_without_effect_and_values_that_ask_for_nothing_are_accepted(server: ServerProcess, name: str) -> None:
    body = {"messages": says("a"), "max_tokens": 1, name: WITHOUT_EFFECT[name]}
    assert server.post("/v1/messages", body).status_code == 200


def test_a_null_user_counts_as_absent(server: ServerProcess) -> None:
    body = {"messages": says("a"), "max_tokens": 1, "metadata": {"user_id": None}}
    assert server.post("/v1/messages", body).status_code == 200
