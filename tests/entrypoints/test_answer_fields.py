# SPDX-License-Identifier: Apache-2.0
"""Fields of answers that vLLM's clients read: ids and nulls at their places, usage in chunks, metrics of a request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.entrypoints.server_process import ServerProcess, mock_server

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CHAT = {"messages": [{"role": "user", "content": "the quick brown fox"}], "max_tokens": 5, "seed": 3}
COMPLETION = {"prompt": "the quick brown fox", "max_tokens": 5, "seed": 3}
BODIES: dict[str, Any] = {CHATS: CHAT, COMPLETIONS: COMPLETION}
ACCEPTANCE = {
    "mean_acceptance_length": 2.5,
    "draft_acceptance_rate": 0.75,
    "acceptance_histogram": [0, 1, 1],
    "num_spec_steps": 2,
    "num_accepted_draft_tokens": 3,
    "num_draft_tokens": 4,
    "num_spec_tokens": 2,
    "per_step_accepted": None,
    "per_step_drafted": None,
}


@pytest.fixture(scope="module")
def measuring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with vLLM's flags for metrics in answers and for names of tokens."""
    folder = tmp_path_factory.mktemp("measuring")
    flags = ["--enable-per-request-metrics", "--per-request-spec-decode-metrics", "summary"]
    with mock_server(folder, *flags, "--return-tokens-as-token-ids", tokens_per_step=2) as running:
        yield running


