# SPDX-License-Identifier: Apache-2.0
"""Responses that fail, are aborted or wait long, and responses of the real engine, which are those of chats."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.drafting_models import SERVED_METHODS
from tests.entrypoints import server_process
from tests.entrypoints.response_check import checked_client, named_events
from tests.entrypoints.server_process import ServerProcess, mock_server, speculating_server

QUICK_KEEP_ALIVE = "from fastdeploy.entrypoints.openai import event_stream; event_stream.KEEP_ALIVE_S = 0.05; "
FLAGS = (
    "--ignore-unknown-fields",
    "--return-tokens-as-token-ids",
    "--max-num-seqs",
    "8",
    "--max-num-batched-tokens",
    "16",
)
LONG_INPUT = "the quick brown fox " * 18
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose engine takes 10 ms per token of a prompt, and which keeps streams alive every 50 ms."""
    folder: Path = tmp_path_factory.mktemp("slow") / "model"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        launcher = server_process.LAUNCHER.replace(
            "from fastdeploy.entry", QUICK_KEEP_ALIVE + "from fastdeploy.entry", 1
        )
        patch.setattr(server_process, "LAUNCHER", launcher)
        options = {"prefill_s_per_token": 0.01, "step_s": 0.02}
        with mock_server(folder, "--max-model-len", "2000", *FLAGS, **options) as running:
            yield running


def streamed(server: ServerProcess, **fields: Any) -> tuple[str, list[tuple[str, Any]]]:
    """Return the text of a stream, and the names and data of its events."""
    response = server.post("/v1/responses", {"stream": True, **fields})
    assert response.status_code == 200, response.text
    return response.text, [(name, json.loads(data)) for name, data in named_events(response.text)]


def test_comments_keep_a_long_prefill_alive_until_the_first_event(slow: ServerProcess) -> None:
    text, events = streamed(slow, input=LONG_INPUT, max_output_tokens=2)
    assert text.startswith(": keep-alive\n\n: keep-alive\n\n")
    assert [name for name, _ in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1][0] == "response.incomplete"
    client = checked_client(slow.url, _strict_response_validation=True)
    with client.responses.stream(model="default", input=LONG_INPUT + "again", max_output_tokens=2) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"


def test_an_error_after_a_comment_is_a_failed_response_with_all_first_events(slow: ServerProcess) -> None:
    text, events = streamed(slow, input=LONG_INPUT * 2, timeout=0.1)
    assert text.startswith(": keep-alive\n\n")
    assert [name for name, _ in events] == ["response.created", "response.in_progress", "response.failed"]
    assert [data["sequence_number"] for _, data in events] == [0, 1, 2]
    failed = events[-1][1]["response"]
    assert (failed["status"], failed["output"]) == ("failed", [])
    assert failed["error"] == {
        "code": "server_error",
        "message": "the request's time is over",
        "type": "timeout_error",
        "param": None,
    }


def test_an_error_after_text_is_a_failed_response_with_that_text(slow: ServerProcess) -> None:
    _, events = streamed(slow, input="the", timeout=0.2, ignore_eos=True)
    assert events[-1][0] == "response.failed" and events[-1][1]["response"]["error"]["code"] == "server_error"
    (item,) = events[-1][1]["response"]["output"]
    deltas = [data["delta"] for name, data in events if name == "response.output_text.delta"]
    assert item["content"][0]["text"] == "".join(deltas) != "" and item["status"] == "incomplete"
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))


@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_engine_before_the_first_event_are_ordinary_and_name_the_client_s_field(
    drafting_server: ServerProcess, stream: bool
) -> None:
    wrong = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "string", "pattern": "("}}}
    response = drafting_server.post("/v1/responses", {"input": "the", "stream": stream, "text": wrong})
    assert (response.status_code, response.headers["content-type"]) == (400, "application/json")
    assert response.json()["error"]["param"] == "text.format"


