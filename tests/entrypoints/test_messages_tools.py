# SPDX-License-Identifier: Apache-2.0
"""/v1/messages with tools, thinking and structured output, in the forms of the official client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import openai
import pydantic
import pytest
from anthropic import beta_tool

from fastdeploy.entrypoints.openai.messages_api.fields import TOOLS as TOOL_RULES
from fastdeploy.entrypoints.openai.messages_api.input import chat_input
from fastdeploy.entrypoints.openai.messages_api.protocol import MessagesRequest
from tests.entrypoints.anthropic_client import messages_client
from tests.entrypoints.chat_server import rendered, says
from tests.entrypoints.server_process import ServerProcess
from tests.entrypoints.test_messages import count, count_chat, create
from tests.entrypoints.test_tools import CALL, CALL_NOW, TEXTS
from tests.entrypoints.test_tools import TOOLS as CHAT_TOOLS

WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "of a city",
    "input_schema": CHAT_TOOLS[0]["function"]["parameters"],
}
NOW: dict[str, Any] = {"type": "custom", "name": "now", "input_schema": {"type": "object", "properties": {}}}
TOOLS: list[Any] = [WEATHER, NOW]
BASH: dict[str, Any] = {"type": "bash_20250124", "name": "bash"}
SEARCH: dict[str, Any] = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
LEFT_OUT = [*TOOL_RULES.left_out]


@pytest.fixture
def client(parsing_server: ServerProcess) -> anthropic.Anthropic:
    return messages_client(parsing_server)


def shown(message: Any) -> list[tuple[Any, ...]]:
    """Return the blocks of a message without ids."""
    names = {"text": ("text",), "thinking": ("thinking", "signature"), "tool_use": ("name", "input")}
    return [(block.type, *(getattr(block, name) for name in names[block.type])) for block in message.content]


def test_calls_are_blocks_between_the_texts(client: anthropic.Anthropic) -> None:
    message = create(client, TEXTS["text, two calls, text"], tools=TOOLS)
    assert shown(message) == [
        ("text", "Let me look."),
        ("tool_use", "weather", {"city": "Łódź", "days": 2}),
        ("tool_use", "now", {}),
        ("text", "\nDone."),
    ]
    assert message.stop_reason == "tool_use"
    ids = [block.id for block in message.content if block.type == "tool_use"]
    assert len(set(ids)) == 2 and all(name.startswith("toolu_") for name in ids)


def test_reasoning_is_a_thinking_block_with_a_signature(client: anthropic.Anthropic) -> None:
    message = create(client, TEXTS["reasoning, text and calls"], tools=TOOLS)
    assert [block[0] for block in shown(message)] == ["thinking", "text", "tool_use", "tool_use"]
    thinking = message.content[0]
    assert thinking.type == "thinking"
    assert (thinking.thinking, thinking.signature != "") == ("hm", True)
    assert message.usage.output_tokens_details is not None
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("is_hidden", [False, True])
def test_streamed_blocks_equal_those_of_the_whole_message(
    client: anthropic.Anthropic, name: str, is_hidden: bool
) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "max_tokens": 500}
    if is_hidden:
        options["thinking"] = {"type": "adaptive", "display": "omitted"}
    whole = create(client, TEXTS[name], **options)
    with client.messages.stream(model="default", messages=says(TEXTS[name]), **options) as stream:
        final = stream.get_final_message()
    assert shown(final) == shown(whole)
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)
    texts = [block[1] for block in shown(whole) if block[0] == "thinking"]
    assert texts == [""] * len(texts) if is_hidden else all(texts)


@pytest.mark.parametrize("name", TEXTS)
def test_the_blocks_have_the_texts_of_the_chat(
    client: anthropic.Anthropic, parsing_client: openai.OpenAI, name: str
) -> None:
    chat = parsing_client.chat.completions.create(model="default", messages=says(TEXTS[name]), tools=CHAT_TOOLS)
    message = create(client, TEXTS[name], tools=TOOLS)
    expected = chat.choices[0].message
    assert "".join(block[1] for block in shown(message) if block[0] == "text") == (expected.content or "")
    calls = [block[1:] for block in shown(message) if block[0] == "tool_use"]
    functions = [call.function for call in expected.tool_calls or []]  # type: ignore[union-attr]
    assert calls == [(function.name, json.loads(function.arguments)) for function in functions]
    assert chat.usage is not None
    assert (message.usage.output_tokens, message.stop_reason) == (
        chat.usage.completion_tokens,
        "tool_use" if calls else "end_turn",
    )


def test_a_call_that_was_cut_keeps_its_text(client: anthropic.Anthropic) -> None:
    whole = create(client, CALL, tools=TOOLS)
    message = create(client, CALL, tools=TOOLS, max_tokens=whole.usage.output_tokens - 8)
    assert message.stop_reason == "max_tokens"
    [(kind, name, arguments)] = shown(message)
    assert (kind, name, list(arguments)) == ("tool_use", "weather", ["INVALID_JSON"])
    assert '{"city": "Łódź", "days": 2}'.startswith(arguments["INVALID_JSON"])


CONVERSATION: list[Any] = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "from elsewhere"},
            {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Łódź"}},
            {"type": "tool_use", "id": "toolu_2", "name": "weather", "input": {"city": "Rom"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "wet"},
            {
                "type": "tool_result",
                "tool_use_id": "toolu_2",
                "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "data"}],
                "is_error": True,
                "cache_control": {"type": "ephemeral"},
            },
            {"type": "text", "text": "And?"},
        ],
    },
]


def test_results_and_earlier_thinking_reach_the_prompt(parsing_server: ServerProcess) -> None:
    body = {"model": "default", "tools": [WEATHER], "messages": CONVERSATION}
    calls = [
        {"id": f"toolu_{i}", "type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
        for i, city in ((1, "Łódź"), (2, "Rom"))
    ]
    chat = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "reasoning_content": "hm", "content": "Let me look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "wet"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "no\ndata"},
        {"role": "user", "content": "And?"},
    ]
    tools = [CHAT_TOOLS[0]]
    tokens = parsing_server.post("/tokenize", {"messages": chat, "tools": tools}).json()["tokens"]
    assert count(parsing_server, body) == len(tokens) == count_chat(parsing_server, chat, tools=tools)


def test_results_tell_the_template_whether_they_are_errors() -> None:
    request = chat_input(MessagesRequest(messages=CONVERSATION, max_tokens=1), has_reasoning=True).request
    results = [message for message in request.messages or [] if message["role"] == "tool"]
    assert [message.get("is_error") for message in results] == [None, True]


def test_tools_reach_the_template_as_functions(parsing_server: ServerProcess, parsing_model: Any) -> None:
    examples = {**WEATHER, "input_examples": [{"city": "Rom"}], "strict": True, "cache_control": {"type": "ephemeral"}}
    function = {**CHAT_TOOLS[0]["function"], "strict": True, "input_examples": [{"city": "Rom"}]}
    names = ("name", "description", "strict", "input_examples", "parameters")
    chat = [{"type": "function", "function": {name: function[name] for name in names}}]
    tokens = parsing_server.post("/tokenize", {"messages": says("a"), "tools": chat}).json()["tokens"]
    assert '"input_examples": [{"city": "Rom"}]' in rendered(parsing_model, tokens)
    assert count(parsing_server, {"messages": says("a"), "tools": [examples]}) == len(tokens)


def test_tools_that_the_server_does_not_have_are_left_out_beside_others(
    client: anthropic.Anthropic, parsing_server: ServerProcess
) -> None:
    others = [{"type": kind, "name": f"n{i}"} for i, kind in enumerate(LEFT_OUT)]
    body = {"model": "default", "messages": CONVERSATION}
    assert count(parsing_server, {**body, "tools": [*others, *TOOLS]}) == count(
        parsing_server, {**body, "tools": TOOLS}
    )
    for _ in range(2):
        message = create(client, CALL, tools=[BASH, WEATHER, SEARCH], tool_choice={"type": "any"})
        assert [block[1] for block in shown(message)] == ["weather"]
    for kind in LEFT_OUT:
        assert parsing_server.stderr.count(f"/v1/messages: tools of type {kind} are left out: ") == 1


def test_tools_to_be_loaded_later_are_in_the_prompt(parsing_server: ServerProcess) -> None:
    body = {"model": "default", "messages": CONVERSATION}
    later = [{**tool, "defer_loading": True} for tool in TOOLS]
    assert count(parsing_server, {**body, "tools": later}) == count(parsing_server, {**body, "tools": TOOLS})


def test_choices_of_tools(client: anthropic.Anthropic) -> None:
    two = CALL + CALL_NOW
    both = create(client, two, tools=TOOLS, tool_choice={"type": "any"})
    assert [block[1] for block in shown(both)] == ["weather", "now"]
    one = create(client, two, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block[1] for block in shown(one)] == ["weather"]
    named = create(client, two, tools=TOOLS, tool_choice={"type": "tool", "name": "weather"})
    assert [block[1] for block in shown(named)] == ["weather"]
    none = create(client, CALL, tools=TOOLS, tool_choice={"type": "none"})
    assert (none.content[0].type, none.stop_reason) == ("text", "end_turn")


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [BASH]}, "tools[0].type: bash_20250124 is not supported: it has no schema"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema: is missing"),
    ({"tools": [{"name": "x", "input_schema": {"type": "string"}}]}, "tools[0].input_schema: expected a JSON schema"),
    ({"tools": [{"name": "x" * 129, "input_schema": {"type": "object"}}]}, "tools[0].name: expected 1 to 128 of"),
    ({"tools": [NOW, NOW]}, "tools[1].name: 'now' is not unique"),
    ({"tools": [SEARCH, BASH]}, "tools[0].type: web_search_20250305 is not supported: tools do not run"),
    ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "x"}, NOW]}, "tools[0].type: mcp_toolset is not supported"),
    ({"tools": [BASH, {"name": "x"}]}, "tools[1].input_schema: is missing"),
    ({"tools": [BASH, NOW, SEARCH, NOW]}, "tools[3].name: 'now' is not unique"),
    ({"tools": [BASH, {**NOW, "input_schema": {"type": "string"}}]}, "tools[1].input_schema: expected a JSON schema"),
    ({"tools": [BASH, NOW], "tool_choice": {"type": "tool", "name": "bash"}}, "tool_choice.name: 'bash' is not one of"),
    ({"tools": [{**NOW, "parameters": {}}]}, "tools[0].parameters: unknown field"),
    ({"tools": [NOW], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name: 'x' is not one of the tools"),
    ({"tools": [NOW], "tool_choice": {"type": "required"}}, "tool_choice.type: expected one of auto, any, tool, none"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: is missing"),
    ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens: expected a number of tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2**40}}, "thinking.budget_tokens: expected an integer in [0, "),
    ({"thinking": {"type": "on"}}, "thinking.type: expected one of enabled, adaptive, between_tools, disabled"),
    (
        {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}},
        "chat_template_kwargs: 'enable_thinking' contradicts thinking",
    ),
    ({"output_config": {"effort": "none"}}, "output_config.effort: expected one of low, medium, high, xhigh, max"),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 5}}}, "output_config.task_budget: use max_tokens"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type: expected one of json_schema, got"),
    ({"output_format": {"type": "json_schema", "schema": 3}}, "output_format.schema: expected an object, got a number"),
    (
        {
            "output_format": {"type": "json_schema", "schema": {}},
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        },
        "output_format: differs from output_config.format",
    ),
    (
        {"messages": CONVERSATION[:2]},
        "messages[1].content[0]: expected a message with a tool_result after this one",
    ),
]


@pytest.mark.parametrize(("fields", "message"), ERRORS)
def test_errors_have_the_names_of_this_protocol(
    parsing_server: ServerProcess, fields: dict[str, Any], message: str
) -> None:
    body = {"model": "default", "messages": says("a"), "max_tokens": 5, **fields}
    response = parsing_server.post("/v1/messages", body)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
    assert response.json()["error"]["message"].startswith(message), response.json()["error"]["message"]


def test_thinking_turns_the_reasoning_of_the_template_on_and_off(
    parsing_server: ServerProcess, parsing_model: Any
) -> None:
    def prompt_count(**fields: Any) -> int:
        return count(parsing_server, {"messages": says("a"), **fields})

    def chat_count(**variables: Any) -> int:
        return count_chat(parsing_server, says("a"), chat_template_kwargs=variables)

    on, off, unset = chat_count(enable_thinking=True), chat_count(enable_thinking=False), chat_count()
    assert len({on, off, unset}) == 3
    assert prompt_count() == unset
    for kind, options, expected in (
        ("enabled", {"budget_tokens": 3}, on),
        ("adaptive", {}, on),
        ("disabled", {}, off),
        ("between_tools", {}, off),
    ):
        assert prompt_count(thinking={"type": kind, **options}) == expected, kind
    low = count_chat(parsing_server, says("a"), chat_template_kwargs={"reasoning_effort": "low"})
    assert prompt_count(output_config={"effort": "low"}) == low != unset
    assert parsing_server.post(
        "/v1/messages", {"messages": says("a"), "max_tokens": 5, "output_config": {"effort": "max"}}
    ).is_success


class Weather(pydantic.BaseModel):
    city: str
    days: int


def test_structured_output_is_parsed_by_the_client(client: anthropic.Anthropic) -> None:
    text = '{"city": "Rom", "days": 2}'
    for owner in (client.messages, client.beta.messages):
        message = owner.parse(model="default", messages=says(text), max_tokens=90, output_format=Weather)  # type: ignore[attr-defined]
        assert message.parsed_output == Weather(city="Rom", days=2)
        with owner.stream(model="default", messages=says(text), max_tokens=90, output_format=Weather) as stream:
            assert stream.get_final_message().parsed_output == Weather(city="Rom", days=2)


def test_the_tool_loop_of_the_client_runs_to_the_last_answer(client: anthropic.Anthropic) -> None:
    cities = []

    @beta_tool
    def weather(city: str, days: int) -> str:
        """Return the weather.

        Args:
            city: the city
            days: how many
        """
        cities.append((city, days))
        return "It is wet. [[All done.]]"  # which the model answers next

    runner = client.beta.messages.tool_runner(model="default", messages=says(CALL), max_tokens=200, tools=[weather])
    final = runner.until_done()
    assert cities == [("Łódź", 2)]
    assert [block.text for block in final.content] == ["All done."]  # type: ignore[union-attr]


def test_tokens_are_counted_as_the_usage_reports_them(client: anthropic.Anthropic) -> None:
    prompt: dict[str, Any] = {"model": "default", "messages": CONVERSATION, "tools": TOOLS, "system": "be brief"}
    for owner in (client.messages, client.beta.messages):
        counted = owner.count_tokens(**prompt).input_tokens
        usage = owner.create(max_tokens=1, **prompt).usage
        assert usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens == counted


def test_raw_responses_and_asynchronous_streams(parsing_server: ServerProcess) -> None:
    options: dict[str, Any] = {"model": "default", "messages": says(TEXTS["one call"]), "max_tokens": 90}
    response = messages_client(parsing_server).messages.with_raw_response.create(**options)
    assert response.headers["request-id"] == response.parse().id

    async def read() -> list[str]:
        client = anthropic.AsyncAnthropic(base_url=parsing_server.url, api_key="none", _strict_response_validation=True)
        async with client.messages.stream(**options, tools=TOOLS) as stream:
            inputs = [event.partial_json async for event in stream if event.type == "input_json"]
        created = await client.messages.create(**options, tools=TOOLS)
        return ["".join(inputs), created.content[0].name]

    assert asyncio.run(read()) == ['{"city": "Łódź", "days": 2}', "weather"]
