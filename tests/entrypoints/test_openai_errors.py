# SPDX-License-Identifier: Apache-2.0
"""The official `openai` client: errors, raw responses, timeouts and cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from fastdeploy.core.outputs import ErrorInfo
from fastdeploy.engine.engine import OUT_OF_MEMORY
from fastdeploy.entrypoints.openai.errors import GenerationFailed, to_api_error
from tests.entrypoints.server_process import ServerProcess, mock_server

PROMPT: dict[str, Any] = {"model": "default", "prompt": "the quick", "max_tokens": 5, "seed": 3}
CHAT: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "seed": 3}
LONG: dict[str, Any] = {**PROMPT, "max_tokens": 190}


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a key and one place, whose steps take 20 ms."""
    folder = tmp_path_factory.mktemp("slow")
    with mock_server(folder, "--max-concurrency", "1", "--api-key", "alpha", step_s=0.02) as running:
        yield running


def slow_client(server: ServerProcess, key: str = "alpha", **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0, **options)


def wait_until_idle(server: ServerProcess) -> None:
    """Return when the engine says that nothing runs and every block is free."""
    for _ in range(500):
        load = httpx.get(server.url + "/load", headers={"Authorization": "Bearer alpha"}).json()
        if load["num_requests"] == load["num_running"] == 0 and load["num_free_blocks"] == load["num_blocks"]:
            return
        httpx.post(  # the next step updates the counters
            server.url + "/v1/completions",
            json={**PROMPT, "max_tokens": 1},
            headers={"Authorization": "Bearer alpha"},
            timeout=60,
        )
    raise AssertionError(load)


def test_wrong_value_is_a_bad_request_that_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{**PROMPT, "temperature": -1})
    assert (caught.value.param, caught.value.code, caught.value.type) == (
        "temperature",
        "invalid_value",
        "invalid_request_error",
    )
    assert "expected a number in [0, " in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**CHAT, extra_body={"maxtokens": 3})
    assert (caught.value.param, caught.value.code) == ("maxtokens", "unknown_parameter")


def test_prompt_that_is_too_long_has_openai_s_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**CHAT, "messages": [{"role": "user", "content": "the " * 300}]})
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_unknown_models_and_routes_are_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(**{**PROMPT, "model": "gpt-4"})
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="embedding models are not supported"):
        client.embeddings.create(model="default", input="x")
    with pytest.raises(openai.NotFoundError, match="use /v1/responses or /v1/chat/completions"):
        client.beta.threads.create()


def test_wrong_key_is_an_authentication_error(slow: ServerProcess) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        slow_client(slow, "beta").completions.create(**PROMPT)
    assert caught.value.code == "invalid_api_key"


