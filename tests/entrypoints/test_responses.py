# SPDX-License-Identifier: Apache-2.0
"""The official client's forms of POST /v1/responses, validated strictly: whole, streamed, parsed, tools, reasoning."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

from tests.entrypoints.chat_server import says
from tests.entrypoints.response_check import checked_client, named_events
from tests.entrypoints.server_process import ServerProcess

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "the weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


class City(pydantic.BaseModel):
    city: str


@pytest.fixture(scope="module")
def strict(parsing_server: ServerProcess) -> openai.OpenAI:
    """The official client of a server that says what the prompt tells it to."""
    return checked_client(parsing_server.url, _strict_response_validation=True)


def create(client: openai.OpenAI, text: str, **options: Any) -> Any:
    """Return the response, in which the model writes `text`."""
    return client.responses.create(**{"model": "default", "input": says(text), "max_output_tokens": 200, **options})


def chat(client: openai.OpenAI, text: str, **options: Any) -> Any:
    """Return the chat of the same prompt."""
    return client.chat.completions.create(**{"model": "default", "messages": says(text), "max_tokens": 200, **options})


def test_a_text_has_the_chat_s_text_ids_usage_and_settings(strict: openai.OpenAI) -> None:
    response = create(strict, "Hello, wörld 🙂.", temperature=0.5, metadata={"a": "b"}, extra_body=NO_THINKING)
    assert response.output_text == "Hello, wörld 🙂."
    assert response.id.startswith("resp_") and response.object == "response"
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    (message,) = response.output
    assert (message.type, message.role, message.status, message.id[:4]) == ("message", "assistant", "completed", "msg_")
    assert message.content[0].annotations == [] and message.content[0].logprobs == []
    assert (response.temperature, response.metadata, response.store) == (0.5, {"a": "b"}, False)
    assert (response.background, response.previous_response_id, response.service_tier) == (False, None, "default")
    assert response.completed_at >= response.created_at
    usage = chat(strict, "Hello, wörld 🙂.", extra_body=NO_THINKING).usage
    assert (response.usage.input_tokens, response.usage.output_tokens) == (usage.prompt_tokens, usage.completion_tokens)
    assert response.usage.total_tokens == usage.total_tokens
    assert response.usage.output_tokens_details.reasoning_tokens == 0


def test_a_stream_is_the_whole_answer_in_the_order_of_the_protocol(strict: openai.OpenAI) -> None:
    text = "The quick brown fox jumps over the lazy dog."
    with strict.responses.stream(model="default", input=says(text), extra_body=NO_THINKING) as stream:  # type: ignore[arg-type]
        events: list[Any] = list(stream)
        final = stream.get_final_response()
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == text == events[-4].text == final.output_text
    assert all(event.logprobs == [] for event in deltas)
    item_ids = {event.item_id for event in events[3:-2]} | {events[2].item.id, events[-2].item.id, final.output[0].id}
    assert len(item_ids) == 1
    assert len({events[0].response.id, events[1].response.id, final.id}) == 1
    assert (events[2].item.status, events[-2].item.status, final.status) == ("in_progress", "completed", "completed")
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    assert final.usage is not None and final.usage.output_tokens > 10


def test_a_stream_has_event_lines_and_no_end_mark(parsing_server: ServerProcess) -> None:
    body = {"input": says("one"), "stream": True, **NO_THINKING}
    response = parsing_server.post("/v1/responses", body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    names = [name for name, _ in named_events(response.text)]
    assert names[0] == "response.created" and names[-1] == "response.completed"
    assert "[DONE]" not in response.text


def test_a_cut_answer_is_incomplete(strict: openai.OpenAI) -> None:
    options: Any = {"max_output_tokens": 3, "extra_body": NO_THINKING}
    response = create(strict, "a b c d e f g h", **options)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete" and response.usage.output_tokens == 3
    assert (
        response.output_text
        == chat(strict, "a b c d e f g h", max_tokens=3, extra_body=NO_THINKING).choices[0].message.content
    )
    events = list(create(strict, "a b c d e f g h", stream=True, **options))
    assert [event.type for event in events[-2:]] == ["response.output_item.done", "response.incomplete"]
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"
    assert events[-1].response.output_text == response.output_text


@pytest.mark.parametrize("both", [False, True])
def test_max_tokens_is_another_name_of_max_output_tokens(strict: openai.OpenAI, both: bool) -> None:
    extra = {**NO_THINKING, "max_tokens": 3}
    response = create(strict, "a b c d e f g h", max_output_tokens=3 if both else None, extra_body=extra)
    assert (response.status, response.usage.output_tokens, response.max_output_tokens) == ("incomplete", 3, 3)
    assert response.incomplete_details.reason == "max_output_tokens"


def test_reasoning_is_an_item_of_its_own_before_the_message(strict: openai.OpenAI) -> None:
    response = create(strict, "<think>Let me see.</think>It is 4.", reasoning={"effort": "low", "summary": "auto"})
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "Let me see." and response.output[0].summary == []
    assert response.output_text == "It is 4." and response.reasoning.effort == "low"
    assert response.usage.output_tokens_details.reasoning_tokens > 3


def test_reasoning_has_events_of_its_own(strict: openai.OpenAI) -> None:
    events = list(create(strict, "<think>Let me see.</think>It is 4.", stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [*dict.fromkeys(kinds)] == [
        *("created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done", "output_text.delta", "output_text.done"),
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [(event.output_index, event.item.type) for event in added] == [(0, "reasoning"), (1, "message")]
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "Let me see."
    assert kinds.index("reasoning_text.delta") > kinds.index("content_part.added")
    assert events[-1].response.output[0].id == added[0].item.id


def test_an_answer_cut_in_its_reasoning_has_no_message(strict: openai.OpenAI) -> None:
    response = create(strict, "<think>a b c d e f g h i j k l</think>so", max_output_tokens=6)
    assert [(item.type, item.status) for item in response.output] == [("reasoning", "incomplete")]
    assert response.status == "incomplete" and response.output_text == ""


def test_an_answer_without_text_has_an_empty_message(strict: openai.OpenAI) -> None:
    response = create(strict, "", extra_body=NO_THINKING)
    assert [item.content[0].text for item in response.output] == [""] and response.status == "completed"
    events = list(create(strict, "", stream=True, extra_body=NO_THINKING))
    assert [event.type for event in events if "part" in event.type or "text" in event.type] == [
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
    ]


def test_the_tools_loop_sends_the_answer_s_items_back(strict: openai.OpenAI, parsing_server: ServerProcess) -> None:
    items: list[Any] = says(f"<think>I ask.</think>Wait.{CALL}")
    response = strict.responses.create(model="default", input=items, tools=[TOOL])
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    call: Any = response.output[2]
    assert (call.name, json.loads(call.arguments), call.status) == ("weather", {"city": "Oslo"}, "completed")
    assert call.id.startswith("fc_") and call.call_id.startswith("call_")
    items += [item.model_dump() for item in response.output]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "[[It rains.]]"}]
    second = strict.responses.create(model="default", input=items, tools=[TOOL])
    assert second.output_text == "It rains."
    expected = [
        says(f"<think>I ask.</think>Wait.{CALL}")[0],
        {
            "role": "assistant",
            "content": "Wait.",
            "reasoning_content": "I ask.",
            "tool_calls": [
                {"id": call.call_id, "type": "function", "function": {"name": "weather", "arguments": call.arguments}}
            ],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "[[It rains.]]"},
    ]
    tools = [
        {"type": "function", "function": {key: TOOL[key] for key in ("name", "description", "parameters", "strict")}}
    ]
    again = parsing_server.post("/v1/chat/completions", {"messages": expected, "tools": tools}).json()
    assert second.usage is not None and second.usage.input_tokens == again["usage"]["prompt_tokens"]


def test_calls_are_streamed_with_their_arguments(strict: openai.OpenAI) -> None:
    with strict.responses.stream(
        model="default",
        input=says(f"Wait.{CALL}{CALL}"),
        tools=[TOOL],
        extra_body=NO_THINKING,  # type: ignore[arg-type]
    ) as stream:
        events: list[Any] = list(stream)
        final = stream.get_final_response()
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.type for item in added] == ["message", "function_call", "function_call"]
    assert [item.id for item in added] == [item.id for item in final.output]
    assert [item.arguments for item in added[1:]] == ["", ""] and added[1].name == "weather"
    assert added[1].call_id != added[2].call_id
    for index in (1, 2):
        deltas = [e.delta for e in events if e.type.endswith("arguments.delta") and e.output_index == index]
        (done,) = [e for e in events if e.type.endswith("arguments.done") and e.output_index == index]
        assert "".join(deltas) == done.arguments == '{"city": "Oslo"}'
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_pydantic_classes_are_parsed_from_text_and_calls(strict: openai.OpenAI) -> None:
    parsed = strict.responses.parse(
        model="default",
        input=says('{"city": "Oslo"}'),
        text_format=City,
        extra_body=NO_THINKING,  # type: ignore[arg-type]
    )
    assert parsed.output_parsed == City(city="Oslo")
    assert parsed.text is not None and parsed.text.format is not None and parsed.text.format.type == "json_schema"
    tool: Any = openai.pydantic_function_tool(City, name="weather")
    strict_tool = {"type": "function", **tool["function"]}
    called = strict.responses.parse(
        model="default",
        input=says(CALL),
        tools=[strict_tool],
        extra_body=NO_THINKING,  # type: ignore[arg-type]
    )
    assert called.output[0].parsed_arguments == {"city": "Oslo"} or called.output[0].arguments  # type: ignore[union-attr]


def test_log_probabilities_are_those_of_the_text(strict: openai.OpenAI) -> None:
    options: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    text = "<think>Let me see.</think>It is 4."
    part = create(strict, text, **options).output[1].content[0]
    whole = chat(strict, text, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [one.token for one in part.logprobs] == [one.token for one in whole][-len(part.logprobs) :]
    assert "".join(one.token for one in part.logprobs).startswith("It is 4.")
    assert all(len(one.top_logprobs) == 2 for one in part.logprobs)
    events = list(create(strict, text, stream=True, **options))
    deltas = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert [one.token for one in deltas] == [one.token for one in part.logprobs]
    assert events[-1].response.output[1].content[0].logprobs == part.logprobs


ALLOWED: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
OTHER: Any = {**TOOL, "name": "tides"}


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "weather"}, ALLOWED])
def test_every_choice_of_tools_is_honoured_and_repeated(strict: openai.OpenAI, choice: Any) -> None:
    response = create(strict, CALL, tools=[TOOL, OTHER], tool_choice=choice, parallel_tool_calls=False)
    assert [item.name for item in response.output if item.type == "function_call"] == ["weather"]
    repeated = response.tool_choice if isinstance(choice, str) else response.tool_choice.to_dict()
    assert repeated == choice and not response.parallel_tool_calls
    assert [tool.name for tool in response.tools] == ["weather", "tides"]


SPACE: Any = {"type": "namespace", "name": "sky", "description": "about the sky", "tools": [TOOL, OTHER]}
CALL_IN_SPACE = CALL.replace("weather", "sky__weather")


NAMED_IN_SPACE = {"type": "function", "name": "weather", "namespace": "sky"}
ALLOWED_SPACE = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "sky"}]}


@pytest.mark.parametrize("choice", ["auto", "required", NAMED_IN_SPACE, ALLOWED_SPACE])
def test_a_call_of_a_namespace_has_its_name_whole_and_streamed(strict: openai.OpenAI, choice: Any) -> None:
    options: Any = {"tools": [SPACE, TOOL, {"type": "web_search"}], "tool_choice": choice, "extra_body": NO_THINKING}
    whole = create(strict, CALL_IN_SPACE, **options)
    assert [(item.namespace, item.name, item.arguments) for item in whole.output] == [
        ("sky", "weather", '{"city": "Oslo"}')
    ]
    assert [tool.type for tool in whole.tools] == ["namespace", "function"]
    assert [tool.name for tool in whole.tools[0].tools] == ["weather", "tides"]
    events = list(create(strict, CALL_IN_SPACE, stream=True, **options))
    items = [event.item for event in events if event.type.startswith("response.output_item")]
    assert [(item.status, item.namespace, item.name) for item in items] == [
        ("in_progress", "sky", "weather"),
        ("completed", "sky", "weather"),
    ]
    assert events[-1].response.output == [items[-1]]


def test_a_function_beside_a_namespace_has_none(strict: openai.OpenAI) -> None:
    response = create(strict, CALL + CALL_IN_SPACE, tools=[SPACE, TOOL], extra_body=NO_THINKING)
    assert [item.to_dict().get("namespace", "absent") for item in response.output] == ["absent", "sky"]


@pytest.mark.parametrize("as_sent_back", ["as it came", "by the client", "by Codex"])
def test_items_of_an_answer_are_taken_back_whole(
    strict: openai.OpenAI, parsing_server: ServerProcess, as_sent_back: str
) -> None:
    question = says(f"<think>I ask.</think>Wait.{CALL_IN_SPACE}")
    response = strict.responses.create(
        model="default", input=question, tools=[SPACE], include=["reasoning.encrypted_content"]
    )
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    items = [item.model_dump() if as_sent_back == "by the client" else item.to_dict() for item in response.output]
    assert items[0].get("encrypted_content") is None
    if as_sent_back == "by Codex":
        items[0] = {**items[0], "encrypted_content": None}
    call: Any = response.output[2]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "[[It rains.]]"}
    second = strict.responses.create(model="default", input=[*question, *items, output], tools=[SPACE])  # type: ignore[list-item]
    assert second.output_text == "It rains." and second.usage is not None
    chat_call = {"id": call.call_id, "type": "function"}
    chat_call["function"] = {"name": "sky__weather", "arguments": call.arguments}
    functions = [{key: tool[key] for key in ("name", "description", "parameters", "strict")} for tool in SPACE["tools"]]
    functions = [{**function, "name": f"sky__{function['name']}"} for function in functions]
    functions[0]["description"] = "Functions sky__*: about the sky\n\nthe weather"
    chat = {
        "messages": [
            *question,
            {"role": "assistant", "reasoning_content": "I ask.", "content": "Wait.", "tool_calls": [chat_call]},
            {"role": "tool", "tool_call_id": call.call_id, "content": "[[It rains.]]"},
        ],
        "tools": [{"type": "function", "function": function} for function in functions],
    }
    usage = parsing_server.post("/v1/chat/completions", chat).json()["usage"]
    assert second.usage.input_tokens == usage["prompt_tokens"]


def test_without_a_choice_of_tools_the_text_is_text(strict: openai.OpenAI) -> None:
    response = create(strict, CALL, tools=[TOOL], tool_choice="none", extra_body=NO_THINKING)
    assert [item.type for item in response.output] == ["message"]
    assert response.output_text == '{"name": "weather", "arguments": {"city": "Oslo"}}', "markers are special tokens"


def test_the_beta_client_gets_the_same_answers(strict: openai.OpenAI) -> None:
    options: Any = {"model": "default", "input": says(f"Hello.{CALL}"), "tools": [TOOL], "extra_body": NO_THINKING}
    whole = strict.beta.responses.create(**options, betas=["responses_multi_agent=v1"])
    assert [item.type for item in whole.output] == ["message", "function_call"] and whole.status == "completed"
    events = list(strict.beta.responses.create(**options, stream=True))
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    assert [item.type for item in events[-1].response.output] == ["message", "function_call"]
