# SPDX-License-Identifier: Apache-2.0
"""POST /invocations, SageMaker's route, answers a body as the route to whose kind it belongs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.entrypoints.error_table import CHAT, CHATS, COMPLETION, COMPLETIONS
from tests.entrypoints.server_process import ServerProcess, sample
from tests.entrypoints.test_clients import bearer, serve
from tests.entrypoints.test_lifecycle import until

PATH = "/invocations"
GREEDY: dict[str, Any] = {"seed": 3, "temperature": 0}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A slow server with a key of each kind."""
    with serve(tmp_path_factory.mktemp("keyed"), step_s=0.02) as server:
        yield server


def answer(server: ServerProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer without what is drawn for each one."""
    response = server.post(path, {**body, **GREEDY})
    assert response.status_code == 200, response.text
    return {name: value for name, value in response.json().items() if name not in ("id", "created")}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, CHAT),
        (CHATS, {**CHAT, "prompt": None}),
        (CHATS, {"messages": CHAT["messages"] * 500, "truncate_prompt_tokens": 20, "max_tokens": 3}),
        (COMPLETIONS, COMPLETION),
        (COMPLETIONS, {**COMPLETION, "messages": None}),
        (COMPLETIONS, {**COMPLETION, "prompt": ["the", "a"], "n": 2}),
        (COMPLETIONS, {"prompt_token_ids": [5, 6], "max_tokens": 3}),
    ],
)
def test_the_prompt_of_a_body_decides_which_route_it_repeats(
    server: ServerProcess, path: str, body: dict[str, Any]
) -> None:
    assert answer(server, PATH, body) == answer(server, path, body)


@pytest.mark.parametrize("body", [CHAT, COMPLETION])
def test_streams_are_those_of_the_route(server: ServerProcess, body: dict[str, Any]) -> None:
    text = server.post(PATH, {**body, "stream": True}).text
    assert ('"object":"chat.completion.chunk"' in text) == (body is CHAT)
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"max_tokens": 3}, "messages", "is missing; expected one of messages, prompt, prompt_token_ids"),
        ({"messages": None}, "messages", "is missing; expected one of messages, prompt, prompt_token_ids"),
        ({"input": "a"}, "messages", "is missing; expected one of messages, prompt, prompt_token_ids"),
        ({**CHAT, "prompt": "a"}, "prompt", "unknown field; it belongs to /v1/completions"),
        ({**COMPLETION, "tools": []}, "tools", "unknown field; it belongs to /v1/chat/completions"),
        ({**CHAT, "temperature": -1}, "temperature", "expected a number in"),
        ({**COMPLETION, "prompt": []}, "prompt", "expected text"),
        (b"[]", None, "the body must be a JSON object, got an array"),
        (b"{", None, "the body is not valid JSON"),
    ],
)
def test_errors_are_those_of_the_route(server: ServerProcess, body: Any, param: str | None, message: str) -> None:
    response = server.post(PATH, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert message in error["message"]


def test_keys_limits_and_counters_are_those_of_the_routes(keyed: ServerProcess) -> None:
    assert keyed.post(PATH, COMPLETION).status_code == 401
    refused = keyed.post(PATH, {**COMPLETION, "n": 5}, headers=bearer("bob"))
    assert "expected at most 4 sequences" in refused.json()["error"]["message"]
    assert keyed.post(PATH, {**COMPLETION, "max_tokens": 150}, headers=bearer("carol")).status_code == 200
    limited = keyed.post(PATH, CHAT, headers=bearer("carol"))
    assert (limited.status_code, limited.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    series = f'http_requests_total{{method="POST",path="{PATH}",status_code="429"}}'
    until(lambda: sample(keyed.get("/metrics").text, series) == 1, "the refusal is counted")


@pytest.mark.parametrize(("body", "prefix"), [(CHAT, "chatcmpl"), (COMPLETION, "cmpl")])
def test_requests_are_aborted_by_their_id(keyed: ServerProcess, body: dict[str, Any], prefix: str) -> None:
    long = {**body, "max_tokens": 1500, "ignore_eos": True, "stream": True, "request_id": "job"}
    with httpx.stream("POST", keyed.url + PATH, json=long, headers=bearer("alice"), timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        ended = keyed.post("/v1/abort_requests", {"req_ids": ["job"]}, headers=bearer("alice")).json()
        rest = "".join(lines)
    assert [one["request_id"] for one in ended["aborted"]] == [f"{prefix}-job"]
    assert '"finish_reason":"abort"' in rest
