# SPDX-License-Identifier: Apache-2.0
"""Conversations are about real text, the same every time, and their prompts contain the model's earlier answers."""

from __future__ import annotations

import ast
import random
from collections.abc import Sequence
from itertools import islice

import pytest

from benchmarks import chats
from benchmarks.chats import CHATS, MIN_ANSWER, Partner, conversations
from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine
from fastdeploy.hub.model_path import resolve_model_path

NUM_TOKENS = 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(resolve_model_path("demo"))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_config(EngineConfig(model="demo", max_model_len=1024))


def partner(engine: Engine, tokenizer: Tokenizer, max_tokens: int = NUM_TOKENS) -> Partner:
    return Partner(engine, tokenizer, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))


@pytest.mark.parametrize("workload", CHATS)
def test_requests_are_the_same_every_time_and_differ_from_one_another(workload: str) -> None:
    found = list(islice(CHATS[workload](random.Random(3)), 8))
    assert found == list(islice(CHATS[workload](random.Random(3)), 8))
    assert found != list(islice(CHATS[workload](random.Random(4)), 8))
    assert len({tuple(requests) for requests in found}) == 8


def test_an_edit_shows_a_function_and_names_its_parameter() -> None:
    [request] = next(chats.edit(random.Random(0)))
    definition = ast.parse(request.split("```")[1].removeprefix("python\n")).body[0]
    assert isinstance(definition, ast.FunctionDef)
    assert f"Rename the parameter `{definition.args.args[0].arg}` of `{definition.name}`" in request


def test_quotes_are_from_the_given_passages() -> None:
    [request] = next(chats.quote(random.Random(0)))
    *passages, question = request.split("\n\n")
    assert [passage[:4] for passage in passages] == [f"[{number}] " for number in range(1, 7)]
    assert question.startswith("Quote passages [")


def test_later_prompts_of_an_agent_contain_its_file_and_the_models_own_answers(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    [session] = conversations("chat-agent", partner(engine, tokenizer), 1, 900, seed=0)
    assert len(session) == 4
    texts = [tokenizer.decode(turn.prompt) for turn in session]
    assert texts[0].count("Result of read_file") == texts[3].count("Result of read_file") == 1
    assert texts[3].count("Result of write_file") == 3
    answers = [tokenizer.decode(turn.answer) for turn in session]
    assert all(answer.strip() in texts[3] for answer in answers[:3])
    assert [len(turn.answer) for turn in session] == [NUM_TOKENS] * 4


def test_long_prompts_and_short_answers_are_left_out(engine: Engine, tokenizer: Tokenizer) -> None:
    def hold(requests: Sequence[str], max_prompt_tokens: int, max_tokens: int) -> bool:
        return partner(engine, tokenizer, max_tokens).hold(requests, max_prompt_tokens) is not None

    request = "def size(path):"
    num_tokens = len(tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": request}]), False))
    assert hold([request], num_tokens, MIN_ANSWER)
    assert not hold([request], num_tokens - 1, MIN_ANSWER)
    assert not hold([request], num_tokens, MIN_ANSWER - 1)


def test_more_conversations_than_there_is_text_for_are_an_error(engine: Engine, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="chat-free: 0 conversations fit, 2 are needed"):
        conversations("chat-free", partner(engine, tokenizer), 2, 1, seed=0)
