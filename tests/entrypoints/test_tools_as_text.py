# SPDX-License-Identifier: Apache-2.0
"""Models whose chat template shows no tools find them in the system message, and call them in a format that is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from fastdeploy.core.tool_formats import TOOL_CALL_FORMATS
from fastdeploy.detokenize.chat_template import ChatTemplates, Conversation
from fastdeploy.detokenize.messages import check_messages, check_tools
from fastdeploy.detokenize.template_renderer import template_traits
from fastdeploy.entrypoints.openai.parsers.message import Message, MessageParser
from fastdeploy.entrypoints.openai.parsers.registry import FORMATS, get_tool_format
from fastdeploy.entrypoints.openai.tool_parser_choice import ToolParserChoice, choose_tool_parser
from fastdeploy.entrypoints.openai.tools_as_text import tools_as_text
from tests.entrypoints.chat_server import chat_server, rendered, says
from tests.entrypoints.server_process import ServerProcess

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS: list[Any] = [WEATHER, NOW]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'


def generic(name: str) -> ToolParserChoice:
    return ToolParserChoice(name, shows_tools=False, writes_calls=False, writes_results=False)


def prompt(template: str, messages: list[dict[str, Any]], tools: list[Any], configured: str = "auto") -> str:
    choice = choose_tool_parser(configured, template_traits(template, {}))
    text = tools_as_text(choice, check_tools(tools))
    conversation = Conversation(check_messages(messages), add_generation_prompt=False, tools_as_text=text)
    return ChatTemplates({"default": template}, {}).render(conversation, template)


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_tools_follow_the_system_text_in_the_order_of_the_request() -> None:
    text = prompt(CHATML, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}], TOOLS)
    assert text.startswith("<|system|>Be brief.\n\n# Tools\n\n")
    assert f"<tools>\n{json.dumps(WEATHER)}\n{json.dumps(NOW)}\n</tools>" in text
    form = '<tool_call>\n{"name": "<function-name>", "arguments": <args-json-object>}\n</tool_call>'
    assert text.endswith(f"in this form:\n{form}</s>\n<|user|>hi</s>\n")
    assert "# Tools" not in prompt(CHATML, [{"role": "user", "content": "hi"}], [])


def test_template_without_system_messages_gets_the_tools_before_the_first_user_s_text() -> None:
    template = CHATML.replace(
        "{% for", "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{% for"
    )
    text = prompt(template, [{"role": "user", "content": "hi"}], [NOW])
    assert text.startswith("<|user|># Tools\n\n") and text.endswith("</tool_call>\n\nhi</s>\n")


def test_calls_and_results_of_earlier_messages_are_text_even_without_tools_in_the_request() -> None:
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": [call("weather", '{"city": "Łódź"}')]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "dry"}]},
        {"role": "assistant", "content": "No."},
    ]
    responses = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\ndry\n</tool_response>"
    assert prompt(CHATML, messages, []) == (
        f"<|user|>Rain?</s>\n<|assistant|>Let me look.\n{CALL}</s>\n<|user|>{responses}</s>\n<|assistant|>No.</s>\n"
    )


def test_template_that_prints_calls_and_results_keeps_doing_so() -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "<tool_call>\n{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>"
        "{% endfor %}</s>\n{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "tool_calls": [call("now", "{}")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    text = prompt(template, messages, TOOLS)
    assert text.startswith("<|system|># Tools") and text.endswith("</tool_call></s>\n<|tool|>sunny</s>\n")
    assert "<tool_response>" not in text


@pytest.mark.parametrize("name", [name for name in FORMATS if name in TOOL_CALL_FORMATS])
@pytest.mark.parametrize(
    "arguments",
    ['{"city": "Łódź \\"x\\""}', '{"city": "a\\nb", "days": 2, "exact": true}', "{}", '{"city": ["a", null]}'],
)
def test_calls_are_written_as_the_parser_of_their_format_reads_them(name: str, arguments: str) -> None:
    tool_format = get_tool_format(name)
    assert tool_format is not None
    write = tools_as_text(generic(name), []).write_calls
    assert write is not None
    text = write([call("weather", arguments), call("now", "{}")])
    schema = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}}}
    parser = tool_format.make_parser({"weather": schema if "[" not in arguments else {}, "now": {}})
    message = Message()
    message.add(MessageParser(None, parser).push(text, True))
    assert [(one.name, json.loads(one.arguments)) for one in message.calls] == [
        ("weather", json.loads(arguments)),
        ("now", {}),
    ]
    assert not message.content


def test_arguments_that_are_no_object_are_written_as_they_were_sent() -> None:
    hermes, coder = (tools_as_text(generic(name), []).write_calls for name in ("hermes", "qwen3_coder"))
    assert hermes is not None and coder is not None
    assert '"arguments": {"city": }' in hermes([call("weather", '{"city": ')])
    assert "<parameter=arguments>\nBeijing\n</parameter>" in coder([call("weather", "Beijing")])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tools") / "model"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with chat_server(folder, "--chat-template", CHATML) as running:
        yield running


def complete(server: ServerProcess, text: str, **options: Any) -> Any:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    arguments: dict[str, Any] = {"model": "default", "messages": says(text), "tools": TOOLS, **options}
    return client.chat.completions.create(extra_body={"return_token_ids": True}, **arguments)


def test_server_says_at_its_start_that_the_template_shows_no_tools(server: ServerProcess) -> None:
    line = "  tool calls   hermes; the chat template shows no tools, so the system message describes them\n"
    assert line in server.stdout


def test_auto_needs_no_flag_and_shows_the_model_the_tools(server: ServerProcess, folder: Path) -> None:
    response = complete(server, f"Let me look.\n{CALL}")
    message = response.choices[0].message
    assert message.content == "Let me look."
    assert [(one.function.name, one.function.arguments) for one in message.tool_calls] == [
        ("weather", '{"city": "Łódź"}')
    ]
    assert json.dumps(WEATHER) in rendered(folder, response.choices[0].prompt_token_ids)
    without = complete(server, "hi", tool_choice="none")
    assert "weather" not in rendered(folder, without.choices[0].prompt_token_ids)


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "function": {"name": "weather"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [WEATHER]}},
    ],
    ids=["required", "named", "allowed"],
)
def test_required_calls_have_the_same_form_and_the_model_sees_them(
    server: ServerProcess, folder: Path, choice: Any
) -> None:
    response = complete(server, CALL, tool_choice=choice)
    [made] = response.choices[0].message.tool_calls
    assert (made.function.name, json.loads(made.function.arguments)) == ("weather", {"city": "Łódź"})
    assert "# Tools" in rendered(folder, response.choices[0].prompt_token_ids)


def test_whole_conversation_with_a_result_is_answered(server: ServerProcess, folder: Path) -> None:
    answer = complete(server, CALL).choices[0].message
    result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "sunny"}
    messages = [*says(CALL), answer.model_dump(exclude_none=True), result, *says("It is sunny.")]
    response = complete(server, "", messages=messages)
    assert response.choices[0].message.content == "It is sunny."
    prompt = rendered(folder, response.choices[0].prompt_token_ids)
    assert f"<|assistant|>{CALL}</s>\n<|user|><tool_response>\nsunny\n</tool_response></s>\n<|user|>[[It" in prompt
