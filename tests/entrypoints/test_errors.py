# SPDX-License-Identifier: Apache-2.0
"""Wrong requests: status, field and message, always in OpenAI's shape; and a server that lives on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fastdeploy.entrypoints.openai.protocol import REFUSED
from tests.entrypoints.server_process import ServerProcess, mock_server

COMPLETION = {"model": "default", "prompt": "the", "max_tokens": 3}
CHAT = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"prompt": None}, "prompt", "is missing"),
        ({"prompt": ""}, "prompt", "expected 1 to 199 tokens"),
        ({"prompt": []}, "prompt", "not empty and not mixed"),
        ({"prompt": ["a", 1]}, "prompt", "not mixed"),
        ({"prompt": [[]]}, "prompt", "expected 1 to 199 tokens"),
        ({"prompt": [99999]}, "prompt", "expected token ids in [0, "),
        ({"prompt": {"a": 1}}, "prompt", "expected"),
        ({"prompt": "the " * 300}, "prompt", "got "),
        ({"prompt_token_ids": [1]}, "prompt_token_ids", "beside prompt"),
        ({"temperature": -1}, "temperature", "expected a number in [0, "),
        ({"temperature": "hot"}, "temperature", "expected float, got str"),
        ({"top_p": 1.5}, "top_p", "expected a number in [0, 1], got 1.5"),
        ({"top_k": -2}, "top_k", "expected an integer in [-1, "),
        ({"min_p": 2}, "min_p", "[0, 1]"),
        ({"n": 0}, "n", "[1, 128]"),
        ({"n": 1.5}, "n", "expected int, got float"),
        ({"n": True}, "n", "expected int, got bool"),
        ({"n": 100, "prompt": ["a"] * 20}, "n", "may reach 1024"),
        ({"best_of": 2}, "best_of", "expected n, which is 1"),
        ({"presence_penalty": 3}, "presence_penalty", "[-2, 2]"),
        ({"frequency_penalty": -3}, "frequency_penalty", "[-2, 2]"),
        ({"repetition_penalty": 0}, "repetition_penalty", "expected a number"),
        ({"seed": 2**70}, "seed", "seed"),
        ({"max_tokens": 0}, "max_tokens", "expected an integer in [1, "),
        ({"min_tokens": 9}, "min_tokens", "9 is above max_tokens 3"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": [""]}, "stop", "non-empty"),
        ({"stop": 3}, "stop", "expected"),
        ({"stop_token_ids": [99999]}, "stop_token_ids", "got 99999"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids as keys, got 'x'"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "got 99999"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "[-100, 100]"),
        ({"bad_words": [""]}, "bad_words", "non-empty"),
        ({"bad_words_token_ids": [[]]}, "bad_words_token_ids", "non-empty"),
        ({"bad_words_token_ids": [[3], "a"]}, "bad_words_token_ids", "lists of token ids"),
        ({"bad_words_token_ids": [["a"]]}, "bad_words_token_ids", "expected an integer"),
        ({"logprobs": 21}, "logprobs", "[0, 20], got 21"),
        ({"logprobs": True}, "logprobs", "expected int, got bool"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "[0, 20]"),
        ({"stream": "yes"}, "stream", "expected bool"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream: true"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options", "unknown field usage"),
        ({"speculative": {"method": "mtp"}}, "speculative.method", 'expected "off" or nothing'),
        ({"speculative": {"mode": "off"}}, "speculative.mode", "unknown key"),
        ({"speculative": {"num_speculative_tokens": 17}}, "speculative.num_speculative_tokens", "[0, 16]"),
        ({"request_id": ""}, "request_id", "1 to 128"),
        ({"request_id": "a\nb"}, "request_id", "printable"),
        ({"maxtokens": 3}, "maxtokens", "unknown field; did you mean 'max_tokens'"),
        ({"messages": []}, "messages", "unknown field"),
    ],
)
def test_wrong_completions_are_400_and_name_the_field(
    server: ServerProcess, change: dict[str, Any], param: str, message: str
) -> None:
    answer = server.post("/v1/completions", {**COMPLETION, **change})
    error = error_of(answer)
    assert answer.status_code == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"].startswith(param.split(".")[0]) and message in error["message"]


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"messages": None}, "messages", "at least one"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": "hi"}, "messages", "expected array, got str"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "expected one of system"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "tool calling is not available yet"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "expected text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
            "reads text only",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "[0, 20], got 21"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "[1, "),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "field of its own"),
        ({"prompt": "x"}, "prompt", "unknown field"),
        ({"tools": [{"type": "function"}]}, "tools", "tool calling is not available yet"),
        ({"response_format": {"type": "json_object"}}, "response_format", "structured output is not available yet"),
    ],
)
def test_wrong_chats_are_400_and_name_the_field(
    server: ServerProcess, change: dict[str, Any], param: str, message: str
) -> None:
    answer = server.post("/v1/chat/completions", {**CHAT, **change})
    error = error_of(answer)
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_fields_that_are_not_there_yet_are_refused_by_name_unless_they_ask_for_nothing(
    server: ServerProcess, field: str
) -> None:
    refused = server.post("/v1/completions", {**COMPLETION, field: {"some": "thing"}})
    assert refused.status_code == 400
    assert error_of(refused)["param"] == field and error_of(refused)["code"] == "unsupported_parameter"
    for neutral in (None, *REFUSED[field][1]):
        assert server.post("/v1/completions", {**COMPLETION, field: neutral}).status_code == 200


def test_fields_for_hosted_services_have_no_effect(server: ServerProcess) -> None:
    extra = {"user": "u", "metadata": {"a": "b"}, "store": False}
    assert server.post("/v1/completions", {**COMPLETION, **extra}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'"x"', b"\xff\xfe{}", b'{"prompt": "\xff"}', b"null", b"[" * 100_000, b'{"prompt": NaN}'],
)
def test_bodies_that_are_no_json_object_are_400(server: ServerProcess, body: bytes) -> None:
    answer = server.post("/v1/completions", body)
    assert (answer.status_code, error_of(answer)["type"]) == (400, "invalid_request_error")


def test_body_that_is_too_large_is_413(server: ServerProcess) -> None:
    body = json.dumps({**COMPLETION, "user": "x" * (33 * 2**20)}).encode()
    answer = server.post("/v1/completions", body)
    assert (answer.status_code, error_of(answer)["code"]) == (413, "request_too_large")


def test_large_but_allowed_body_is_judged_by_its_tokens(server: ServerProcess) -> None:
    answer = server.post("/v1/completions", {**COMPLETION, "prompt": "the quick brown fox " * 10_000})
    assert answer.status_code == 400
    assert "expected 1 to 199 tokens" in error_of(answer)["message"]


def test_unknown_routes_and_methods_have_the_same_shape(server: ServerProcess) -> None:
    assert (server.get("/v1/nothing").status_code, error_of(server.get("/v1/nothing"))["code"]) == (404, "not_found")
    wrong_method = server.get("/v1/completions")
    assert wrong_method.status_code == 405 and error_of(wrong_method)["message"]
    assert server.post("/v1/completions", {**COMPLETION, "model": "gpt"}).status_code == 404


def test_choice_that_cannot_be_computed_fails_its_own_request_only(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    ids = server.post("/v1/completions", {**COMPLETION, "seed": 1, "max_tokens": 6, "return_token_ids": True})
    fifth = ids.json()["choices"][0]["completion_token_ids"][4]
    poisoned = {**COMPLETION, "seed": 1, "max_tokens": 6, "logit_bias": {str(fifth): -100}, "request_id": "bad"}
    answer = server.post("/v1/completions", poisoned)
    assert (answer.status_code, error_of(answer)["code"]) == (500, "numerics")
    assert "cmpl-bad" in error_of(answer)["message"]
    with pytest.raises(openai.APIError, match="the mock says NaN"):
        list(
            client.completions.create(
                model="default", prompt="the", max_tokens=6, seed=1, logit_bias={str(fifth): -100}, stream=True
            )
        )
    assert server.post("/v1/completions", COMPLETION).status_code == 200


def test_request_id_in_flight_may_not_be_used_twice(tmp_path: Path) -> None:
    with mock_server(tmp_path, step_s=0.02) as running:
        body = {**COMPLETION, "request_id": "same", "max_tokens": 100, "stream": True}
        with httpx.stream("POST", running.url + "/v1/completions", json=body) as first:
            lines = first.iter_lines()  # kept: a generator that is dropped closes the connection
            next(lines)
            second = running.post("/v1/completions", {**COMPLETION, "request_id": "same"})
            assert (second.status_code, error_of(second)["param"]) == (400, "request_id")


def test_keys_are_checked_everywhere_but_for_probes(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--api-key", "alpha", "--api-key", "beta") as running:
        for key in (None, "gamma", "alph"):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            refused = running.post("/v1/completions", COMPLETION, headers=headers)
            assert (refused.status_code, error_of(refused)["code"]) == (401, "invalid_api_key")
            assert running.get("/v1/models", headers=headers).status_code == 401
            assert running.get("/config-info", headers=headers).status_code == 401
        for key in ("alpha", "beta"):
            accepted = running.post("/v1/completions", COMPLETION, headers={"Authorization": f"Bearer {key}"})
            assert accepted.status_code == 200
        assert running.get("/health").status_code == 200
        config = running.get("/config-info", headers={"Authorization": "Bearer alpha"}).text
        assert "alpha" not in config and "beta" not in config
    assert "alpha" not in running.stdout + running.stderr


def test_full_server_answers_429_and_says_when_to_come_again(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--max-concurrency", "1", step_s=0.02) as running:
        body = {**COMPLETION, "max_tokens": 200, "stream": True}
        with httpx.stream("POST", running.url + "/v1/completions", json=body) as first:
            lines = first.iter_lines()  # kept: a generator that is dropped closes the connection
            next(lines)
            refused = running.post("/v1/completions", COMPLETION)
            assert (refused.status_code, error_of(refused)["type"]) == (429, "rate_limit_error")
            assert int(refused.headers["retry-after"]) >= 1
    with mock_server(tmp_path, "--max-concurrency", "1", "--max-waiting-time", "30", step_s=0.01) as running:
        body = {**COMPLETION, "max_tokens": 20, "stream": True}
        with httpx.stream("POST", running.url + "/v1/completions", json=body) as first:
            lines = first.iter_lines()
            next(lines)
            for _ in lines:
                pass
            assert running.post("/v1/completions", COMPLETION).status_code == 200
