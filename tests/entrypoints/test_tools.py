# SPDX-License-Identifier: Apache-2.0
"""Tool calling with the official client: complete and streamed, with reasoning, with every kind of tool_choice."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.detokenize.published_templates import DEEPSEEK_V3, DEEPSEEK_V3_0324, LLAMA32, QWEN3
from tests.entrypoints.chat_server import rendered, says
from tests.entrypoints.server_process import ServerProcess

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS: list[Any] = [WEATHER, NOW]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź", "days": 2}}\n</tool_call>'
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TEXTS = {
    "one call": CALL,
    "text, two calls, text": f"Let me look.\n{CALL}\n{CALL_NOW}\nDone.",
    "no call": "It is <b>sunny</b>.",
    "no call, although it begins like one": '<tool_call>{"city": "x"}</tool_call> <|hidden|>!',
    "reasoning, then a call": f"<think>\nShould I?\nYes.\n</think>\n\n{CALL}",
    "reasoning with a call in it": f"<think>\nShould I {CALL}?\nYes.\n</think>\n\n{CALL_NOW}",
    "reasoning, text and calls": f"<think>hm</think>So:{CALL}{CALL_NOW}",
    "reasoning without end": f"<think>hm {CALL}",
}


def chat(client: openai.OpenAI, text: str, **kwargs: Any) -> Any:
    options = {"model": "default", "messages": says(text), "tools": TOOLS, **kwargs}
    return client.chat.completions.create(**options)


def message_of(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """Join a stream's deltas by OpenAI's rules."""
    made: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": {}, "finish_reason": None}
    for choice in (choice for chunk in chunks for choice in chunk.choices if choice.index == index):
        made["content"] += choice.delta.content or ""
        made["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
        made["finish_reason"] = choice.finish_reason or made["finish_reason"]
        for call in choice.delta.tool_calls or []:
            if call.index not in made["calls"]:
                assert (call.id[:5], call.type, call.function.arguments) == ("call_", "function", "")
                made["calls"][call.index] = [call.function.name, ""]
            else:
                assert call.id is None and call.function.name is None
                made["calls"][call.index][1] += call.function.arguments
    made["calls"] = [tuple(made["calls"][index]) for index in sorted(made["calls"])]
    return made


def whole_message(choice: Any) -> dict[str, Any]:
    message = choice.message
    return {
        "content": message.content or "",
        "reasoning_content": message.reasoning_content or "",
        "calls": [(call.function.name, call.function.arguments) for call in message.tool_calls or []],
        "finish_reason": choice.finish_reason,
    }


def test_calls_are_separated_from_text_and_end_the_choice(parsing_client: openai.OpenAI) -> None:
    response = chat(parsing_client, TEXTS["text, two calls, text"])
    choice = response.choices[0]
    assert choice.message.content == "Let me look.\nDone."
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
        ("weather", '{"city": "Łódź", "days": 2}'),
        ("now", "{}"),
    ]
    assert choice.finish_reason == "tool_calls"
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert chat(parsing_client, CALL).choices[0].message.content is None


def test_call_ends_an_open_reasoning(parsing_client: openai.OpenAI, parsing_model: Path) -> None:
    response = chat(parsing_client, TEXTS["reasoning without end"], extra_body={"return_token_ids": True})
    choice = response.choices[0]
    assert (choice.message.reasoning_content, choice.message.content) == ("hm", None)
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    assert choice.finish_reason == "tool_calls"
    ids = choice.completion_token_ids
    num_reasoning = next(at for at in range(len(ids)) if rendered(parsing_model, ids[: at + 1]).endswith("<tool_call>"))
    assert response.usage.completion_tokens_details.reasoning_tokens == num_reasoning
    asks = chat(parsing_client, TEXTS["reasoning with a call in it"]).choices[0].message
    assert (asks.reasoning_content, asks.content) == ("Should I", "?\nYes.\n</think>")
    assert [call.function.name for call in asks.tool_calls] == ["weather", "now"]


def test_without_tools_markers_in_the_reasoning_are_reasoning(parsing_client: openai.OpenAI) -> None:
    extra = {"skip_special_tokens": False}
    message = chat(parsing_client, TEXTS["reasoning with a call in it"], tool_choice="none", extra_body=extra)
    message = message.choices[0].message
    assert message.reasoning_content == f"Should I {CALL}?\nYes."
    assert (message.content, message.tool_calls) == (CALL_NOW, None)


@pytest.mark.parametrize("name", TEXTS)
def test_streamed_message_equals_the_complete_one(parsing_client: openai.OpenAI, name: str) -> None:
    whole = chat(parsing_client, TEXTS[name])
    chunks = list(chat(parsing_client, TEXTS[name], stream=True, stream_options={"include_usage": True}))
    assert message_of(chunks) == whole_message(whole.choices[0])
    assert chunks[-1].usage == whole.usage


def test_other_special_tokens_stay_hidden(parsing_client: openai.OpenAI) -> None:
    text = TEXTS["no call, although it begins like one"]
    assert chat(parsing_client, text).choices[0].message.content == '<tool_call>{"city": "x"}</tool_call> !'
    shown = chat(parsing_client, text, extra_body={"skip_special_tokens": False})
    assert shown.choices[0].message.content == text


def test_choices_are_parsed_separately(parsing_client: openai.OpenAI) -> None:
    text = TEXTS["reasoning, text and calls"]
    whole = chat(parsing_client, text, n=3)
    assert [len(choice.message.tool_calls) for choice in whole.choices] == [2, 2, 2]
    chunks = list(chat(parsing_client, text, n=3, stream=True))
    expected = whole_message(whole.choices[0])
    assert [message_of(chunks, index) for index in range(3)] == [expected] * 3


def test_tokens_and_logprobs_are_those_of_the_text(parsing_client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    whole = chat(parsing_client, TEXTS["text, two calls, text"], **options).choices[0]
    chunks = list(chat(parsing_client, TEXTS["text, two calls, text"], stream=True, **options))
    choices = [chunk.choices[0] for chunk in chunks]
    token_ids = [token for choice in choices for token in getattr(choice, "completion_token_ids", None) or []]
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert token_ids == whole.completion_token_ids
    assert [entry.token for entry in entries] == [entry.token for entry in whole.logprobs.content]
    assert len(entries) == len(token_ids)


def test_usage_counts_the_tokens_of_the_reasoning(parsing_client: openai.OpenAI, parsing_model: Path) -> None:
    usage = chat(parsing_client, "<think>one two</think>three", extra_body={"return_token_ids": True})
    ids = usage.choices[0].completion_token_ids
    num_reasoning = 1 + next(
        at for at in range(len(ids)) if rendered(parsing_model, ids[: at + 1]).endswith("</think>")
    )
    assert usage.usage.completion_tokens_details.reasoning_tokens == num_reasoning
    assert chat(parsing_client, "three").usage.completion_tokens_details.reasoning_tokens == 0


def test_parallel_tool_calls_false_keeps_one_call(parsing_client: openai.OpenAI) -> None:
    text = TEXTS["text, two calls, text"]
    assert len(chat(parsing_client, text, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    chunks = list(chat(parsing_client, text, parallel_tool_calls=False, stream=True))
    assert len(message_of(chunks)["calls"]) == 1


@pytest.mark.parametrize("tools", [{"tools": TOOLS, "tool_choice": "none"}, {"tools": []}])
def test_without_tools_markers_are_text(parsing_client: openai.OpenAI, parsing_model: Path, tools: Any) -> None:
    extra = {"skip_special_tokens": False, "return_token_ids": True}
    response = chat(parsing_client, f"a {CALL}", extra_body=extra, **tools)
    choice = response.choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (f"a {CALL}", None, "stop")
    assert "TOOLS" not in rendered(parsing_model, choice.prompt_token_ids), (
        "the prompt has no tools that must not be called"
    )


def test_template_shows_tools_calls_and_results(parsing_client: openai.OpenAI, parsing_model: Path) -> None:
    call = chat(parsing_client, CALL).choices[0].message.tool_calls[0]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        *says("ok"),
    ]
    response: Any = parsing_client.chat.completions.create(
        model="default", messages=messages, tools=TOOLS, extra_body={"return_token_ids": True}
    )
    prompt = rendered(parsing_model, response.choices[0].prompt_token_ids)
    assert prompt.startswith(f"<s>TOOLS {json.dumps(TOOLS)}\nuser: hi</s>\n")
    assert f"assistant: (hm)CALL weather Łódź</s>\ntool: rainFOR {call.id}</s>\n" in prompt


@pytest.mark.parametrize(
    "template", [None, QWEN3, LLAMA32, DEEPSEEK_V3, DEEPSEEK_V3_0324], ids=["own", "Qwen3", "Llama", "V3", "V3 0324"]
)
def test_an_agent_sends_the_message_back_as_it_got_it(
    parsing_client: openai.OpenAI, parsing_model: Path, template: str | None
) -> None:
    message = chat(parsing_client, f"<think>hm</think>{CALL}").choices[0].message
    assert (message.content, message.reasoning) == (None, "hm")
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    messages = [{"role": "user", "content": "hi"}, message, result, *says("ok")]
    extra = {"return_token_ids": True, **({} if template is None else {"chat_template": template})}
    options: dict[str, Any] = {"model": "default", "messages": messages, "tools": TOOLS, "extra_body": extra}
    response: Any = parsing_client.chat.completions.create(**options)
    assert response.choices[0].message.content == "ok"
    prompt = rendered(parsing_model, response.choices[0].prompt_token_ids)
    assert "Łódź" in prompt and "rain" in prompt and "None" not in prompt


class Weather(pydantic.BaseModel):
    """Weather of a city."""

    city: str
    unit: Literal["C", "F"] = "C"


def test_client_s_parse_helper_gives_models_and_arguments(parsing_client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Weather, name="weather")
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "unit": "F"}}</tool_call>'
    parsed = parsing_client.chat.completions.parse(model="default", messages=says(text), tools=[tool])
    calls = parsed.choices[0].message.tool_calls
    assert calls is not None and calls[0].function.parsed_arguments == Weather(city="Rome", unit="F")
    response = parsing_client.chat.completions.parse(
        model="default", messages=says('{"city": "Oslo", "unit": "C"}'), response_format=Weather, tools=[tool]
    )
    assert response.choices[0].message.parsed == Weather(city="Oslo")


def test_client_s_streaming_helper_follows_arguments(parsing_client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Weather, name="weather")
    text = 'So <tool_call>{"name": "weather", "arguments": {"city": "Rome", "unit": "F"}}</tool_call>'
    with parsing_client.chat.completions.stream(model="default", messages=says(text), tools=[tool]) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(event.arguments_delta for event in deltas) == '{"city": "Rome", "unit": "F"}'
    assert final.message.content == "So" and final.finish_reason == "tool_calls"
    calls = final.message.tool_calls
    assert calls is not None and calls[0].function.parsed_arguments == Weather(city="Rome", unit="F")


def test_async_client_streams_calls_of_many_requests_at_once(parsing_server: ServerProcess) -> None:
    async def one(client: openai.AsyncOpenAI, city: str) -> dict[str, Any]:
        text = CALL.replace("Łódź", city)
        stream = await client.chat.completions.create(
            model="default", messages=says(text), tools=TOOLS, stream=True
        )  # fmt: skip
        return message_of([chunk async for chunk in stream])

    async def all_of_them() -> list[dict[str, Any]]:
        async with openai.AsyncOpenAI(base_url=parsing_server.url + "/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, f"city {number}") for number in range(16)))

    calls = [message["calls"] for message in asyncio.run(all_of_them())]
    assert calls == [[("weather", f'{{"city": "city {number}", "days": 2}}')] for number in range(16)]


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "expected function"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "expected an object"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "1 to 128"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 129}}]}, "tools[0].function.name", "1 to 128"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name", "is not unique"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools[0].function.parameters",
            "of type object",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
            "tools[0].function.strict",
            "true or false",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": 3}}}}]},
            "tools[0].function.parameters.properties",
            "expected a schema for 'a', got 3",
        ),
        ({"tool_choice": "any"}, "tool_choice", "expected none, auto, required"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "expected none, auto, required"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice.function.name",
            "is not one of the",
        ),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [], "parallel_tool_calls": True}, "parallel_tool_calls", "needs tools"),
        ({"guided_regex": "a+"}, "guided_regex", "with tools"),
        ({"guided_regex": "a+", "tool_choice": "required"}, "guided_regex", "a tool_choice that requires calls"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"function_call": {"name": "f"}}, "function_call", "use tool_choice"),
    ],
)
def test_wrong_tools_are_400_and_name_the_field(
    parsing_server: ServerProcess, change: dict[str, Any], param: str, message: str
) -> None:
    body = {"model": "default", "messages": says("hi"), "tools": TOOLS, **change}
    response = parsing_server.post("/v1/chat/completions", body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert message in error["message"]


def test_name_of_128_characters_is_called(parsing_client: openai.OpenAI) -> None:
    name = "n" * 128
    tool: Any = {"type": "function", "function": {"name": name}}
    text = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
    message = chat(parsing_client, text, tools=[tool]).choices[0].message
    assert [call.function.name for call in message.tool_calls] == [name]


def test_auto_needs_a_tool_call_parser_if_the_template_shows_tools_and_no_known_call(server: ServerProcess) -> None:
    template = "{{ tools | tojson }}{{ messages[0].content }}"
    body = {"messages": says("hi"), "tools": TOOLS, "chat_template": template}
    response = server.post("/v1/chat/completions", body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tool_choice")
    assert "--tool-call-parser" in error["message"]
