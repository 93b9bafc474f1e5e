# SPDX-License-Identifier: Apache-2.0
"""Fields that are null or unknown: what is absent, what is refused, what `--ignore-unknown-fields` accepts."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.server_config import ServerConfig
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.guided_decoding import StructuredOutputsParams
from fastdeploy.detokenize.messages import check_messages, check_tools
from fastdeploy.entrypoints.openai import unknown_fields
from fastdeploy.entrypoints.openai.bodies import parse_body
from fastdeploy.entrypoints.openai.errors import ApiError
from fastdeploy.entrypoints.openai.protocol import ChatCompletionRequest, StreamOptions
from fastdeploy.entrypoints.openai.unknown_fields import IgnoredFieldLog
from fastdeploy.structured_output.structural_tag import structural_tag_to_lark
from tests.entrypoints.server_process import mock_server

MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [None, 1]}}}
STRICT, IGNORING = ServerConfig(), ServerConfig(ignore_unknown_fields=True)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log of ignored fields of a process that has ignored none."""
    monkeypatch.setattr("fastdeploy.entrypoints.openai.bodies.IGNORED_FIELDS", fresh := IgnoredFieldLog())
    monkeypatch.setattr(unknown_fields, "IGNORED_FIELDS", fresh)
    monkeypatch.setattr(unknown_fields.logger, "propagate", True)
    caplog.set_level(logging.INFO, "fastdeploy.server")
    return caplog


def parsed(config: ServerConfig = STRICT, **fields: Any) -> ChatCompletionRequest:
    return parse_body(json.dumps({"messages": MESSAGES, **fields}).encode(), ChatCompletionRequest, config)


def refusal(config: ServerConfig = STRICT, **fields: Any) -> str:
    """Return the field that is refused."""
    with pytest.raises((ApiError, InvalidRequestError)) as refused:
        parsed(config, **fields)
    return str(refused.value.param if isinstance(refused.value, ApiError) else refused.value.field)


def test_null_counts_as_absent_at_every_depth_also_in_unknown_fields() -> None:
    options = {"include_usage": None, "continuous_usage_stats": True, "color": None}
    schema = {"schema": SCHEMA, "strict": None, "color": None}
    body = parsed(
        stream=True,
        temperature=None,
        color=None,
        functions=None,
        user=None,
        metadata={"color": None},
        stream_options=options,
        speculative={"method": None, "color": None, "num_speculative_tokens": 2},
        logits_processors_args={"thinking_budget": None, "color": None},
        response_format={"type": "json_schema", "json_schema": schema, "structures": None, "color": None},
    )
    assert body == ChatCompletionRequest(
        messages=MESSAGES,
        stream=True,
        stream_options=StreamOptions(continuous_usage_stats=True),
        speculative={"num_speculative_tokens": 2},
        logits_processors_args={},
        response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    )


