# SPDX-License-Identifier: Apache-2.0
"""The official `openai` client against a real server process with the mock engine."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from fastdeploy.core.seeds import choice_seed
from tests.detokenize.tokenizers_for_tests import make_tokenizer
from tests.entrypoints.server_process import ServerProcess
from tests.mock_engine import next_token

TOKENIZER = make_tokenizer("byte_level")
PROMPT = "the quick"
MESSAGES: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
CHAT_PROMPT = "<s>system: be brief\nuser: hi\nassistant:"


def engine_tokens(prompt: str, seed: int, count: int) -> list[int]:
    """Return what the mock engine emits after `prompt`."""
    context = TOKENIZER.encode(prompt)
    for _ in range(count):
        context.append(next_token(context, seed, TOKENIZER.vocab_size))
    return context[-count:]


def engine_text(prompt: str, seed: int, count: int) -> str:
    return TOKENIZER.decode(engine_tokens(prompt, seed, count))


def complete(client: openai.OpenAI, prompt: Any = PROMPT, extra: Any = None, **kwargs: Any) -> Any:
    options = {"model": "default", "max_tokens": 12, "seed": 3, **kwargs}
    return client.completions.create(prompt=prompt, extra_body=extra, **options)


def chat(client: openai.OpenAI, extra: Any = None, **kwargs: Any) -> Any:
    options = {"model": "default", "max_tokens": 12, "seed": 3, **kwargs}
    return client.chat.completions.create(messages=MESSAGES, extra_body=extra, **options)


def test_completion_has_the_engine_s_text_usage_and_seed(client: openai.OpenAI) -> None:
    response = complete(client)
    choice = response.choices[0]
    assert (choice.text, choice.finish_reason, choice.seed) == (engine_text(PROMPT, 3, 12), "length", 3)
    num_prompt = len(TOKENIZER.encode(PROMPT))
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (num_prompt, 12)
    assert response.usage.total_tokens == num_prompt + 12
    assert response.object == "text_completion" and response.id.startswith("cmpl-")


def test_several_prompts_with_n_equal_separate_requests(client: openai.OpenAI) -> None:
    prompts = ["the quick", "for name", "END"]
    response = complete(client, prompts, n=2)
    expected = [engine_text(prompt, choice_seed(3, i), 12) for prompt in prompts for i in (0, 1)]
    assert [choice.text for choice in response.choices] == expected
    assert [choice.index for choice in response.choices] == list(range(6))
    assert response.choices[1].seed == choice_seed(3, 1)


def test_prompts_of_token_ids_equal_their_text(client: openai.OpenAI) -> None:
    ids = TOKENIZER.encode(PROMPT)
    expected = engine_text(PROMPT, 3, 12)
    assert complete(client, ids).choices[0].text == expected
    assert [choice.text for choice in complete(client, [ids, ids]).choices] == [expected, expected]
    assert complete(client, "", extra={"prompt_token_ids": ids}).choices[0].text == expected


def test_streamed_chunks_join_to_the_text_and_have_several_tokens(client: openai.OpenAI) -> None:
    chunks = list(complete(client, max_tokens=41, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].text for chunk in chunks[:-1])
    assert text == engine_text(PROMPT, 3, 41)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 41
    assert len(chunks) - 1 <= 21, "two tokens a step make at most 21 chunks"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons[-1] == "length" and not any(reasons[:-1])
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_streamed_choices_of_several_prompts_have_their_index(client: openai.OpenAI) -> None:
    texts = ["", "", "", ""]
    for chunk in complete(client, ["the", "dog"], n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [engine_text(prompt, choice_seed(3, i), 12) for prompt in ("the", "dog") for i in (0, 1)]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_before_the_text(client: openai.OpenAI, stream: bool) -> None:
    response = complete(client, ["the", "dog"], echo=True, stream=stream)
    texts = ["", ""]
    for part in response if stream else [response]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == ["the" + engine_text("the", 3, 12), "dog" + engine_text("dog", 3, 12)]


def test_completion_logprobs_name_each_token_and_where_it_begins(client: openai.OpenAI) -> None:
    choice = complete(client, max_tokens=5, logprobs=2).choices[0]
    logprobs, tokens = choice.logprobs, engine_tokens(PROMPT, 3, 5)
    assert logprobs.token_logprobs == [-0.5] * 5
    assert [TOKENIZER.encode(name)[-1] if not name.startswith("bytes:") else None for name in logprobs.tokens] == [
        token if not name.startswith("bytes:") else None for token, name in zip(tokens, logprobs.tokens, strict=True)
    ]
    assert logprobs.text_offset[0] == 0 and logprobs.text_offset == sorted(logprobs.text_offset)
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs)


def test_echo_with_logprobs_begins_with_the_prompt_s_tokens(client: openai.OpenAI) -> None:
    logprobs = complete(client, max_tokens=2, logprobs=0, echo=True).choices[0].logprobs
    num_prompt = len(TOKENIZER.encode(PROMPT))
    assert "".join(logprobs.tokens[:num_prompt]) == PROMPT
    assert logprobs.token_logprobs == [None] + [-0.5] * (num_prompt + 1)


def test_prompt_logprobs_have_rank_and_text(client: openai.OpenAI) -> None:
    choice = complete(client, max_tokens=1, extra={"prompt_logprobs": 1}).choices[0]
    assert choice.prompt_logprobs[0] is None
    second = str(TOKENIZER.encode(PROMPT)[1])
    assert choice.prompt_logprobs[1][second] == {"logprob": -0.5, "rank": 1, "decoded_token": " quick"}


def test_stop_string_ends_the_text_and_is_reported(client: openai.OpenAI) -> None:
    texts = {seed: engine_text(PROMPT, seed, 40) for seed in range(100)}
    seed, whole = next(pair for pair in texts.items() if "\ufffd" not in pair[1][:12])
    stop = whole[9:12]
    assert whole.index(stop) == 9, "the mock's text must suit this test"
    choice = complete(client, seed=seed, max_tokens=40, stop=[stop]).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (whole[:9], "stop", stop)
    kept = complete(client, seed=seed, max_tokens=40, stop=stop, extra={"include_stop_str_in_output": True}).choices[0]
    assert kept.text == whole[:12]
    streamed = [chunk.choices[0].text for chunk in complete(client, seed=seed, max_tokens=40, stop=[stop], stream=True)]
    assert "".join(streamed) == whole[:9]


def test_stop_token_id_ends_the_text_before_it(client: openai.OpenAI) -> None:
    tokens = engine_tokens(PROMPT, 3, 12)
    choice = complete(client, extra={"stop_token_ids": [tokens[4]], "return_token_ids": True}).choices[0]
    end = tokens.index(tokens[4])
    assert (choice.finish_reason, choice.stop_reason) == ("stop", tokens[4])
    assert choice.completion_token_ids == tokens[: end + 1], "the real last token is kept"
    assert choice.text == TOKENIZER.decode(tokens[:end])


def test_chat_renders_the_template_and_answers_as_the_assistant(client: openai.OpenAI) -> None:
    response = chat(client, extra={"return_token_ids": True})
    choice = response.choices[0]
    prompt_ids = TOKENIZER.encode(CHAT_PROMPT)
    assert choice.message.role == "assistant"
    assert choice.message.content == engine_text(CHAT_PROMPT, 3, 12)
    assert (choice.prompt_token_ids, choice.completion_token_ids) == (prompt_ids, engine_tokens(CHAT_PROMPT, 3, 12))
    assert (response.object, response.usage.prompt_tokens) == ("chat.completion", len(prompt_ids))


def test_streamed_chat_opens_with_the_role_and_joins_to_the_text(client: openai.OpenAI) -> None:
    chunks = list(chat(client, n=2, stream=True))
    for index in (0, 1):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert own[0].delta.role == "assistant" and own[0].delta.content == ""
        assert all(choice.delta.role is None for choice in own[1:])
        text = "".join(choice.delta.content or "" for choice in own)
        assert text == engine_text(CHAT_PROMPT, choice_seed(3, index), 12)
        assert own[-1].finish_reason == "length" and own[-1].seed == choice_seed(3, index)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_have_bytes_and_alternatives(client: openai.OpenAI, stream: bool) -> None:
    response = chat(client, logprobs=True, top_logprobs=2, max_tokens=6, stream=stream)
    parts = (
        [choice.logprobs for chunk in response for choice in chunk.choices]
        if stream
        else [response.choices[0].logprobs]
    )
    content = [entry for part in parts if part is not None for entry in part.content]
    tokens = engine_tokens(CHAT_PROMPT, 3, 6)
    assert [bytes(entry.bytes) for entry in content] == [TOKENIZER.token_bytes(token) for token in tokens]
    assert all(len(entry.top_logprobs) == 2 and entry.logprob == -0.5 for entry in content)


def test_chat_from_token_ids_skips_the_template(client: openai.OpenAI) -> None:
    response = chat(client, extra={"prompt_token_ids": TOKENIZER.encode(PROMPT)})
    assert response.choices[0].message.content == engine_text(PROMPT, 3, 12)


def test_max_completion_tokens_takes_precedence_over_max_tokens(client: openai.OpenAI) -> None:
    assert chat(client, max_tokens=50, max_completion_tokens=4).usage.completion_tokens == 4


def test_content_parts_of_text_are_joined(client: openai.OpenAI) -> None:
    parts: Any = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: list[Any] = [{"role": "user", "content": parts}]
    response = client.chat.completions.create(model="default", messages=messages, max_tokens=3, seed=1)
    assert response.choices[0].message.content == engine_text("<s>user: a\nb\nassistant:", 1, 3)


def test_metrics_come_with_collect_metrics(client: openai.OpenAI) -> None:
    choice = chat(client, extra={"collect_metrics": True}).choices[0]
    assert choice.speculate_metrics["accepted_tokens"] == 3 and choice.speculate_metrics["accept_ratio"] == 0.75
    assert choice.metrics["first_token_s"] == 0.002
    assert not hasattr(chat(client).choices[0], "speculate_metrics")


def test_requests_without_seed_draw_different_ones_and_can_be_replayed(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "default", "prompt": PROMPT, "max_tokens": 20}
    first, second = (client.completions.create(**options).choices[0] for _ in range(2))
    assert first.seed != second.seed
    assert client.completions.create(**options, seed=first.seed).choices[0].text == first.text


def test_client_s_request_id_is_in_the_response_s_id(client: openai.OpenAI) -> None:
    assert complete(client, extra={"request_id": "mine-1"}).id == "cmpl-mine-1"


def test_text_continues_to_the_end_of_the_context_without_max_tokens(client: openai.OpenAI) -> None:
    response = client.completions.create(model="default", prompt=PROMPT)
    assert response.usage.total_tokens == 200
    assert response.choices[0].finish_reason == "length"


def test_model_may_be_the_path_its_last_part_or_default(client: openai.OpenAI, server: ServerProcess) -> None:
    name = client.models.list().data[0].id
    assert name.endswith("/tiny")
    for alias in (name, "tiny", "default"):
        assert complete(client, model=alias).model == name
    assert client.models.retrieve("tiny").id == name
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        complete(client, model="other")


def test_async_client_streams_many_at_once(server: ServerProcess) -> None:
    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.completions.create(
            model="default", prompt=PROMPT, max_tokens=60, seed=seed, stream=True
        )  # fmt: skip
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(32)))

    assert asyncio.run(all_of_them()) == [engine_text(PROMPT, seed, 60) for seed in range(32)]
