# SPDX-License-Identifier: Apache-2.0
"""Bodies of POST /v1/responses as chats: which items become which messages, and what their fields are called."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy.entrypoints.openai.responses_api.input import Translation, translate
from fastdeploy.entrypoints.openai.responses_api.protocol import ResponsesRequest

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "3"}
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}
CHAT_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}

SPACE: dict[str, Any] = {"type": "namespace", "name": "crm", "description": "about customers"}
SPACE["tools"] = [TOOL, {"type": "function", "name": "g"}]


def translated(**fields: Any) -> Translation:
    return translate(ResponsesRequest(**{"input": "hi", **fields}), False)


def reasoning(content: str | None, summary: str | None = None) -> dict[str, Any]:
    """Return a reasoning item with one part of each kind."""
    item: dict[str, Any] = {"type": "reasoning", "id": "rs_1", "summary": []}
    if content is not None:
        item["content"] = [{"type": "reasoning_text", "text": content}]
    if summary is not None:
        item["summary"] = [{"type": "summary_text", "text": summary}]
    return item


def said(text: str) -> dict[str, Any]:
    """Return a message of the assistant as the server writes it."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}


SAID_A, SAID_B = ({"content": [{"type": "text", "text": text}], "role": "assistant"} for text in "ab")
TOOL_MESSAGE = {"role": "tool", "tool_call_id": "c1", "content": "3"}
MESSAGES: list[tuple[Any, list[dict[str, Any]]]] = [
    ("hi", [USER]),
    ([USER, {"role": "developer", "content": "x"}], [USER, {"role": "developer", "content": "x"}]),
    ([USER, said("a"), USER], [USER, SAID_A, USER]),
    ([said("a"), said("b")], [SAID_A, SAID_B]),
    ([USER, said("a"), CALL, OUTPUT], [USER, {**SAID_A, "tool_calls": [CHAT_CALL]}, TOOL_MESSAGE]),
    ([CALL, CALL], [{"role": "assistant", "tool_calls": [CHAT_CALL, CHAT_CALL]}]),
    ([CALL, OUTPUT, CALL], [{"role": "assistant", "tool_calls": [CHAT_CALL]}, TOOL_MESSAGE,
                            {"role": "assistant", "tool_calls": [CHAT_CALL]}]),
    ([CALL, said("a")], [{"role": "assistant", "tool_calls": [CHAT_CALL]}, SAID_A]),
    ([reasoning("r"), said("a"), CALL], [{**SAID_A, "reasoning_content": "r", "tool_calls": [CHAT_CALL]}]),
    ([said("a"), reasoning("r"), CALL], [SAID_A, {"role": "assistant", "reasoning_content": "r",
                                                  "tool_calls": [CHAT_CALL]}]),
    ([reasoning(None, "s"), said("a")], [{**SAID_A, "reasoning_content": "s"}]),
    ([reasoning("r", "s"), said("a")], [{**SAID_A, "reasoning_content": "r"}]),
    ([reasoning(None), said("a")], [SAID_A]),
    ([{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
     [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]),
    ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
     [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]),
    ([CALL, {**OUTPUT, "output": [{"type": "input_text", "text": "3"}], "name": "f"}],
     [{"role": "assistant", "tool_calls": [CHAT_CALL]},
      {**TOOL_MESSAGE, "content": [{"type": "text", "text": "3"}], "name": "f"}]),
]  # fmt: skip


@pytest.mark.parametrize(("given", "messages"), MESSAGES)
def test_items_become_the_messages_of_a_chat(given: Any, messages: list[dict[str, Any]]) -> None:
    assert translated(input=given).chat.messages == messages
    system = {"role": "system", "content": "be brief"}
    assert translated(input=given, instructions="be brief").chat.messages == [system, *messages]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, None),
        ("required", "required"),
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
            },
        ),
    ],
)
def test_tools_and_their_choice_are_those_of_a_chat(choice: Any, expected: Any) -> None:
    translation = translated(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    chat = translation.chat
    assert (chat.tools, chat.tool_choice, chat.parallel_tool_calls) == ([CHAT_TOOL], expected, False)
    assert translation.tool_choice == (choice if choice is not None else "auto")
    assert translation.tools.repeated == [{**TOOL, "strict": None}]


def test_functions_of_a_namespace_are_functions_of_the_chat_whose_names_begin_with_it() -> None:
    bare = {"type": "function", "name": "g"}
    tools = [{"type": "custom", "name": "c"}, SPACE, TOOL, {**SPACE, "name": "erp", "description": "", "tools": [bare]}]
    translation = translated(tools=tools)
    first = {"type": "function", "function": {**CHAT_TOOL["function"], "name": "crm__f"}}  # type: ignore[dict-item]
    first["function"]["description"] = "Functions crm__*: about customers\n\nd"  # type: ignore[index]
    second = {"type": "function", "function": {"name": "crm__g"}}
    third = {"type": "function", "function": {"name": "erp__g"}}
    assert translation.chat.tools == [first, second, CHAT_TOOL, third]
    repeated = {**bare, "parameters": None, "strict": None}
    assert translation.tools.repeated == [
        {**SPACE, "tools": [{**TOOL, "strict": None}, repeated]},
        {**TOOL, "strict": None},
        {**SPACE, "name": "erp", "description": "", "tools": [repeated]},
    ]
    names = ("crm__f", "crm__g", "f", "erp__g", "erp__f", "crm__")
    assert [translation.tools.split_name(name) for name in names] == [
        *(("crm", "f"), ("crm", "g"), (None, "f"), ("erp", "g"), (None, "erp__f"), (None, "crm__")),
    ]
    fields = {"tools[0].function.name": "tools[1].tools[0].name", "tools[2].function.strict": "tools[2].strict"}
    fields |= {
        "tools[3].function.parameters": "tools[3].tools[0].parameters",
        "tools[1].type": "tools[1].tools[1].type",
    }
    assert {name: translation.rename(name) for name in fields} == fields


def test_the_description_of_a_namespace_without_descriptions_in_it_is_shown() -> None:
    chat = translated(
        tools=[{**SPACE, "tools": [{"type": "custom", "name": "c"}, {"type": "function", "name": "g"}]}]
    ).chat
    assert chat.tools == [
        {"type": "function", "function": {"name": "crm__g", "description": "Functions crm__*: about customers"}}
    ]


def test_calls_and_results_of_a_namespace_have_its_name() -> None:
    call, output = {**CALL, "namespace": "crm"}, {**OUTPUT, "name": "f", "namespace": "crm"}
    chat_call = {**CHAT_CALL, "function": {"name": "crm__f", "arguments": "{}"}}
    assert translated(input=[call, output, {**CALL, "namespace": ""}]).chat.messages == [
        {"role": "assistant", "tool_calls": [chat_call]},
        {**TOOL_MESSAGE, "name": "crm__f"},
        {"role": "assistant", "tool_calls": [CHAT_CALL]},
    ]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "function", "name": "f", "namespace": "crm"}, "crm__f"),
        ({"type": "function", "name": "crm__f"}, "crm__f"),
        ({"type": "function", "name": "f"}, "f"),
        ([{"type": "namespace", "name": "crm"}, {"type": "function", "name": "f"}], ["crm__f", "crm__g", "f"]),
        ([{"type": "function", "name": "g", "namespace": "crm"}], ["crm__g"]),
    ],
)
def test_functions_of_namespaces_can_be_chosen(choice: Any, names: str | list[str]) -> None:
    given = {"type": "allowed_tools", "mode": "required", "tools": choice} if isinstance(choice, list) else choice
    translation = translated(tools=[SPACE, TOOL], tool_choice=given)
    assert translation.tool_choice == given
    if isinstance(names, str):
        assert translation.chat.tool_choice == {"type": "function", "function": {"name": names}}
        return
    functions = [{"type": "function", "function": {"name": name}} for name in names]
    assert translation.chat.tool_choice == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": functions},
    }


