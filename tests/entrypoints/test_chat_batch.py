# SPDX-License-Identifier: Apache-2.0
"""/v1/chat/completions/batch answers each conversation as a chat of its own, within the limits of one request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.entrypoints.chat_server import says
from tests.entrypoints.server_process import ServerProcess, sample
from tests.entrypoints.test_clients import bearer, serve
from tests.entrypoints.test_lifecycle import metric, until

PATH = "/v1/chat/completions/batch"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
ANSWERS = ["<think>hm</think>alpha", "beta", CALL]
LONG: dict[str, Any] = {"messages": [says("a"), says("b")], "max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A slow server whose model repeats tokens, with a key of each kind."""
    with serve(tmp_path_factory.mktemp("keyed"), step_s=0.02) as server:
        yield server


def batch(server: ServerProcess, answers: list[str], **fields: Any) -> dict[str, Any]:
    response = server.post(PATH, {"messages": [says(answer) for answer in answers], **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def chat(server: ServerProcess, answer: str, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = server.post("/v1/chat/completions", {"messages": says(answer), **fields}).json()
    return body


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice without what is drawn for each one."""
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {**choice, "index": 0, "seed": 0, "message": {**message, "tool_calls": calls}}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [TOOL]},
        {"logprobs": True, "top_logprobs": 1, "return_token_ids": True},
        {"include_reasoning": False, "stop": "ph"},
        {"return_tokens_as_token_ids": True, "logprobs": True},
    ],
)
def test_each_conversation_is_answered_as_a_chat_of_its_own(
    parsing_server: ServerProcess, fields: dict[str, Any]
) -> None:
    whole = batch(parsing_server, ANSWERS, **fields)
    alone = [chat(parsing_server, answer, **fields) for answer in ANSWERS]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert [without_ids(one) for one in whole["choices"]] == [without_ids(one["choices"][0]) for one in alone]
    assert whole["object"] == "chat.completion" and whole["id"].startswith("chatcmpl-")
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert whole["usage"][name] == sum(one["usage"][name] for one in alone)
    counts = [one["usage"]["completion_tokens_details"]["reasoning_tokens"] for one in alone]
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == sum(counts) > 0


def test_choices_of_a_conversation_are_next_to_each_other(parsing_server: ServerProcess) -> None:
    choices = batch(parsing_server, ["alpha", "beta"], n=2)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["message"]["content"] for choice in choices] == ["alpha", "alpha", "beta", "beta"]


def test_stream_has_the_parts_of_every_message(parsing_server: ServerProcess) -> None:
    body = {"messages": [says(answer) for answer in ANSWERS], "tools": [TOOL], "stream": True}
    text = parsing_server.post(PATH, body).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    parts: dict[int, dict[str, str]] = {index: {} for index in range(3)}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for call in delta.pop("tool_calls", ()):
                delta["arguments"] = call["function"]["arguments"]
            for name, value in delta.items():
                parts[choice["index"]][name] = parts[choice["index"]].get(name, "") + value
    assert [parts[index]["role"] for index in range(3)] == ["assistant"] * 3
    assert (parts[0]["reasoning"], parts[0]["content"], parts[1]["content"]) == ("hm", "alpha", "beta")
    assert json.loads(parts[2]["arguments"]) == {"city": "Rome"}
    assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": None}, "messages", "expected a list of at least one conversation"),
        ({"messages": []}, "messages", "expected a list of at least one conversation"),
        ({"messages": [says("a"), []]}, "messages[1]", "expected at least one message"),
        ({"messages": says("a")}, "messages", "expected array, got object - at messages[0]"),
        ({"messages": [says("a"), [{"role": "user", "content": 3}]]}, "messages[1][0].content", "expected text"),
        ({"messages": [says("a"), says("b" * 9000)]}, "messages[1]", "expected 1 to 1999 tokens"),
        ({"messages": [says("a")] * 1025}, "n", "expected at most 1024 choices for all prompts, got 1025"),
        ({"n": 300}, "n", "expected an integer in [1, 128]"),
        ({"messages": [says("a")] * 300, "n": 4}, "n", "expected at most 1024 choices for all prompts, got 1200"),
        ({"messages": [says("a")] * 500, "n": 2}, "n", "expected at most 512 sequences (prompts times n)"),
        ({"prompt_token_ids": [5]}, "prompt_token_ids", "unknown field; it belongs to /v1/chat/completions"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "expected the name of one of the tokenizer's templates"),
        ({"temperature": -1}, "temperature", "expected a number in"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", ""),
        (
            {"messages": [says("a")] * 300, "stop_token_ids": [7] * 4000},
            "messages",
            "times prompts, got 4000 times 300",
        ),
        (
            {"messages": [says("a")] * 200, "logprobs": True, "top_logprobs": 20},
            "top_logprobs",
            "log-probabilities in the answer",
        ),
    ],
)
def test_wrong_batches_name_the_field_and_the_conversation(
    parsing_server: ServerProcess, fields: dict[str, Any], param: str, message: str
) -> None:
    response = parsing_server.post(PATH, {"messages": [says("a"), says("b")], **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert message in error["message"]


def test_a_batch_needs_a_key_and_counts_every_conversation(keyed: ServerProcess) -> None:
    body = {"messages": [says("a")] * 5, "max_tokens": 2}
    assert keyed.post(PATH, body).status_code == 401
    refused = keyed.post(PATH, body, headers=bearer("bob"))
    assert "expected at most 4 sequences (prompts times n) in a request, got 5" in refused.json()["error"]["message"]
    counted = 'client_generation_tokens_total{client="alice"}'
    before = metric(keyed, counted)
    assert keyed.post(PATH, body, headers=bearer("alice")).json()["usage"]["completion_tokens"] == 10
    assert metric(keyed, counted) == before + 10
    counted = f'http_requests_total{{method="POST",path="{PATH}",status_code="200"}}'
    until(lambda: (sample(keyed.get("/metrics").text, counted) or 0) >= 1, "the route has its own count")


def test_a_batch_is_charged_to_the_tokens_per_minute_of_its_key(keyed: ServerProcess) -> None:
    body = {"messages": [says("a")] * 4, "max_tokens": 100}
    assert keyed.post(PATH, body, headers=bearer("carol")).status_code == 200
    refused = keyed.post(PATH, body, headers=bearer("carol"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")


def test_an_abort_by_the_id_of_a_batch_ends_all_of_its_conversations(keyed: ServerProcess) -> None:
    body = {**LONG, "request_id": "job", "stream": True}
    with httpx.stream("POST", keyed.url + PATH, json=body, headers=bearer("alice"), timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert keyed.get("/load", headers=bearer("alice")).json()["num_sequences"] == 2
        ended = keyed.post("/v1/abort_requests", {"req_ids": ["job", "job-0"]}, headers=bearer("alice")).json()
        rest = "".join(lines)
    assert [one["request_id"] for one in ended["aborted"]] == ["chatcmpl-job"] and ended["not_found"] == ["job-0"]
    assert rest.count('"finish_reason":"abort"') == 2


def test_a_client_that_leaves_ends_all_conversations(keyed: ServerProcess) -> None:
    with httpx.stream("POST", keyed.url + PATH, json={**LONG, "stream": True}, headers=bearer("alice")) as stream:
        next(stream.iter_lines())
    until(lambda: keyed.get("/load", headers=bearer("alice")).json()["num_running"] == 0, "both have ended", 10.0)


def test_a_batch_of_one_conversation_is_named_as_a_chat_is(keyed: ServerProcess) -> None:
    body = {"messages": [says("a")], "max_tokens": 1, "request_id": "one"}
    assert keyed.post(PATH, body, headers=bearer("alice")).json()["id"] == "chatcmpl-one"
