# SPDX-License-Identifier: Apache-2.0
"""Which choices of an answer carry the log-probabilities of the prompt, and how many there may be."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.entrypoints.openai.logprobs import check_num_prompt_logprobs
from tests.entrypoints.server_process import ServerProcess

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the quick"}]}


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


@pytest.mark.parametrize(("num_tokens", "num_copies"), [(1 << 18, 1), (1 << 12, 64)])
def test_their_number_is_limited_over_all_prompts_and_choices(num_tokens: int, num_copies: int) -> None:
    params = SamplingParams(n=64, prompt_logprobs=3)
    requests = [GenerationRequest("a", [1] * (num_tokens // 2), params) for _ in range(2)]
    check_num_prompt_logprobs("logprobs", requests, num_copies)
    requests.append(GenerationRequest("c", [1], params))
    message = (
        "logprobs: expected at most 1048576 log-probabilities of prompt tokens in the answer, "
        f"got {1048576 + 4 * num_copies}"
    )
    with pytest.raises(InvalidRequestError) as raised:
        check_num_prompt_logprobs("logprobs", requests, num_copies)
    assert str(raised.value) == message


def test_too_many_are_refused(server: ServerProcess) -> None:
    body = {"prompt": [[5] * 50] * 8, "echo": True, "n": 128, "prompt_logprobs": 20, "max_tokens": 1}
    response = server.post("/v1/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == (
        "prompt_logprobs: expected at most 1048576 log-probabilities of prompt tokens in the answer, got 1075200"
    )
