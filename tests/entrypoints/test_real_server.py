# SPDX-License-Identifier: Apache-2.0
"""End to end: real server process, real engine on a small model with random weights, the official client."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.entrypoints.response_check import checked_client
from tests.entrypoints.server_process import ServerProcess, real_server
from tests.mock_engine import save_mock_model

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "max_ngram_size": 3, "adaptive": false}'
FLAGS = ("--load-choices", "dummy", "--dtype", "float32", "--max-model-len", "256", "--num-gpu-blocks-override", "40")
PROMPT = "for name in names: for name in names: for name"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_mock_model(tmp_path_factory.mktemp("dummy")))


@pytest.fixture(scope="module")
def plain(model: str) -> Iterator[ServerProcess]:
    with real_server(
        model, *FLAGS, "--speculative-config", '{"method": "naive", "num_speculative_tokens": 1}'
    ) as server:
        yield server


@pytest.fixture(scope="module")
def ngram(model: str) -> Iterator[ServerProcess]:
    metrics = ("--enable-per-request-metrics", "--per-request-spec-decode-metrics", "summary")
    with real_server(model, *FLAGS, *metrics, "--speculative-config", NGRAM) as server:
        yield server


def connect(server: ServerProcess) -> openai.OpenAI:
    return checked_client(server.url)


def metric(server: ServerProcess, name: str) -> float:
    found = re.search(rf"^fastdeploy:{name}(?:{{.*}})? (\S+)$", server.get("/metrics").text, re.MULTILINE)
    return float(found.group(1)) if found else 0.0


REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logit_bias": {"50": 5}, "max_tokens": 200},
    {"temperature": 0.7, "seed": 11},
    {"temperature": 1.0, "seed": 12, "top_p": 0.5, "n": 3},
    {"temperature": 0.3, "seed": 13, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"temperature": 0, "stop": ["a", "e"]},
    {"temperature": 0.2, "seed": 14, "extra_body": {"top_k": 3, "min_p": 0.05, "repetition_penalty": 1.2}},
    {"temperature": 0.2, "seed": 15, "extra_body": {"bad_words": ["the", "x"], "min_tokens": 5}},
]


def test_texts_are_equal_with_and_without_speculation_and_drafts_were_accepted(
    plain: ServerProcess, ngram: ServerProcess
) -> None:
    for fields in REQUESTS:
        options = {"model": "default", "prompt": PROMPT, "max_tokens": 60, **fields}
        left = connect(plain).completions.create(**options)
        right = connect(ngram).completions.create(**options)
        assert [choice.text for choice in left.choices] == [choice.text for choice in right.choices]
        assert [choice.finish_reason for choice in left.choices] == [choice.finish_reason for choice in right.choices]
        assert left.usage == right.usage or left.usage.completion_tokens == right.usage.completion_tokens
    assert metric(ngram, "spec_decode_num_accepted_tokens_total") > 0
    drafted = metric(ngram, "spec_decode_num_draft_tokens_total")
    assert drafted > metric(ngram, "spec_decode_num_accepted_tokens_total")
    assert metric(plain, "spec_decode_num_draft_tokens_total") == 0


def test_concurrent_streams_equal_their_solo_texts(ngram: ServerProcess) -> None:
    def options(seed: int) -> dict[str, Any]:
        return {"model": "default", "prompt": PROMPT[: 8 + seed], "max_tokens": 40, "seed": seed, "temperature": 0.5}

    async def streamed(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.completions.create(**options(seed), stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=ngram.url + "/v1", api_key="none") as client:
            return await asyncio.gather(*(streamed(client, seed) for seed in range(16)))

    solo = [connect(ngram).completions.create(**options(seed)).choices[0].text for seed in range(16)]
    assert asyncio.run(together()) == solo
    assert metric(ngram, "num_requests_running") == 0


def test_streamed_chat_equals_the_complete_response(ngram: ServerProcess) -> None:
    options: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": "hello there"}],
        "max_tokens": 30,
        "seed": 4,
    }
    whole = connect(ngram).chat.completions.create(**options)
    chunks = connect(ngram).chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


def test_logprobs_are_those_of_plain_decoding(plain: ServerProcess, ngram: ServerProcess) -> None:
    options: dict[str, Any] = {
        "model": "default", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "logprobs": 3, "echo": True
    }  # fmt: skip
    left, right = (connect(server).completions.create(**options).choices[0].logprobs for server in (plain, ngram))
    assert left.tokens == right.tokens and left.top_logprobs == right.top_logprobs
    assert left.token_logprobs == right.token_logprobs


def test_prompt_logprobs_belong_to_the_tokens_of_the_prompt(ngram: ServerProcess) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2, "prompt_logprobs": 2, "return_token_ids": True}
    choice = ngram.post("/v1/completions", body).json()["choices"][0]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert len(rest) == len(choice["prompt_token_ids"]) - 1
    for token_id, entry in zip(choice["prompt_token_ids"][1:], rest, strict=True):
        own = entry[str(token_id)]
        better = sum(other["logprob"] > own["logprob"] for other in entry.values())
        assert own["rank"] > better and own["logprob"] < 0


def test_speculation_of_one_request_is_reported_and_can_be_switched_off(ngram: ServerProcess) -> None:
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "collect_metrics": True}
    used = ngram.post("/v1/completions", body).json()["choices"][0]
    off = ngram.post("/v1/completions", {**body, "speculative": {"method": "off"}}).json()["choices"][0]
    assert used["speculate_metrics"]["drafted_tokens"] > 0
    assert off["speculate_metrics"]["drafted_tokens"] == 0
    assert used["text"] == off["text"]


def test_metrics_of_an_answer_agree_with_those_of_its_choice(ngram: ServerProcess) -> None:
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "collect_metrics": True}
    answer = ngram.post("/v1/completions", body).json()
    metrics, counts = answer["metrics"], answer["choices"][0]["speculate_metrics"]
    drafts = metrics.pop("speculative_decoding")
    assert all(value > 0 for value in metrics.values()) and len(metrics) == 5
    assert drafts["num_accepted_draft_tokens"] == counts["accepted_tokens"] > 0
    assert drafts["num_draft_tokens"] == counts["drafted_tokens"]
    assert drafts["draft_acceptance_rate"] == counts["accept_ratio"]
    histogram, num_steps = drafts["acceptance_histogram"], drafts["num_spec_steps"]
    assert len(histogram) == drafts["num_spec_tokens"] + 1 and sum(histogram) == num_steps <= counts["num_steps"]
    assert sum(n * count for n, count in enumerate(histogram)) == counts["accepted_tokens"]
    assert drafts["mean_acceptance_length"] == 1 + counts["accepted_tokens"] / num_steps
    off = ngram.post("/v1/completions", {**body, "speculative": {"method": "off"}}).json()["metrics"]
    assert off["speculative_decoding"] is None and off["generation_time_ms"] > 0


def test_shared_prefix_is_found_in_the_cache(ngram: ServerProcess) -> None:
    body = {"prompt": [7 + i % 90 for i in range(150)], "max_tokens": 4, "temperature": 0}
    first = ngram.post("/v1/completions", body).json()
    second = ngram.post("/v1/completions", body).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    salted = ngram.post("/v1/completions", {**body, "cache_salt": "other"}).json()
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_disconnected_client_frees_its_blocks(ngram: ServerProcess) -> None:
    free = metric(ngram, "available_gpu_block_num")
    body = {"prompt": PROMPT, "max_tokens": 200, "stream": True, "n": 4, "ignore_eos": True, "temperature": 1.5}
    with httpx.stream("POST", ngram.url + "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
    deadline = time.monotonic() + 30
    while metric(ngram, "num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert metric(ngram, "num_requests_running") == 0
    assert metric(ngram, "available_gpu_block_num") == free


def test_lossy_speculation_is_reported_in_every_response(model: str) -> None:
    config = '{"method": "ngram", "num_speculative_tokens": 2, "verify_strategy": "topp_relaxed"}'
    with real_server(model, *FLAGS, "--speculative-config", config) as server:
        assert "LOSSY" in server.stdout
        response = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4}).json()
        assert response["speculation"] == {
            "method": "ngram",
            "verify_strategy": "topp_relaxed",
            "accept_policy": "normal",
            "lossy": True,
        }
        server.terminate()
        assert server.wait_end() == 0


def test_killed_engine_is_reported(model: str) -> None:
    with real_server(model, *FLAGS) as server:
        [engine] = server.engine_pids()
        os.kill(engine, signal.SIGKILL)
        assert server.wait_end() == 1
        assert "the engine process ended with status -9" in server.stderr


def test_model_without_weights_is_one_line_and_status_2(model: str) -> None:
    server = ServerProcess([model], factory="fastdeploy.engine.engine_factory:make_engine")
    try:
        assert server.wait_end(120) == 2
    finally:
        server.close()
    errors = [line for line in server.stderr.splitlines() if "error" in line]
    assert len(errors) == 1 and str(Path(model)) in errors[0]
    assert "Traceback" not in server.stderr
