# SPDX-License-Identifier: Apache-2.0
"""/v1/messages with the official client and strict validation: text, events, ends, errors."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest

from fastdeploy.entrypoints.openai.errors import REASONS
from fastdeploy.entrypoints.openai.messages_api.errors import ERROR_TYPES
from tests.entrypoints.anthropic_client import messages_client
from tests.entrypoints.chat_server import says
from tests.entrypoints.server_process import ServerProcess


@pytest.fixture
def anthropic_client(parsing_server: ServerProcess) -> anthropic.Anthropic:
    return messages_client(parsing_server)


def create(client: anthropic.Anthropic, text: str, **options: Any) -> anthropic.types.Message:
    """Return the answer to a conversation to which the model answers `text`."""
    values: dict[str, Any] = {"model": "default", "messages": says(text), "max_tokens": 500, **options}
    return client.messages.create(**values)


def test_a_message_has_the_text_of_the_model_and_ends_its_turn(anthropic_client: anthropic.Anthropic) -> None:
    message = create(anthropic_client, "Good day.")
    assert [(block.type, block.text) for block in message.content] == [("text", "Good day.")]  # type: ignore[union-attr]
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    assert message.id.startswith("msg_")
    assert message._request_id == message.id


def test_the_prompt_is_the_conversation_with_its_system_prompt(parsing_server: ServerProcess) -> None:
    body = {
        "model": "default",
        "system": [{"type": "text", "text": "be brief"}, {"type": "text", "text": "be kind"}],
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
            {"role": "user", "content": "e"},
        ],
    }
    chat = [
        {"role": "system", "content": "be brief\nbe kind"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "cd"},
        {"role": "user", "content": "e"},
    ]
    assert count(parsing_server, body) == count_chat(parsing_server, chat)
    assert usage_of(parsing_server, body) == count_chat(parsing_server, chat)


def count(server: ServerProcess, body: dict[str, Any]) -> int:
    return server.post("/v1/messages/count_tokens", body).json()["input_tokens"]  # type: ignore[no-any-return]


def count_chat(server: ServerProcess, messages: list[Any], **options: Any) -> int:
    return server.post("/tokenize", {"messages": messages, **options}).json()["count"]  # type: ignore[no-any-return]


def usage_of(server: ServerProcess, body: dict[str, Any]) -> int:
    usage = server.post("/v1/messages", {**body, "max_tokens": 1}).json()["usage"]
    return sum(usage[name] for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"))


def test_a_last_message_of_the_assistant_is_continued(parsing_server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "so"}]
    expected = count_chat(parsing_server, messages, continue_final_message=True)
    assert count(parsing_server, {"model": "default", "messages": messages}) == expected


def test_ends_of_messages_have_their_reasons(anthropic_client: anthropic.Anthropic) -> None:
    cut = create(anthropic_client, "one two three", max_tokens=2)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    stopped = create(anthropic_client, "one two three", stop_sequences=["nothing", "two"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "two")
    assert [block.text for block in stopped.content] == ["one "]  # type: ignore[union-attr]
    full = create(anthropic_client, "x" * 1500 + " y", max_tokens=1999)
    assert full.stop_reason == "model_context_window_exceeded"
    assert full.usage.cache_creation_input_tokens is not None
    assert full.usage.input_tokens + full.usage.cache_creation_input_tokens + full.usage.output_tokens == 2000


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("Good day.", {}),
        ("one two three", {"max_tokens": 2}),
        ("one two three", {"stop_sequences": ["two"]}),
        ("", {}),
    ],
)
def test_events_add_up_to_the_whole_message(
    anthropic_client: anthropic.Anthropic, text: str, options: dict[str, Any]
) -> None:
    whole = create(anthropic_client, text, **options)
    events = list(create(anthropic_client, text, stream=True, **options))  # type: ignore[call-overload]
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    with anthropic_client.messages.stream(
        **{"model": "default", "messages": says(text), "max_tokens": 500, **options}
    ) as stream:
        final = stream.get_final_message()
    assert final.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})


def test_the_first_event_has_the_prompt_s_tokens_and_no_content(anthropic_client: anthropic.Anthropic) -> None:
    long = "word " * 40
    first = next(iter(create(anthropic_client, long, stream=True))).message  # type: ignore[call-overload]
    assert (first.content, first.stop_reason, first.stop_sequence) == ([], None, None)
    usage = create(anthropic_client, long).usage
    assert usage.cache_creation_input_tokens is not None
    assert usage.cache_creation_input_tokens % 64 == 0 < usage.cache_creation_input_tokens
    assert first.usage.input_tokens == usage.input_tokens + usage.cache_creation_input_tokens
    assert (first.usage.cache_creation_input_tokens, first.usage.cache_read_input_tokens) == (0, 0)


def test_streams_name_their_events_and_have_no_done(parsing_server: ServerProcess) -> None:
    body = {"model": "default", "messages": says("one"), "max_tokens": 50, "stream": True}
    response = parsing_server.post("/v1/messages", body)
    names = [line.removeprefix("event: ") for line in response.text.split("\n") if line.startswith("event: ")]
    assert names == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "[DONE]" not in response.text
    assert response.headers["request-id"].startswith("msg_")


def test_fields_of_chats_are_honoured_under_their_names(parsing_server: ServerProcess) -> None:
    body = {
        "model": "default",
        "messages": says("a"),
        "max_tokens": 9,
        "seed": 7,
        "top_k": 5,
        "min_p": 0.1,
        "temperature": 0.5,
        "top_p": 0.9,
        "ignore_eos": False,
        "cache_salt": "s",
        "priority": -3,
        "speculative": {"method": "off"},
        "chat_template_kwargs": {"enable_thinking": False},
        "request_id": "mine",
        "timeout": 50,
    }
    response = parsing_server.post("/v1/messages", body)
    assert (response.status_code, response.json()["id"]) == (200, "msg_mine")
    for name, value in {"seed": 2**70, "top_k": -2, "min_p": 2, "cache_salt": "s" * 129, "priority": 2**31}.items():
        error = parsing_server.post("/v1/messages", {**body, name: value}).json()["error"]
        assert error["message"].startswith(f"{name}: "), error


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens: is missing"),
    ({"messages": None}, "messages: expected at least one message"),
    ({"messages": []}, "messages: expected at least one message"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role: expected one of user, assistant, system"),
    ({"messages": [{"role": "user"}]}, "messages[0].content: is missing"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content: expected a text or a list of content"),
    ({"messages": [{"role": "user", "content": "a", "name": "x"}]}, "messages[0].name: unknown field"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0].type: image is not supported: this server reads and writes text only",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
        "messages[0].content[0].type: redacted_thinking is not supported: it is encrypted for another server",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
        "messages[0].content[0].type: expected one of text, tool_result here, got tool_use",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages[0].content[0].text: exp"),
    ({"system": 3}, "system: expected str | array, got int"),
    ({"system": [{"type": "document"}]}, "system[0].type: document is not supported"),
    ({"stop_sequences": [""]}, "stop_sequences: expected non-empty strings"),
    ({"stop_sequences": "x"}, "stop_sequences: expected array, got str"),
    ({"container": "x"}, "container: tools do not run on this server"),
    ({"mcp_servers": [{}]}, "mcp_servers: tools do not run on this server"),
    ({"fallbacks": [{"model": "x"}]}, "fallbacks: one model answers"),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0].type: compact"),
    ({"stop": ["x"]}, "stop: its name in this protocol is stop_sequences"),
    ({"max_completion_tokens": 2}, "max_completion_tokens: its name in this protocol is max_tokens"),
    ({"response_format": {"type": "text"}}, "response_format: its name in this protocol is output_config.format"),
    ({"thinking_token_budget": 5}, "thinking_token_budget: its name in this protocol is thinking.budget_tokens"),
    ({"stop_token_ids": [2]}, "stop_token_ids: unknown field; it belongs to /v1/chat/completions"),
    ({"n": 2}, "n: unknown field; it belongs to /v1/chat/completions"),
    ({"max_tokens": -1}, "max_tokens: expected an integer in ["),
]


@pytest.mark.parametrize(("fields", "message"), ERRORS)
def test_errors_name_the_field_in_anthropic_s_shape(
    parsing_server: ServerProcess, fields: dict[str, Any], message: str
) -> None:
    body = {"model": "default", "messages": says("a"), "max_tokens": 5, **fields}
    given = {name: value for name, value in body.items() if value is not None}
    response = parsing_server.post("/v1/messages", given)
    content = response.json()
    assert (response.status_code, content["type"], content["error"]["type"]) == (400, "error", "invalid_request_error")
    assert content["error"]["message"].startswith(message), content["error"]["message"]
    assert content["request_id"] == response.headers["request-id"]


def test_a_prompt_that_is_too_long_is_named_as_agents_expect(anthropic_client: anthropic.Anthropic) -> None:
    with pytest.raises(
        anthropic.BadRequestError, match=r"prompt is too long: messages: expected 1 to 1999 tokens"
    ) as caught:
        create(anthropic_client, "x " * 2000)
    assert caught.value.error_code == "context_length_exceeded"
    tokens = anthropic_client.messages.count_tokens(model="default", messages=says("x " * 2000))
    assert tokens.input_tokens > 2000


@pytest.mark.parametrize(
    ("method", "path", "status", "kind", "message"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error", "/v1/messages: expected POST, got GET"),
        ("POST", "/v1/messages/batches", 404, "not_found_error", "/v1/messages/batches: `fastdeploy run-batch` runs"),
        ("GET", "/v1/messages/batches/1/results", 404, "not_found_error", "/v1/messages/batches: `fastdeploy run-"),
        ("POST", "/v1/messages/count", 404, "not_found_error", "/v1/messages/count: no such route; did you mean"),
    ],
)
def test_routes_below_messages_have_errors_in_its_shape(
    parsing_server: ServerProcess, method: str, path: str, status: int, kind: str, message: str
) -> None:
    response = httpx.request(method, parsing_server.url + path)
    content = response.json()
    assert (response.status_code, content["type"], content["error"]["type"]) == (status, "error", kind)
    assert content["error"]["message"].startswith(message), content
    assert content["request_id"] == response.headers["request-id"] != ""


def test_other_errors_have_the_same_shape(parsing_server: ServerProcess) -> None:
    url = parsing_server.url + "/v1/messages"
    too_large = httpx.post(url, content=b"x" * (2**25 + 1))
    assert (too_large.status_code, too_large.json()["error"]["type"]) == (413, "request_too_large")
    other_type = httpx.post(url, content=b"{}", headers={"content-type": "text/plain"})
    assert (other_type.status_code, other_type.json()["error"]["type"]) == (415, "invalid_request_error")
    long_url = httpx.post(url + "?" + "x" * 20000, json={})
    assert (long_url.status_code, long_url.json()["type"]) == (414, "error")
    no_model = parsing_server.post("/v1/messages", {"model": "no", "messages": says("a"), "max_tokens": 1})
    assert (no_model.status_code, no_model.json()["error"]["type"]) == (404, "not_found_error")


def test_every_status_of_the_server_has_a_type() -> None:
    assert set(REASONS) | {429, 500} == set(ERROR_TYPES)
    assert ERROR_TYPES[503] == "overloaded_error" and ERROR_TYPES[504] == "timeout_error"