@pytest.mark.parametrize("name", ["resp_mine", "mine"])
def test_a_response_is_aborted_by_its_id(slow: ServerProcess, name: str) -> None:
    body = {"input": "the", "stream": True, "request_id": "mine", "ignore_eos": True}
    with httpx.stream("POST", slow.url + "/v1/responses", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert "event: response.created" in lines
        aborted = slow.post("/v1/abort_requests", {"req_ids": [name]}).json()
        assert ([one["request_id"] for one in aborted["aborted"]], aborted["not_found"]) == (["resp_mine"], [])
        text = "\n".join(lines)
    last = json.loads(text.rstrip("\n").rpartition("data: ")[2])
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
    assert last["response"]["incomplete_details"] is None and last["response"]["output"][0]["status"] == "incomplete"


def test_a_stream_that_a_shutdown_cuts_ends_with_a_failed_response(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--timeout-graceful-shutdown", "0.2", step_s=0.02) as server:
        body = {"input": "the", "stream": True, "store": False}
        with httpx.stream("POST", server.url + "/v1/responses", json=body, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines) == "event: response.created"
            server.terminate()
            *_, name, data = [line for line in lines if line]
        failed = json.loads(data.removeprefix("data: "))["response"]
        assert (name, failed["status"]) == ("event: response.failed", "failed")
        assert (failed["error"]["code"], failed["error"]["type"]) == ("server_error", "service_unavailable_error")
        assert server.wait_end() == 0
        assert "stores no response" not in server.stderr, "the request did not ask for it"


def test_unknown_fields_are_ignored_where_the_server_is_told_to(slow: ServerProcess) -> None:
    item = {"role": "user", "content": [{"type": "input_text", "text": "the", "shade": 1}], "colour": "red"}
    body = {"input": [item], "hue": 2, "max_output_tokens": 1, "reasoning": {"tint": 3}}
    assert slow.post("/v1/responses", body).status_code == 200
    for name in ("'hue'", "'input.colour'", "'input.content.shade'", "'reasoning.tint'"):
        assert slow.stderr.count(name) == 1
    refused = slow.post("/v1/responses", {**body, "background": True})
    assert refused.status_code == 400, "fields that are refused by name stay refused"


def test_tokens_are_named_by_their_ids_where_the_server_is_told_to(slow: ServerProcess) -> None:
    body = {"input": "the", "max_output_tokens": 2, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    part = slow.post("/v1/responses", body).json()["output"][0]["content"][0]
    names = [one["token"] for one in part["logprobs"]] + [one["top_logprobs"][0]["token"] for one in part["logprobs"]]
    assert len(names) == 4 and all(re.fullmatch(r"token_id:\d+", name) for name in names)


def test_the_header_names_the_response(slow: ServerProcess) -> None:
    response = slow.post("/v1/responses", {"input": "the", "max_output_tokens": 1}, headers={"X-Request-Id": "abc"})
    assert response.json()["id"].startswith("resp_abc-") and response.headers["x-request-id"] == "abc"


FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {"temperature": 0}),
    ({"seed": 7, "temperature": 0.8}, {"seed": 7, "temperature": 0.8}),
    ({"seed": 7, "temperature": 1, "speculative": {"method": "off"}}, {"seed": 7, "temperature": 1}),
    (
        {"seed": 8, "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        {"seed": 8, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    ),
    (
        {"seed": 9, "tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}},
        {"seed": 9, "tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ),
]


def check_equal_to_chat(server: ServerProcess, form: dict[str, Any], chat_form: dict[str, Any]) -> None:
    """Check that a response, whole and streamed, has the text or the call of the chat with the same prompt."""
    body = {"input": "def add(a, b):", "instructions": "be brief", "max_output_tokens": 60, **form}
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "def add(a, b):"}]
    choice = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 60, **chat_form}).json()[
        "choices"
    ][0]
    whole = server.post("/v1/responses", body).json()
    last = streamed(server, **body)[1][-1][1]["response"]
    for response in (whole, last):
        message = choice["message"]
        if calls := message.get("tool_calls"):
            assert [item["arguments"] for item in response["output"]] == [
                call["function"]["arguments"] for call in calls
            ]
        else:
            assert response["output"][-1]["content"][0]["text"] == message["content"] != ""
        assert (response["status"] == "incomplete") == (choice["finish_reason"] == "length")


@pytest.mark.parametrize(("form", "chat_form"), FORMS)
def test_texts_and_calls_are_those_of_chats_of_the_real_engine(
    drafting_server: ServerProcess, form: dict[str, Any], chat_form: dict[str, Any]
) -> None:
    check_equal_to_chat(drafting_server, form, chat_form)


@pytest.mark.nightly
@pytest.mark.parametrize("method", SERVED_METHODS)
def test_texts_and_calls_are_those_of_chats_with_every_speculation_method(method: str) -> None:
    with speculating_server(method) as running:
        for form, chat_form in FORMS:
            check_equal_to_chat(running, form, chat_form)


def test_the_asynchronous_client_streams_several_responses_at_a_time(drafting_server: ServerProcess) -> None:
    async def text_of(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.responses.create(
            model="default", input="x = 1", max_output_tokens=20, stream=True, extra_body={"seed": seed}
        )
        return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    async def run() -> list[str]:
        url = drafting_server.url + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", _strict_response_validation=True) as client:
            return await asyncio.gather(*(text_of(client, seed) for seed in range(6)))

    client = checked_client(drafting_server.url)
    solo = [
        client.responses.create(model="default", input="x = 1", max_output_tokens=20, extra_body={"seed": seed})
        for seed in range(6)
    ]
    assert asyncio.run(run()) == [response.output_text for response in solo]
    assert [response.seed for response in solo] == list(range(6))  # type: ignore[attr-defined]


def test_usage_counts_what_the_prefix_cache_had_and_what_was_written_to_it(drafting_server: ServerProcess) -> None:
    body = {"input": "usage = 1\n" * 50, "max_output_tokens": 1, "cache_salt": "usage"}
    first, second = (drafting_server.post("/v1/responses", body).json()["usage"] for _ in range(2))
    assert first["input_tokens"] == second["input_tokens"] >= 128
    blocks = first["input_tokens"] // 64 * 64
    assert first["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": blocks}
    cached = second["input_tokens_details"]["cached_tokens"]
    assert second["input_tokens_details"] == {"cached_tokens": cached, "cache_write_tokens": blocks - cached}
    assert cached >= 64