def chunks(server: ServerProcess, path: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the chunks of a stream."""
    lines = server.post(path, {**BODIES[path], **fields, "stream": True}).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]


def answer(server: ServerProcess, path: str, **fields: Any) -> dict[str, Any]:
    response = server.post(path, {**BODIES[path], **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_whole_answers_have_vllm_s_keys_and_null_for_what_was_not_asked(server: ServerProcess) -> None:
    chat, completion = answer(server, CHATS), answer(server, COMPLETIONS)
    assert (chat["prompt_logprobs"], chat["prompt_token_ids"], chat["metrics"]) == (None, None, None)
    assert chat["choices"][0]["token_ids"] is None
    message = chat["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"]) == (None, None), "no parser separates a reasoning"
    assert not {"prompt_logprobs", "prompt_token_ids"} & set(chat["choices"][0])
    choice = completion["choices"][0]
    assert (choice["token_ids"], choice["prompt_logprobs"], choice["prompt_token_ids"]) == (None, None, None)
    assert not {"prompt_logprobs", "prompt_token_ids"} & set(completion) and completion["metrics"] is None


@pytest.mark.parametrize("path", BODIES)
def test_nulls_of_a_plain_answer_take_80_bytes_and_those_of_a_stream_none(server: ServerProcess, path: str) -> None:
    nulls = re.compile(r'"(?:token_ids|prompt_token_ids|prompt_logprobs|metrics)":null,?')
    assert len("".join(nulls.findall(server.post(path, BODIES[path]).text))) in range(78, 81)
    assert nulls.findall(server.post(path, {**BODIES[path], "stream": True}).text) == []


@pytest.mark.parametrize("path", BODIES)
def test_streams_have_these_keys_only_if_asked(server: ServerProcess, path: str) -> None:
    optional = {"token_ids", "completion_token_ids", "prompt_token_ids", "prompt_logprobs", "metrics", "usage"}
    for chunk in chunks(server, path):
        assert not optional & set(chunk) and not optional & set(chunk["choices"][0])


def test_ids_are_where_vllm_and_fastdeploy_have_them(server: ServerProcess) -> None:
    chat = answer(server, CHATS, return_token_ids=True, prompt_logprobs=1)
    choice = chat["choices"][0]
    assert len(choice["token_ids"]) == chat["usage"]["completion_tokens"] == 5
    assert choice["token_ids"] == choice["completion_token_ids"]
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    assert chat["prompt_token_ids"] == choice["prompt_token_ids"]
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert chat["prompt_logprobs"] == choice["prompt_logprobs"]
    completion = answer(server, COMPLETIONS, return_token_ids=True)
    choice = completion["choices"][0]
    assert choice["token_ids"] == choice["completion_token_ids"] and len(choice["token_ids"]) == 5
    assert len(choice["prompt_token_ids"]) == completion["usage"]["prompt_tokens"]


@pytest.mark.parametrize("path", BODIES)
def test_ids_in_a_stream_are_those_of_the_whole_answer(server: ServerProcess, path: str) -> None:
    whole = answer(server, path, return_token_ids=True)
    streamed = chunks(server, path, return_token_ids=True)
    choices = [choice for chunk in streamed for choice in chunk["choices"]]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == whole["choices"][0]["token_ids"]
    with_prompt = [
        i for i, chunk in enumerate(streamed) if "prompt_token_ids" in (chunk if path == CHATS else choices[i])
    ]
    assert with_prompt == [0], "the first chunk only"
    first = streamed[0] if path == CHATS else choices[0]
    assert first["prompt_token_ids"] == whole["choices"][0]["prompt_token_ids"]


@pytest.mark.parametrize(("path", "num_ids", "num_texts"), [(CHATS, 5, 4), (COMPLETIONS, 4, 4)])
@pytest.mark.parametrize("stream", [False, True])
def test_answers_of_four_choices_repeat_the_prompt_as_often_as_the_guide_says(
    server: ServerProcess, path: str, num_ids: int, num_texts: int, stream: bool
) -> None:
    one = answer(server, path, return_token_ids=True)["choices"][0]
    ids = json.dumps(one["prompt_token_ids"], separators=(",", ":"))
    text = f'"prompt_tokens":{json.dumps(one["prompt_tokens"])}'
    response = server.post(path, {**BODIES[path], "n": 4, "return_token_ids": True, "stream": stream}).text
    assert (response.count(f'"prompt_token_ids":{ids}'), response.count(text)) == (num_ids, num_texts)


def test_tokens_are_named_by_their_ids_in_log_probabilities(server: ServerProcess) -> None:
    fields = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = answer(server, COMPLETIONS, logprobs=2, **fields)["choices"][0]
    names = [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    plain = answer(server, COMPLETIONS, logprobs=2)["choices"][0]["logprobs"]
    assert choice["logprobs"]["tokens"] == names
    assert all(name in top for name, top in zip(names, choice["logprobs"]["top_logprobs"], strict=True))
    assert choice["logprobs"]["text_offset"] == plain["text_offset"]
    assert choice["logprobs"]["token_logprobs"] == plain["token_logprobs"]
    entries = answer(server, CHATS, logprobs=True, top_logprobs=1, **fields)["choices"][0]
    plain_entries = answer(server, CHATS, logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"]
    content = entries["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token_id}" for token_id in entries["token_ids"]]
    assert [entry["bytes"] for entry in content] == [entry["bytes"] for entry in plain_entries]
    assert all(entry["top_logprobs"][0]["token"].startswith("token_id:") for entry in content)


def test_the_flag_names_tokens_by_their_ids_unless_a_request_says_otherwise(measuring: ServerProcess) -> None:
    for path, fields in ((COMPLETIONS, {"logprobs": 1}), (CHATS, {"logprobs": True})):
        assert '"token_id:' in measuring.post(path, {**BODIES[path], **fields}).text
        assert '"token_id:' in measuring.post(path, {**BODIES[path], **fields, "stream": True}).text
        unnamed = measuring.post(path, {**BODIES[path], **fields, "return_tokens_as_token_ids": False})
        assert '"token_id:' not in unnamed.text


def test_continuous_usage_counts_no_token_before_the_first_and_all_at_the_end(server: ServerProcess) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    usages = [chunk["usage"] for chunk in chunks(server, CHATS, stream_options=options)]
    counts = [usage["completion_tokens"] for usage in usages]
    assert [usage["total_tokens"] - usage["prompt_tokens"] for usage in usages] == counts == sorted(counts)
    assert counts[0] == 0 < counts[1] and counts[-2:] == [5, 5]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks(server, COMPLETIONS, stream_options=options)]
    assert counts[0] > 0 and counts == sorted(counts) and counts[-2:] == [5, 5]


@pytest.mark.parametrize("path", BODIES)
def test_continuous_usage_needs_include_usage(server: ServerProcess, path: str) -> None:
    for options in ({"continuous_usage_stats": True}, {"include_usage": False, "continuous_usage_stats": True}):
        assert all("usage" not in chunk for chunk in chunks(server, path, stream_options=options))
    usages = [chunk.get("usage") for chunk in chunks(server, path, stream_options={"include_usage": True})]
    assert usages[:-1] == [None] * (len(usages) - 1) and usages[-1]["completion_tokens"] == 5


@pytest.mark.parametrize("path", BODIES)
def test_metrics_of_a_request_are_at_the_top_of_the_answer(measuring: ServerProcess, path: str) -> None:
    metrics = answer(measuring, path)["metrics"]
    assert metrics.pop("speculative_decoding") == ACCEPTANCE
    expected = {
        "time_to_first_token_ms": 2.0,
        "generation_time_ms": 8.0,
        "queue_time_ms": 1.0,
        "mean_itl_ms": 2.0,
        "tokens_per_second": 5 / 0.009,
    }
    assert metrics == pytest.approx(expected)
    assert answer(measuring, path, max_tokens=1)["metrics"]["mean_itl_ms"] is None


@pytest.mark.parametrize("path", BODIES)
def test_metrics_come_with_the_usage_of_a_stream(measuring: ServerProcess, path: str) -> None:
    streamed = chunks(measuring, path, stream_options={"include_usage": True})
    assert [i for i, chunk in enumerate(streamed) if "metrics" in chunk] == [len(streamed) - 1]
    assert streamed[-1]["choices"] == [] and streamed[-1]["usage"]["completion_tokens"] == 5
    assert streamed[-1]["metrics"]["speculative_decoding"] == ACCEPTANCE
    assert all("metrics" not in chunk for chunk in chunks(measuring, path))


def test_metrics_are_a_field_of_a_response_that_has_ended(measuring: ServerProcess) -> None:
    body = {"input": "the quick brown fox", "max_output_tokens": 5, "seed": 3}
    metrics = measuring.post("/v1/responses", body).json()["metrics"]
    assert (metrics["generation_time_ms"], metrics["speculative_decoding"]) == (pytest.approx(8.0), ACCEPTANCE)
    lines = measuring.post("/v1/responses", {**body, "stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    responses = [event["response"] for event in events if "response" in event]
    assert [one.get("metrics") for one in responses] == [None] * (len(responses) - 1) + [metrics]


def test_answers_of_several_choices_have_no_metrics(measuring: ServerProcess) -> None:
    assert answer(measuring, CHATS, n=2)["metrics"] is None
    assert answer(measuring, COMPLETIONS, prompt=["the", "dog"])["metrics"] is None
    assert "metrics" not in chunks(measuring, CHATS, n=2, stream_options={"include_usage": True})[-1]


def test_either_flag_alone_adds_its_own_part(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--per-request-spec-decode-metrics", "summary") as server:
        metrics = answer(server, CHATS)["metrics"]
    assert metrics.pop("speculative_decoding") == ACCEPTANCE
    assert set(metrics.values()) == {None} and len(metrics) == 5
