# SPDX-License-Identifier: Apache-2.0
"""--request-timeout, `timeout` in a body, and --max-output-tokens."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastdeploy.config.generation_defaults import GenerationDefaults
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.entrypoints.openai.params import ParamLimits, chat_params, completion_params
from fastdeploy.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from tests.entrypoints.server_process import ServerProcess, mock_server
from tests.entrypoints.test_lifecycle import COMPLETION, StreamInThread, metric, until

LIMITS = ParamLimits(max_logprobs=20, max_output_tokens=10)
PROPOSED = GenerationDefaults(max_new_tokens=32)


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(messages=[], **fields)


def test_an_output_without_maximum_ends_at_the_limit_of_the_server() -> None:
    for defaults in (GenerationDefaults(), PROPOSED):
        assert completion_params(CompletionRequest(prompt="x"), defaults, LIMITS).max_tokens == 10
        assert chat_params(chat(), defaults, LIMITS).max_tokens == 10
    assert chat_params(chat(), GenerationDefaults(max_new_tokens=4), LIMITS).max_tokens == 4
    assert completion_params(CompletionRequest(prompt="x", max_tokens=10), PROPOSED, LIMITS).max_tokens == 10
    assert chat_params(chat(max_completion_tokens=7, max_tokens=9), PROPOSED, LIMITS).max_tokens == 7


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "min_tokens"])
def test_a_larger_maximum_is_refused_by_the_name_of_its_field(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat_params(chat(**{name: 11}), PROPOSED, LIMITS)
    assert (caught.value.field, caught.value.message) == (name, "expected at most 10 (--max-output-tokens), got 11")
    if name != "max_completion_tokens":
        with pytest.raises(InvalidRequestError, match=f"{name}: expected at most 10"):
            completion_params(CompletionRequest(prompt="x", **{name: 11}), PROPOSED, LIMITS)


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose requests may take a second and 60 tokens; its engine ignores deadlines."""
    flags = (
        "--request-timeout",
        "1",
        "--max-output-tokens",
        "60",
        "--max-concurrency",
        "2",
        "--max-waiting-time",
        "-1",
    )
    with mock_server(tmp_path_factory.mktemp("limited"), *flags, step_s=0.01, hold=True) as server:
        yield server


@pytest.fixture
def held(limited: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The same server while no output grows past its first token."""
    hold = Path(limited.get("/config-info").json()["engine_config"]["model"]) / "hold"
    hold.touch()
    yield limited
    hold.unlink()
    until(lambda: limited.get("/load").json()["num_requests"] == 0, "nothing is left")
    until(lambda: metric(limited, "num_requests_running") == 0, "the engine has aborted what was left")


def test_output_ends_at_the_server_s_limit_with_length(limited: ServerProcess) -> None:
    body = {name: value for name, value in COMPLETION.items() if name != "max_tokens"}
    response = limited.post("/v1/completions", body).json()
    assert (response["usage"]["completion_tokens"], response["choices"][0]["finish_reason"]) == (60, "length")
    refused = limited.post("/v1/completions", {**body, "max_tokens": 61})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("change", [{}, {"timeout": 0.2}, {"timeout": 100}])
def test_a_request_that_takes_too_long_gets_504(held: ServerProcess, change: dict[str, float]) -> None:
    before = metric(held, 'requests_rejected_total{reason="timeout"}')
    response = held.post("/v1/completions", {**COMPLETION, "max_tokens": 50, **change})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (504, "timeout_error", "timeout")
    assert metric(held, 'requests_rejected_total{reason="timeout"}') == before + 1


def test_a_stream_that_takes_too_long_ends_with_a_typed_error(held: ServerProcess) -> None:
    events = StreamInThread(held, max_tokens=50).events()
    assert events[0]["choices"][0]["text"]
    assert (events[-1]["error"]["type"], events[-1]["error"]["code"]) == ("timeout_error", "timeout")


def test_waiting_for_admission_counts(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    flags = ("--max-concurrency", "2", "--max-waiting-time", "-1")
    with mock_server(tmp_path, *flags, hold=True) as server:
        running = StreamInThread(server, n=2)
        response = server.post("/v1/completions", {**COMPLETION, "timeout": 0.3})
        assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
        (tmp_path / "hold").unlink()
        assert running.events()[-1]["choices"][0]["finish_reason"] == "length"


def test_a_body_that_arrives_too_slowly_counts(limited: ServerProcess) -> None:
    host, port = limited.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"
        connection.sendall(head.encode())
        answer = b""
        while b"}}" not in answer and (part := connection.recv(1 << 16)):
            answer += part
    assert answer.startswith(b"HTTP/1.1 504 ") and b'"code":"timeout"' in answer


def test_a_request_that_ends_in_time_is_not_affected(limited: ServerProcess) -> None:
    response = limited.post("/v1/completions", {**COMPLETION, "max_tokens": 3, "timeout": 30})
    assert response.json()["choices"][0]["finish_reason"] == "length"


def test_the_engine_ends_a_request_in_its_time_and_the_text_is_a_beginning(drafting_server: ServerProcess) -> None:
    body = {"prompt": "def f(x):\n", "max_tokens": 450, "temperature": 0, "ignore_eos": True}
    whole = drafting_server.post("/v1/completions", body).json()["choices"][0]["text"]
    texts, errors = [], []
    with httpx.stream(
        "POST", drafting_server.url + "/v1/completions", json={**body, "stream": True, "timeout": 0.02}, timeout=60
    ) as stream:
        for line in stream.iter_lines():
            if '"text":' in line:
                texts.append(httpx.Response(200, text=line.removeprefix("data: ")).json()["choices"][0]["text"])
            elif '"error"' in line:
                errors.append(line)
    assert whole.startswith("".join(texts)) and len("".join(texts)) < len(whole)
    assert len(errors) == 1 and '"code":"timeout"' in errors[0]
