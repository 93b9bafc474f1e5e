# SPDX-License-Identifier: Apache-2.0
"""Required calls with the real engine: they parse, whatever the demonstration model prefers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.entrypoints.response_check import checked_client
from tests.entrypoints.server_process import ServerProcess, real_server
from tests.entrypoints.test_tools import message_of, whole_message
from tests.thinking_model import CALL_START, END, START, save_thinking_model

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 6},
                    "days": {"type": "integer", "minimum": 0, "maximum": 9},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "tides")
]
NAMED = {"type": "function", "function": {"name": "tides"}}
SPECULATION = json.dumps({"method": "ngram", "num_speculative_tokens": 4})


@pytest.fixture(scope="module", params=["hermes", ""])
def real(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """A server with a parser of tool calls, and one without."""
    if request.param:
        yield request.getfixturevalue("drafting_server")
        return
    with real_server("demo", "--speculative-config", SPECULATION) as running:
        yield running


def calls_of(real: ServerProcess, tool_choice: Any, seed: int, stream: bool = False, **kwargs: Any) -> list[Any]:
    """Return (name, arguments) of one choice's calls."""
    client = checked_client(real.url)
    options: dict[str, Any] = {
        "messages": [{"role": "user", "content": "def add(a, b):"}],
        "tools": TOOLS,
        "tool_choice": tool_choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "temperature": 1.0,
        "seed": seed,
        **kwargs,
    }
    if not stream:
        choice = client.chat.completions.create(model="default", **options).choices[0]
    else:
        with client.chat.completions.stream(model="default", **options) as events:
            choice = events.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]


@pytest.mark.parametrize("tool_choice", ["required", NAMED], ids=["required", "named"])
def test_required_calls_follow_their_schema(real: ServerProcess, tool_choice: Any) -> None:
    made = [calls_of(real, tool_choice, seed) for seed in range(6)]
    for ((name, text),) in made:
        arguments = json.loads(text)
        assert name in (("tides",) if tool_choice == NAMED else ("weather", "tides"))
        assert len(arguments.pop("city")) <= 6 and 0 <= arguments.pop("days") <= 9 and arguments == {}
    assert len({text for ((_, text),) in made}) > 1, "sampled"


def test_streams_and_plain_decoding_give_the_same_calls(real: ServerProcess) -> None:
    whole = calls_of(real, "required", 7)
    assert calls_of(real, "required", 7, stream=True) == whole
    assert calls_of(real, "required", 7, extra_body={"speculative": {"method": "off"}}) == whole


def test_allowed_tools_are_the_only_ones_called(real: ServerProcess) -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    assert {calls_of(real, allowed, seed)[0][0] for seed in range(4)} == {"tides"}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose prompts end within the reasoning of a model of Qwen3's form."""
    model = str(save_thinking_model(tmp_path_factory.mktemp("thinking")))
    flags = ("--reasoning-parser", "qwen3", "--tool-call-parser", "hermes", "--speculative-config", SPECULATION)
    template = "{{ messages[0].content }}<think>"
    with real_server(model, "--chat-template", template, "--max-model-len", "512", *flags) as running:
        yield running


CALLS_SOON = {str(CALL_START): 15.0}


@pytest.fixture(scope="module")
def seed(thinking: ServerProcess) -> int:
    """A seed with which the model reasons for a few tokens before it calls; the machine's numerics decide which."""
    for seed in range(1, 60):
        options: dict[str, Any] = {"seed": seed, "max_tokens": 30, "logit_bias": CALLS_SOON}
        ids = thinking_chat(thinking, "required", **options).choices[0].completion_token_ids
        if CALL_START in ids and ids[0] != CALL_START:
            return seed
    raise AssertionError("it never calls after some reasoning")


@pytest.mark.parametrize("tool_choice", ["required", "auto", NAMED], ids=["required", "strict", "named"])
def test_call_ends_an_open_reasoning_with_every_kind_of_choice(
    thinking: ServerProcess, tool_choice: Any, seed: int
) -> None:
    options: dict[str, Any] = {"max_tokens": 120, "logit_bias": CALLS_SOON, "seed": seed}
    whole = thinking_chat(thinking, tool_choice, **options)
    choice, ids = whole.choices[0], whole.choices[0].completion_token_ids
    num_reasoning = ids.index(CALL_START)
    assert num_reasoning > 0 and END not in ids
    assert whole.usage.completion_tokens_details.reasoning_tokens == num_reasoning
    assert choice.message.reasoning_content and "<tool_call>" not in choice.message.reasoning_content
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments).keys() == {"city", "days"}
    plain = thinking_chat(thinking, tool_choice, speculative={"method": "off"}, **options)
    assert plain.choices[0].completion_token_ids == ids
    with_stream = thinking_chat(thinking, tool_choice, stream=True, **options)
    assert message_of(list(with_stream)) == whole_message(choice)


def test_budget_ends_a_reasoning_only_if_no_call_has_ended_it(thinking: ServerProcess, seed: int) -> None:
    late = thinking_chat(thinking, "required", reasoning_max_tokens=3, seed=1)
    ids = late.choices[0].completion_token_ids
    assert (ids.index(END), ids.index(CALL_START)) == (3, 4)
    assert late.usage.completion_tokens_details.reasoning_tokens == 4, "with the marker"
    options: dict[str, Any] = {"reasoning_max_tokens": 30, "response_max_tokens": 9, "logit_bias": CALLS_SOON}
    early = thinking_chat(thinking, "required", seed=seed, **options)
    ids = early.choices[0].completion_token_ids
    assert 0 < ids.index(CALL_START) < 30 and len(ids) == ids.index(CALL_START) + 9
    assert early.choices[0].finish_reason == "length"


BUDGETS = [{"thinking_token_budget": 3}, {"logits_processors_args": {"thinking_budget": 3}}]


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: next(iter(budget)))
def test_budget_of_a_completion_ends_the_reasoning_that_its_prompt_leaves_open(
    thinking: ServerProcess, budget: dict[str, Any]
) -> None:
    def outputs(**fields: Any) -> list[list[int]]:
        prompts = ["a = 1<think>", "<think>b</think>c<think>d", "a = 1<think>hm</think>", "a = 1"]
        body = {"prompt": prompts, "max_tokens": 9, "ignore_eos": True, "return_token_ids": True, "seed": 1, **fields}
        response = thinking.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        return [choice["token_ids"] for choice in response.json()["choices"]]

    never_ends = {str(END): -100.0}
    for speculative in ({}, {"speculative": {"method": "off"}}):
        free = outputs(logit_bias=never_ends, **speculative)
        assert [END in ids for ids in free] == [False] * 4
        limited = outputs(logit_bias=never_ends, **budget, **speculative)
        assert [ids.index(END) if END in ids else None for ids in limited] == [3, 3, None, None]
        assert [ids[:3] for ids in limited] == [ids[:3] for ids in free]
        opened = outputs(logit_bias={**never_ends, str(START): 100.0}, **budget, **speculative)[3]
        assert (opened[0], opened.index(END)) == (START, 4), "the output opens the reasoning"


def thinking_chat(server: ServerProcess, tool_choice: Any, stream: bool = False, **extra: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": "def add(a, b):"}]
    return checked_client(server.url).chat.completions.create(
        model="default",
        messages=messages,
        tools=TOOLS,
        tool_choice=tool_choice,
        parallel_tool_calls=False,
        stream=stream,
        extra_body={"return_token_ids": True, "max_tokens": 60, "temperature": 1.6, **extra},
    )