def test_settings_and_extension_fields_are_those_of_a_chat() -> None:
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    chat = translated(
        max_output_tokens=7,
        text={"format": schema},
        reasoning={"effort": "low"},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 4, "ignore_eos": True},
        **{"cache_salt": "s", "priority": 2, "timeout": 9.0, "request_id": "r", "stream": True, "model": "m"},
        **{"speculative": {"method": "off"}, "chat_template_kwargs": {"a": 1}, "stop": ["x"], "logit_bias": {"5": 1}},
        **{"presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
        **{"skip_special_tokens": False, "include_stop_str_in_output": True},
    ).chat
    assert (chat.max_completion_tokens, chat.reasoning_effort, chat.logprobs, chat.top_logprobs) == (7, "low", True, 2)
    assert chat.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True},
    }
    assert (chat.temperature, chat.top_p, chat.top_k, chat.min_p, chat.seed, chat.ignore_eos) == (
        *(0.5, 0.9, 3, 0.1, 4, True),
    )
    assert (chat.cache_salt, chat.priority, chat.timeout, chat.request_id, chat.stream, chat.model) == (
        *("s", 2, 9.0, "r", True, "m"),
    )
    assert (chat.speculative, chat.chat_template_kwargs) == ({"method": "off"}, {"a": 1})
    assert (chat.stop, chat.logit_bias, chat.skip_special_tokens) == (["x"], {"5": 1}, False)
    assert (chat.presence_penalty, chat.frequency_penalty, chat.repetition_penalty) == (0.1, 0.2, 1.1)
    assert chat.include_stop_str_in_output
    assert translated(structured_outputs={"regex": "a"}).chat.structured_outputs == {"regex": "a"}


def test_fields_of_the_chat_have_the_names_of_the_body() -> None:
    items = [USER, reasoning("r"), said("a"), CALL, OUTPUT]
    rename = translated(input=items, instructions="be brief", tools=[TOOL]).rename
    names = {
        "messages": "input",
        "messages[0].content": "instructions",
        "messages[1].content": "input[0].content",
        "messages[2].content": "input[2].content",
        "messages[2].reasoning_content": "input[1].content",
        "messages[2].tool_calls[0].function.arguments": "input[3].arguments",
        "tools[0].function.name": "tools[0].name",
        "tools": "tools",
        "tool_choice.allowed_tools.tools": "tool_choice.tools",
        "max_completion_tokens": "max_output_tokens",
        "response_format.json_schema.schema": "text.format.schema",
        "chat_template_kwargs": "chat_template_kwargs",
        "temperature": "temperature",
    }
    assert {name: rename(name) for name in names} == names
    assert translated(input="hi").rename("messages[0].content") == "input"
    given: tuple[dict[str, Any], ...] = ({}, {"max_output_tokens": 2}, {"max_tokens": 2})
    names_given = [translated(input="hi", **fields).rename("max_tokens") for fields in given]
    assert names_given == ["max_output_tokens", "max_output_tokens", "max_tokens"]