def test_full_server_is_a_rate_limit_error_that_the_client_retries(slow: ServerProcess) -> None:
    client = slow_client(slow)
    with client.completions.create(**LONG, stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(**PROMPT)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert client.with_options(max_retries=30).completions.create(**PROMPT).choices[0].finish_reason == "length"
    wait_until_idle(slow)


def test_raw_response_has_the_request_s_id_and_parses(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(**PROMPT, extra_headers={"X-Request-Id": "trace"})
    response = raw.parse()
    assert raw.headers["x-request-id"] == "trace" and response._request_id == "trace"
    assert response.id.startswith("cmpl-trace-") and response.system_fingerprint.startswith("fp_")
    assert response.usage is not None and response.usage.prompt_tokens_details is not None
    assert response.usage.prompt_tokens_details.cached_tokens == 0


def test_all_responses_of_a_server_have_one_fingerprint(client: openai.OpenAI) -> None:
    found = {client.completions.create(**PROMPT).system_fingerprint}
    found |= {chunk.system_fingerprint for chunk in client.chat.completions.create(**CHAT, stream=True)}
    found.add(client.chat.completions.create(**CHAT).system_fingerprint)
    assert len(found) == 1 and None not in found


def test_client_with_a_timeout_leaves_nothing_behind(slow: ServerProcess) -> None:
    client = slow_client(slow, timeout=0.2)
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(**LONG)
    wait_until_idle(slow)


def test_closed_stream_leaves_nothing_behind(slow: ServerProcess) -> None:
    stream = slow_client(slow).chat.completions.create(**{**CHAT, "max_tokens": 190}, stream=True)
    next(iter(stream))
    stream.close()
    wait_until_idle(slow)


def test_cancelled_task_leaves_nothing_behind(slow: ServerProcess) -> None:
    async def cancel_after_first_chunk() -> None:
        async with openai.AsyncOpenAI(base_url=slow.url + "/v1", api_key="alpha", max_retries=0) as client:
            begun = asyncio.Event()

            async def read() -> None:
                async for _ in await client.completions.create(**LONG, stream=True):
                    begun.set()

            task = asyncio.create_task(read())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancel_after_first_chunk())
    wait_until_idle(slow)


@pytest.mark.parametrize("options", [{"n": 2}, {"logprobs": 1}, {"stream_options": {"include_usage": True}}])
def test_async_streams_equal_sync_ones(server: ServerProcess, options: dict[str, Any]) -> None:
    async def streamed() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            return [chunk async for chunk in await client.completions.create(**PROMPT, **options, stream=True)]

    def shape(chunks: list[Any]) -> dict[int, str]:
        texts: dict[int, str] = {}
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
        return texts

    sync = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    chunks = asyncio.run(streamed())
    assert shape(chunks) == shape(list(sync.completions.create(**PROMPT, **options, stream=True)))
    assert (chunks[-1].usage is not None) == ("stream_options" in options)


def test_usage_so_far_grows_with_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": True}
    chunks = list(client.chat.completions.create(**{**CHAT, "max_tokens": 8}, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks) and counts == sorted(counts) and (counts[0], counts[-1]) == (0, 8)


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_logprobs_come_with_the_response_or_its_first_chunk(client: openai.OpenAI, stream: bool) -> None:
    extra = {"prompt_logprobs": 0, "include_logprobs_decode_token": False}
    for response in (
        client.completions.create(**PROMPT, extra_body=extra, stream=stream),
        client.chat.completions.create(**CHAT, extra_body=extra, stream=stream),
    ):
        choices = [choice for part in (response if stream else [response]) for choice in part.choices]  # type: ignore
        found = [choice.prompt_logprobs for choice in choices if getattr(choice, "prompt_logprobs", None)]
        assert len(found) == 1 and found[0][0] is None
        assert all(entry["decoded_token"] is None for one in found[0][1:] for entry in one.values())


def test_truncated_prompt_is_what_the_engine_gets(client: openai.OpenAI) -> None:
    options = {**PROMPT, "prompt": "a b c the quick"}
    extra = {"return_token_ids": True}
    cut = client.completions.create(**options, extra_body={**extra, "truncate_prompt_tokens": 2})
    whole = client.completions.create(**{**PROMPT, "prompt": cut.choices[0].prompt_token_ids}, extra_body=extra)  # type: ignore
    assert cut.choices[0].prompt_tokens == " the quick" and cut.usage.prompt_tokens == 2  # type: ignore
    assert cut.choices[0].text == whole.choices[0].text


def test_max_tokens_beyond_the_context_end_with_it(client: openai.OpenAI) -> None:
    response = client.completions.create(**{**PROMPT, "max_tokens": 5000})
    assert response.usage is not None and response.usage.total_tokens == 200
    assert response.choices[0].finish_reason == "length"


def test_a_request_for_which_the_cache_has_no_memory_is_not_the_clients_fault() -> None:
    error = to_api_error(GenerationFailed(OUT_OF_MEMORY), "r")
    assert (error.status, error.type, error.code) == (503, "service_unavailable_error", "out_of_memory")
    assert "lacks memory" in str(error)
    assert to_api_error(GenerationFailed(ErrorInfo("numerics", "x")), "r").status == 500