def test_null_counts_as_absent_in_tool_calls_and_tools_but_not_in_schemas() -> None:
    call = {"id": None, "type": None, "function": {"name": "f", "arguments": None, "color": None}}
    (message,) = check_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    function = {"name": "f", "description": None, "strict": None, "parameters": SCHEMA}
    (tool,) = check_tools([{"type": "function", "function": function, "color": None}])
    assert tool == {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


def test_null_counts_as_absent_in_a_structural_tag() -> None:
    tags = [{"begin": "<a>", "content": {"type": "any_text", "excludes": None}, "end": "</a>"}]
    given = {"type": "triggered_tags", "triggers": ["<a>"], "tags": tags}
    plain = structural_tag_to_lark(StructuredOutputsParams(structural_tag={"format": given}), {})
    nulls = {"at_least_one": None, "stop_after_first": None}
    assert structural_tag_to_lark(StructuredOutputsParams(structural_tag={"format": {**given, **nulls}}), {}) == plain
    structures = {"triggers": ["<a>"], "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}]}
    old = structural_tag_to_lark(StructuredOutputsParams(structural_tag=structures), {})
    assert structural_tag_to_lark(StructuredOutputsParams(structural_tag={**structures, "format": None}), {}) == old


def test_unknown_fields_with_a_value_are_refused_by_name() -> None:
    assert refusal(color=0) == "color"
    assert refusal(stream=True, stream_options={"color": False}) == "stream_options.color"
    assert refusal(stream=True, stream_options={"include_usage": 1}) == "stream_options"


def test_ignore_unknown_fields_accepts_them_at_every_depth_and_logs_each_name_once(
    log: pytest.LogCaptureFixture,
) -> None:
    fields = {
        "color": {"color": [1]},
        "stream": True,
        "stream_options": {"include_usage": True, "color": 1},
        "speculative": {"method": "off", "color": 1},
        "logits_processors_args": {"color": 1},
        "response_format": {"type": "json_schema", "color": 1, "json_schema": {"schema": SCHEMA, "color": 1}},
    }
    body = parsed(IGNORING, **fields)
    assert (
        body
        == parsed(IGNORING, **fields)
        == ChatCompletionRequest(
            messages=MESSAGES,
            stream=True,
            stream_options=StreamOptions(include_usage=True),
            speculative={"method": "off"},
            logits_processors_args={},
            response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        )
    )
    assert [record.getMessage() for record in log.records] == [
        f"the unknown field {name!r} is ignored (--ignore-unknown-fields)"
        for name in (
            "color",
            "speculative.color",
            "logits_processors_args.color",
            "response_format.color",
            "response_format.json_schema.color",
            "stream_options.color",
        )
    ]


def test_ignore_unknown_fields_keeps_what_is_refused_by_name(log: pytest.LogCaptureFixture) -> None:
    assert refusal(IGNORING, functions=[{"name": "f"}]) == "functions"
    assert refusal(IGNORING, temperature="hot") == "temperature"
    assert refusal(IGNORING, color={"a": 1}, metadata={"a": 1}) == "metadata"
    assert refusal(IGNORING, stream=True, stream_options={"include_usage": "yes"}) == "stream_options"


def test_logged_names_are_short_safe_and_at_most_100_per_process(log: pytest.LogCaptureFixture) -> None:
    parsed(IGNORING, **{"new\nline\u2028\x1b[31m" + "a" * 100: 1})
    assert log.records[0].getMessage() == (
        f"the unknown field 'new\\nline\\u2028\\x1b[31m{'a' * 50}' is ignored (--ignore-unknown-fields)"
    )
    parsed(IGNORING, **{f"field_{i}": 1 for i in range(200)})
    messages = [record.getMessage() for record in log.records]
    assert len(messages) == 101
    assert messages[99:] == [
        "the unknown field 'field_98' is ignored (--ignore-unknown-fields)",
        "further names of ignored fields are not logged",
    ]


def test_a_server_ignores_unknown_fields_on_every_route(tmp_path: Path) -> None:
    text, unknown = {"type": "input_text", "text": "hi", "color": 1}, {"color": 1, "max_tokens": 2}
    block, thinking = {"type": "text", "text": "hi", "color": 1}, {"type": "disabled", "color": 1}
    item = {"type": "message", "role": "user", "content": [text], "color": 1}
    bodies = {
        "/v1/completions": {"prompt": "a", **unknown},
        "/v1/chat/completions": {"messages": MESSAGES, **unknown},
        "/v1/responses": {"input": [item], "color": 1, "max_output_tokens": 2},
        "/v1/messages": {"messages": [{"role": "user", "content": [block]}], "thinking": thinking, **unknown},
        "/v1/messages/count_tokens": {"messages": MESSAGES, "color": 1},
        "/tokenize": {"prompt": "a", "color": 1},
        "/detokenize": {"tokens": [5], "color": 1},
        "/v1/abort_requests": {"req_ids": [], "color": 1},
    }
    with mock_server(tmp_path, "--ignore-unknown-fields") as server:
        for path, body in bodies.items():
            assert server.post(path, body).status_code == 200, path
        server.terminate()
        server.wait_end()
    names = re.findall(r"the unknown field '(.*)' is ignored", server.stderr)
    assert names == ["color", "input.color", "input.content.color", "messages.content.color", "thinking.color"]
