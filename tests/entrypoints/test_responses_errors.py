# SPDX-License-Identifier: Apache-2.0
"""Wrong bodies of POST /v1/responses get one error that names the field of the client's body; every type is listed."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.beta import response_create_params as beta_params
from openai.types.responses import response_create_params as params
from openai.types.shared_params.reasoning import Reasoning

from fastdeploy.entrypoints.openai.field_rules import VERBOSITIES
from fastdeploy.entrypoints.openai.object_rules import ObjectRules, TypeRules
from fastdeploy.entrypoints.openai.responses_api.protocol import (
    BODY_RULES,
    INCLUDES,
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
from fastdeploy.entrypoints.openai.responses_api.tool_fields import ALLOWED_TOOLS, NAMESPACE_TOOLS, TOOL_CHOICES, TOOLS
from tests.entrypoints.client_types import (
    keys_of,
    literals,
    missing_fields,
    missing_keys,
    missing_types,
    objects_in,
    type_names,
)
from tests.entrypoints.server_process import ServerProcess

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
SPACE = {"type": "namespace", "name": "crm", "description": "about customers", "tools": [TOOL]}
SEARCH = {"type": "web_search"}
UNSUPPORTED, UNKNOWN, INVALID = "unsupported_parameter", "unknown_parameter", "invalid_value"
HEADERS = {"openai-beta"}  # parameters of the client that it sends as a header

WRONG: list[tuple[dict[str, Any], str, str, str]] = [
    ({"input": None}, "input", "is missing", INVALID),
    ({"input": []}, "input", "expected a text, or at least one item", INVALID),
    ({"input": ["hi"]}, "input[0]", "expected an object, got 'hi'", INVALID),
    ({"input": "the " * 300}, "input", "expected 1 to 199 tokens", "context_length_exceeded"),
    ({"input": [USER] * 16385}, "input", "at most 16384 items, got 16385", INVALID),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": ""}] * 16384}]}, "input",
     "at most 16384 messages, parts and tool calls in all, got 16385", INVALID),
    ({"input": [{"role": "user"}]}, "input[0].content", "is missing", INVALID),
    ({"input": [USER, {"role": "robot", "content": "a"}]}, "input[1].role", "expected one of user, ", INVALID),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "expected a text or a list of parts", INVALID),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
     "input[0].content[0].type", "input_image is not supported: this server reads and writes text only", UNSUPPORTED),
    ({"input": [{"role": "user", "content": [{"type": "output_text", "text": "x"}]}]}, "input[0].content[0].type",
     "expected input_text for role user, got output_text", INVALID),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]}, "input[0].content[0].text",
     "expected text, got 5", INVALID),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "item_reference is not supported: "
     "responses are not stored", UNSUPPORTED),
    ({"input": [{"id": "msg_1"}]}, "input[0].type", "item_reference is not supported", UNSUPPORTED),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gA"}]}, "input[0].encrypted_content",
     "reasoning is returned as text", UNSUPPORTED),
    ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary", "expected a text or a list", INVALID),
    ({"input": [{"type": "web_search_call", "id": "1"}]}, "input[0].type", "there are no hosted tools", UNSUPPORTED),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "is missing", INVALID),
    ({"input": [{"type": "function_call", "name": 5, "arguments": "{}", "call_id": "1"}]}, "input[0].name",
     "expected text, got 5", INVALID),
    ({"input": [{"type": "function_call_output", "call_id": "1", "output": [{"type": "input_file"}]}]},
     "input[0].output[0].type", "input_file is not supported", UNSUPPORTED),
    ({"input": [{**USER, "colour": "red"}]}, "input[0].colour", "unknown field", UNKNOWN),
    ({"instructions": 5}, "instructions", "expected str, got int", INVALID),
    ({"max_output_tokens": 0}, "max_output_tokens", "expected an integer in [1, ", INVALID),
    ({"temperature": -1}, "temperature", "expected a number in [0, ", INVALID),
    ({"top_logprobs": 3}, "top_logprobs", 'needs include: ["message.output_text.logprobs"]', INVALID),
    ({"top_logprobs": -2}, "top_logprobs", "expected an integer", INVALID),
    ({"include": ["message.output_text"]}, "include", "'message.output_text' is not available", UNSUPPORTED),
    ({"include": ["message.output_text.logprobs"], "tools": [TOOL], "tool_choice": "required"}, "include",
     "cannot be combined with tools that may be called", INVALID),
    ({"truncation": "auto"}, "truncation", "auto is not supported", UNSUPPORTED),
    ({"truncation": "x"}, "truncation", "expected disabled, got 'x'", INVALID),
    ({"metadata": {"a": 1}}, "metadata", "expected str, got int", INVALID),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options", "needs stream: true", INVALID),
    ({"stream_options": {"include_usage": True}, "stream": True}, "stream_options.include_usage", "unknown", UNKNOWN),
    ({"text": {"verbosity": "loud"}}, "text.verbosity", "expected one of low, medium, high, got 'loud'", INVALID),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "expected one of text, json_object, json", INVALID),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "is missing", INVALID),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 5}}}, "text.format.schema",
     "expected an object, got a number", INVALID),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "expected one of none, minimal, low", INVALID),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "there is one mode", UNSUPPORTED),
    ({"tools": [{"type": "web_searches"}]}, "tools[0].type", "expected one of function, namespace, got", INVALID),
    ({"tools": [SEARCH], "tool_choice": "required"}, "tool_choice", "needs tools", INVALID),
    ({"tools": [SEARCH, {**TOOL, "name": "a b"}]}, "tools[1].name", "expected 1 to 128 of the characters", INVALID),
    ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name", "is missing", INVALID),
    ({"tools": [{**SPACE, "name": ""}]}, "tools[0].name", "expected a name of at least one character", INVALID),
    ({"tools": [{**SPACE, "name": 5}]}, "tools[0].name", "expected text, got 5", INVALID),
    ({"tools": [{**SPACE, "tools": {}}]}, "tools[0].tools", "expected a list of functions", INVALID),
    ({"tools": [{**SPACE, "tools": [SPACE]}]}, "tools[0].tools[0].type", "expected one of function, got", INVALID),
    ({"tools": [{**SPACE, "tools": [{**TOOL, "name": 5}]}]}, "tools[0].tools[0].name", "expected text, got 5", INVALID),
    ({"tools": [{**SPACE, "tools": [{**TOOL, "description": 5}]}]}, "tools[0].tools[0].description",
     "expected text, got 5", INVALID),
    ({"tools": [{**SPACE, "tools": [TOOL, {**TOOL, "name": "x" * 124}]}]}, "tools[0].tools[1].name",
     "expected 1 to 128 of the characters", INVALID),
    ({"tools": [TOOL, {**TOOL, "name": "crm__f"}, SPACE]}, "tools[2].tools[0].name", "'crm__f' is not unique", INVALID),
    ({"tools": [{**SPACE, "name": "a", "tools": [{**TOOL, "name": "b__f"}]}, {**SPACE, "name": "a__b"}]},
     "tools[1].tools[0].name", "'a__b__f' is not unique", INVALID),
    ({"tools": [{**SPACE, "tools": [{**TOOL, "parameters": {"type": "array"}}]}]}, "tools[0].tools[0].parameters",
     "type object", INVALID),
    ({"tools": [SPACE] * 1025}, "tools", "at most 1024 tools, got 1025", INVALID),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "is missing", INVALID),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name", "expected 1 to 128 of the characters", INVALID),
    ({"tools": [{**TOOL, "parameters": {"type": "array"}}]}, "tools[0].parameters", "type object", INVALID),
    ({"tools": [{**TOOL, "async": True}]}, "tools[0].async", "calls are made in the answer", UNSUPPORTED),
    ({"tools": [TOOL, TOOL]}, "tools[1].name", "'f' is not unique", INVALID),
    ({"tools": [TOOL] * 1025}, "tools", "at most 1024 tools, got 1025", INVALID),
    ({"tool_choice": "required"}, "tool_choice", "needs tools", INVALID),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name",
     "'g' is not one of the tools: f", INVALID),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [
        {"type": "function", "name": "g"}]}}, "tool_choice.tools", "'g' is not one of the tools: f", INVALID),
    ({"tools": [TOOL], "tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice.type",
     "mcp is not supported", UNSUPPORTED),
    ({"tools": [TOOL, SEARCH], "tool_choice": {"type": "web_search_preview"}}, "tool_choice.type",
     "web_search_preview is not supported", UNSUPPORTED),
    ({"tools": [TOOL, SEARCH], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [SEARCH]}},
     "tool_choice.tools[0].type", "web_search is not supported", UNSUPPORTED),
    ({"tools": [SPACE], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name",
     "'f' is not one of the tools: crm__f", INVALID),
    ({"tools": [SPACE], "tool_choice": {"type": "function", "name": "f", "namespace": 5}}, "tool_choice.namespace",
     "expected text, got 5", INVALID),
    ({"tools": [SPACE], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "namespace", "name": "erp"}]}}, "tool_choice.tools[0].name", "'erp' is no namespace with functions",
     INVALID),
    ({"stop": [""]}, "stop", "expected non-empty strings", INVALID),
    ({"logit_bias": {"x": 1}}, "logit_bias", "expected token ids as keys", INVALID),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "", INVALID),
    ({"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}}, "text.format",
     "a request may have one constraint", INVALID),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "responses are not stored", UNSUPPORTED),
    ({"conversation": "conv_1"}, "conversation", "responses are not stored", UNSUPPORTED),
    ({"background": True}, "background", "a response ends with its connection", UNSUPPORTED),
    ({"max_tokens": 5}, "max_tokens", "differs from max_output_tokens 2", INVALID),
    ({"max_output_tokens": None, "max_tokens": 0}, "max_tokens", "expected an integer in [1, ", INVALID),
    ({"max_output_tokens": None, "max_tokens": 2**31}, "max_tokens", "expected an integer in [1, ", INVALID),
    ({"max_completion_tokens": 2}, "max_completion_tokens", "use max_output_tokens", UNSUPPORTED),
    ({"n": 2}, "n", "unknown field; it belongs to /v1/chat/completions", UNKNOWN),
    ({"echo": True}, "echo", "unknown field; it belongs to /v1/completions", UNKNOWN),
    ({"inputs": "a"}, "inputs", "unknown field; did you mean 'input'?", UNKNOWN),
    ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm", "send the request", UNSUPPORTED),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "is a field of its own", INVALID),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message", "code"), WRONG)
def test_wrong_bodies_are_refused_by_the_client_s_names(
    server: ServerProcess, fields: dict[str, Any], param: str, message: str, code: str
) -> None:
    response = server.post("/v1/responses", {"input": "hi", "max_output_tokens": 2, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)
    assert message in error["message"] and error["message"].startswith(param)


ACCEPTED: list[dict[str, Any]] = [
    {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "service_tier": "flex", "store": True},
    {"background": False, "previous_response_id": None, "tool_choice": "auto", "parallel_tool_calls": True},
    {"truncation": "disabled", "reasoning": {"summary": "auto", "context": "auto", "effort": None}},
    {"text": {"verbosity": "medium", "format": {"type": "text"}}, "include": [], "top_logprobs": 0},
    {"prompt_cache_options": {"mode": "implicit", "ttl": "30m", "prewarm": False}, "prompt_cache_retention": "24h"},
    {"input": [{**USER, "type": "message", "id": "msg_1", "status": "completed", "phase": "commentary"}]},
    {"input": [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, USER]},
    {"input": [USER, {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "so"}]}]},
    {"seed": 1, "top_k": 5, "min_p": 0.1, "ignore_eos": True, "cache_salt": "s", "priority": 1, "timeout": 50},
    {"speculative": {"method": "off"}, "request_id": "mine", "colour": None},
    {"client_metadata": {"session": "s"}},
    {"include": [*INCLUDES]},
    *({"text": {"verbosity": value}} for value in VERBOSITIES),
    {"tools": [{"type": kind} for kind in TOOLS.left_out], "tool_choice": "auto", "parallel_tool_calls": True},
    {"tools": [SEARCH], "tool_choice": "none", "parallel_tool_calls": False},
    {"tools": [{**SPACE, "tools": [{"type": "custom", "name": "c"}]}], "include": [LOGPROBS]},
    {"tools": [{**TOOL, "defer_loading": True}], "tool_choice": "none"},
]


@pytest.mark.parametrize("fields", ACCEPTED)
def test_fields_without_effect_and_neutral_values_are_accepted(server: ServerProcess, fields: dict[str, Any]) -> None:
    response = server.post("/v1/responses", {"input": "hi", "max_output_tokens": 2, **fields})
    assert response.status_code == 200, response.text
    assert response.json()["status"] == "incomplete"


def test_stored_responses_are_not_there(client: openai.OpenAI) -> None:
    calls = [client.responses.retrieve, client.responses.delete, client.responses.cancel]
    for call in (*calls, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="responses are not stored") as caught:
            call("resp_1")  # type: ignore[operator]
        assert caught.value.code == "not_found"


def test_routes_beside_responses_say_what_to_do(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="/tokenize counts the tokens"):
        client.responses.input_tokens.count(model="default", input="hi")
    with pytest.raises(openai.NotFoundError, match="conversations are not compacted"):
        client.responses.compact(model="default", input="hi")


def test_the_log_tells_once_what_is_left_out(server: ServerProcess) -> None:
    for _ in range(2):
        body = {"input": "hi", "max_output_tokens": 1, "tools": [{"type": "mcp", "server_label": "secret"}]}
        assert server.post("/v1/responses", body).json()["tools"] == []
    assert server.stderr.count("/v1/responses: tools of type mcp are left out: there are no hosted tools") == 1
    assert "secret" not in server.stderr


def test_the_log_tells_once_that_nothing_is_stored(server: ServerProcess) -> None:
    for store in (None, True, True):
        assert server.post("/v1/responses", {"input": "hi", "max_output_tokens": 1, "store": store}).status_code == 200
    assert server.stderr.count("/v1/responses stores no response") == 1


BODIES = {"stable": params, "beta": beta_params}


@pytest.mark.parametrize("version", BODIES)
def test_every_field_and_type_of_the_client_is_in_the_table(version: str) -> None:
    keys = keys_of(BODIES[version].ResponseCreateParamsBase)
    assert [*missing_fields(ResponsesRequest, BODY_RULES, set(keys) - HEADERS)] == []
    items = objects_in(keys["input"])
    assert _missing(INPUT_ITEMS, items) == []
    assert _missing(TOOLS, objects_in(keys["tools"])) == []
    assert _missing(TOOL_CHOICES, objects_in(keys["tool_choice"])) == []
    (space,) = [tool for tool in objects_in(keys["tools"]) if type_names(tool) == ("namespace",)]
    assert _missing(NAMESPACE_TOOLS, objects_in(keys_of(space)["tools"])) == []
    (text,) = objects_in(keys["text"])
    assert [*missing_keys(TEXT, keys_of(text))] == []
    assert set(literals(keys_of(text)["verbosity"])) == set(VERBOSITIES)
    assert set(literals(keys["include"])) == set(INCLUDES)
    assert _missing(TEXT_FORMATS, objects_in(keys_of(text)["format"])) == []
    for name, rules in (("reasoning", REASONING), ("stream_options", STREAM_OPTIONS)):
        (model,) = objects_in(keys[name])
        assert [*missing_keys(rules, keys_of(model))] == []
    (cache,) = objects_in(keys["prompt_cache_options"])
    assert [*missing_keys(PROMPT_CACHE_OPTIONS, keys_of(cache))] == []


@pytest.mark.parametrize("version", BODIES)
def test_every_part_of_the_client_s_items_is_in_the_table(version: str) -> None:
    parts: dict[str, list[type]] = {"message": [], "function_call_output": [], "reasoning": [], "summary": []}
    for item in objects_in(keys_of(BODIES[version].ResponseCreateParamsBase)["input"]):
        keys = keys_of(item)
        match type_names(item):
            case ("message",):
                parts["message"] += objects_in(keys["content"])
            case ("function_call_output",):
                parts["function_call_output"] += objects_in(keys["output"])
            case ("reasoning",):
                parts["reasoning"] += objects_in(keys["content"])
                parts["summary"] += objects_in(keys["summary"])
    assert _missing(INPUT_PARTS, parts["message"]) == ["input_audio: no client has it"]  # older clients had it
    assert _missing(OUTPUT_PARTS, parts["function_call_output"]) == []
    assert _missing(REASONING_PARTS, parts["reasoning"]) == []
    assert _missing(SUMMARY_PARTS, parts["summary"]) == []


def test_the_comparison_with_the_client_can_fail() -> None:
    assert [*missing_keys(ObjectRules(honoured={"effort": ""}), keys_of(Reasoning))] == [
        *("context", "generate_summary", "mode", "summary")
    ]
    tools = objects_in(keys_of(params.ResponseCreateParamsBase)["tools"])
    assert "mcp: no client has it" in _missing(ALLOWED_TOOLS, tools[:1])
    assert "custom" in _missing(TypeRules(TOOLS.honoured), tools)


def _missing(rules: Any, models: list[type]) -> list[str]:
    """Return what a table lacks of a client; the types that only the beta client has are no surplus."""
    return [name for name in missing_types(rules, models) if not name.startswith(("agent_", "multi_agent_"))]
