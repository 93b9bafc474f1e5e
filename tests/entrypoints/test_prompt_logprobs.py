# SPDX-License-Identifier: Apache-2.0
"""Which choices of an answer carry the log-probabilities of the prompt, and how many there may be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.preprocess import RequestLimits, check_num_logprobs
from tests.entrypoints.server_process import ServerProcess, mock_server

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the quick"}]}


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with any number of alternatives, but few log-probabilities in an answer."""
    flags = ("--max-logprobs", "-1", "--max-logprob-entries", "100000")
    with mock_server(tmp_path_factory.mktemp("few"), *flags) as running:
        yield running


def choices_of(server: ServerProcess, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the choices of a response, or of all chunks of a stream."""
    text = server.post(path, {**body, "max_tokens": 3, "ignore_eos": True}).text
    if not body.get("stream"):
        return list(msgspec.json.decode(text)["choices"])
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [choice for event in events for choice in msgspec.json.decode(event)["choices"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/completions", {"prompt": ["the quick", "a b c"]}, [0, 3]),
        ("/v1/completions", {"prompt": "the quick", "echo": True, "logprobs": 0}, [0]),
        ("/v1/chat/completions", CHAT, [0]),
    ],
)
def test_the_first_choice_of_each_prompt_carries_them(
    server: ServerProcess, stream: bool, path: str, body: dict[str, Any], expected: list[int]
) -> None:
    choices = choices_of(server, path, {**body, "n": 3, "prompt_logprobs": 0, "stream": stream})
    assert [choice["index"] for choice in choices if choice.get("prompt_logprobs")] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_every_echo_of_a_prompt_has_its_log_probabilities(server: ServerProcess, stream: bool) -> None:
    body = {"prompt": "the quick", "echo": True, "logprobs": 0, "n": 3, "stream": stream}
    found: dict[int, list[Any]] = {}
    for choice in choices_of(server, "/v1/completions", body):
        found.setdefault(choice["index"], []).extend((choice["logprobs"] or {}).get("token_logprobs", []))
    assert found == {index: [None, *[-0.5] * 4] for index in range(3)}, "two tokens of the prompt and three of output"


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_without_output_is_its_prompt(server: ServerProcess, stream: bool) -> None:
    body = {"prompt": ["the quick", "a b c"], "echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}
    response = server.post("/v1/completions", {**body, "stream_options": {"include_usage": True} if stream else None})
    if stream:
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        *events, last = map(msgspec.json.decode, lines)
        choices = sorted((choice for event in events for choice in event["choices"]), key=lambda one: one["index"])
        usage = last["usage"]
    else:
        choices, usage = response.json()["choices"], response.json()["usage"]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [
        ("the quick", "length"),
        ("a b c", "length"),
    ]
    assert [choice["logprobs"]["token_logprobs"] for choice in choices] == [[None, -0.5], [None, *[-0.5] * 3]]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (6, 0, 6)


def test_a_chat_without_output_is_refused(server: ServerProcess) -> None:
    response = server.post("/v1/chat/completions", {**CHAT, "max_tokens": 0, "prompt_logprobs": 1})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")


LIMITS = RequestLimits(max_model_len=1000, vocab_size=500, max_logprob_entries=12_000)


def entries(num_prompt: int = 100, **params: Any) -> GenerationRequest:
    return GenerationRequest("a", [1] * num_prompt, SamplingParams(**params))


@pytest.mark.parametrize(
    ("requests", "num_copies", "count", "field"),
    [
        ([entries(prompt_logprobs=3, max_tokens=5)] * 2, 15, 12_000, ""),
        ([entries(prompt_logprobs=3, max_tokens=5)] * 2, 16, 12_800, "prompt"),
        ([entries(prompt_logprobs=-1)], 1, 50_100, "prompt"),
        ([entries(prompt_logprobs=1000)], 1, 50_100, "prompt"),
        ([entries(prompt_logprobs=0, logprobs=0)], 1, 1000, ""),
        ([entries(logprobs=20, max_tokens=100, n=5)], 1, 10_500, ""),
        ([entries(logprobs=20, max_tokens=100, n=5)] * 2, 1, 21_000, "output"),
        ([entries(logprobs=20)], 1, 18_900, "output"),
        ([entries(logprobs=20, max_tokens=2000)], 1, 18_900, "output"),
        ([entries(logprobs=-1, max_tokens=0, prompt_logprobs=2)], 1, 300, ""),
        ([entries(logprobs=-1, max_tokens=30, prompt_logprobs=2)], 1, 15_330, "output"),
        ([entries(logprobs=0)] * 13, 1, 11_700, ""),
        ([entries(logprobs=0, logprob_token_ids=[5, 6, 7], max_tokens=10)], 1, 40, ""),
        ([entries()] * 1000, 9, 0, ""),
    ],
)
def test_their_number_is_limited_over_prompts_and_outputs(
    requests: list[GenerationRequest], num_copies: int, count: int, field: str
) -> None:
    if not field:
        check_num_logprobs(LIMITS, requests, "prompt", "output", num_copies)
        tight = replace(LIMITS, max_logprob_entries=count)
        check_num_logprobs(tight, requests, "prompt", "output", num_copies)
        if count:
            with pytest.raises(InvalidRequestError):
                check_num_logprobs(
                    replace(LIMITS, max_logprob_entries=count - 1), requests, "prompt", "output", num_copies
                )
        return
    with pytest.raises(InvalidRequestError) as raised:
        check_num_logprobs(LIMITS, requests, "prompt", "output", num_copies)
    assert raised.value.field == field
    assert f"at most 12000 log-probabilities in the answer (--max-logprob-entries), got up to {count}" in str(
        raised.value
    )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [[5] * 50] * 8, "echo": True, "n": 128, "logprobs": 2}, "logprobs"),
        (
            "/v1/completions",
            {"prompt": [[5] * 50] * 8, "echo": True, "n": 128, "prompt_logprobs": 2},
            "prompt_logprobs",
        ),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 20, "n": 128}, "top_logprobs"),
    ],
)
def test_too_many_are_refused(few: ServerProcess, path: str, body: dict[str, Any], param: str) -> None:
    response = few.post(path, {**body, "max_tokens": 40})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert "expected at most 100000 log-probabilities in the answer (--max-logprob-entries)" in response.text


def test_all_alternatives_are_sent_if_the_server_allows_them(few: ServerProcess) -> None:
    choice = few.post("/v1/completions", {"prompt": "a", "max_tokens": 2, "logprobs": -1}).json()["choices"][0]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [3, 3], "all that the mock engine has"
    body = {**CHAT, "max_tokens": 2, "logprobs": True, "top_logprobs": -1, "prompt_logprobs": -1}
    choice = few.post("/v1/chat/completions", body).json()["choices"][0]
    assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [3, 3]
    assert len(choice["prompt_logprobs"][1]) == 3


def test_requested_ids_are_reported_beside_the_alternatives(server: ServerProcess) -> None:
    ids = {"logprob_token_ids": [4, 20, 21], "max_tokens": 2, "seed": 1, "return_tokens_as_token_ids": True}
    choice = server.post("/v1/completions", {"prompt": "a", "logprobs": 2, **ids}).json()["choices"][0]
    own = choice["logprobs"]["tokens"][0]
    top = choice["logprobs"]["top_logprobs"][0]
    assert top == {own: -0.5, "token_id:4": -1.5, "token_id:20": -3.5, "token_id:21": -3.5}
    choice = server.post("/v1/chat/completions", {**CHAT, "logprobs": True, **ids}).json()["choices"][0]
    for entry in choice["logprobs"]["content"]:
        found = [(one["token"], one["logprob"]) for one in entry["top_logprobs"]]
        assert found == [("token_id:4", -3.5), ("token_id:20", -3.5), ("token_id:21", -3.5)]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "logprobs": -1}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ],
)
def test_more_alternatives_than_the_server_allows_are_refused(
    server: ServerProcess, path: str, body: dict[str, Any], param: str
) -> None:
    response = server.post(path, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert "expected an integer in [0, 20] (--max-logprobs), got " in response.text
