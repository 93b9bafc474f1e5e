# SPDX-License-Identifier: Apache-2.0
"""Required calls with the real engine: they parse, whatever the demonstration model prefers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.entrypoints.response_check import checked_client
from tests.entrypoints.server_process import ServerProcess, real_server

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
