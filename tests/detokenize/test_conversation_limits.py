# SPDX-License-Identifier: Apache-2.0
"""Conversations, tools and templates have limits of number, length, depth and time, and only valid Unicode leaves."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.json_types import json_type
from fastdeploy.detokenize import template_renderer
from fastdeploy.detokenize.chat_template import LOCAL_RENDERER, ChatTemplates, Conversation
from fastdeploy.detokenize.messages import check_messages, check_tools
from fastdeploy.detokenize.template_process import TemplateProcess
from fastdeploy.detokenize.template_renderer import render_template
from tests.core.test_json_types import nested
from tests.detokenize.tokenizers_for_tests import CHAT_TEMPLATE

USER = {"role": "user", "content": "hi"}
LOOPS = "{% for i in range(300) %}{% for j in range(300) %}{{ 'x' }}{% endfor %}{% endfor %}{{ messages[0].content }}"


def refused(check: Any, value: Any) -> str:
    """Return the error of a check."""
    with pytest.raises(InvalidRequestError) as caught:
        check(value)
    return str(caught.value)


def make_tools(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{i}"}} for i in range(count)]


def test_conversation_has_at_most_16384_messages_parts_and_calls() -> None:
    assert len(check_messages([USER] * 16384)) == 16384
    error = "messages: at most 16384 messages, parts and tool calls in all, got"
    assert refused(check_messages, [USER] * 16385) == f"{error} 16385"
    part = {"type": "text", "text": "a"}
    assert len(check_messages([{"role": "user", "content": [part] * 16383}])[0]["content"]) == 16383
    assert refused(check_messages, [{"role": "user", "content": [part] * 16384}]) == f"{error} 16385"
    call = {"function": {"name": "f"}}
    messages = [USER, {"role": "assistant", "tool_calls": [call] * 16383}]
    assert refused(check_messages, messages) == f"{error} 16385"


def test_request_has_at_most_1024_tools() -> None:
    assert len(check_tools(make_tools(1024))) == 1024
    assert refused(check_tools, make_tools(40_000)) == "tools: at most 1024 tools, got 40000"
    assert refused(check_tools, [*make_tools(5), *make_tools(1)]) == "tools[5].function.name: 'f0' is not unique"


def test_tools_and_structured_values_of_messages_are_limited_in_length() -> None:
    [tool] = make_tools(1)
    tool["function"]["description"] = "x" * 2**20
    assert refused(check_tools, [tool]) == "tools: expected at most 1048576 characters of JSON"
    message = {"role": "tool", "content": {"a": "x" * 2**20}}
    assert refused(check_messages, [message]) == "messages[0].content: expected at most 1048576 characters of JSON"
    assert check_messages([{"role": "user", "content": [{"type": "text", "text": "é" * 2**21}]}])


@pytest.mark.parametrize("depth", [65, 960, 975, 985, 1100])
def test_deep_values_are_refused_wherever_they_are(depth: int) -> None:
    deep = nested(depth)
    call = {"function": {"name": "f", "arguments": {"a": deep}}}
    for message in (
        {**USER, "further": deep},
        {"role": "tool", "content": {"a": deep}},
        {"role": "assistant", "tool_calls": [call]},
    ):
        assert "is nested too deeply: expected at most 64 levels" in refused(check_messages, [USER, message])
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": deep}}}}
    assert refused(check_tools, [tool]).startswith("tools: is nested too deeply")
    assert refused(check_messages, [{"role": deep}]).endswith(f"got {json_type(deep)}")


def test_lone_surrogates_in_messages_and_tools_are_refused_by_field() -> None:
    error = r"expected valid Unicode, got the lone surrogate '\ud800' at character 1"
    assert refused(check_messages, [{"role": "user", "content": "a\ud800"}]) == f"messages[0].content: {error}"
    part = {"type": "text", "text": "a\ud800"}
    assert refused(check_messages, [USER, {"role": "user", "content": [part]}]) == f"messages[1].content: {error}"
    assert refused(check_messages, [{**USER, "a\ud800": 1}]) == f"messages[0]: {error}"
    tool = {"type": "function", "function": {"name": "f", "description": "a\ud800"}}
    assert refused(check_tools, [tool]) == f"tools: {error}"


def arguments_of(text: str) -> Any:
    """Return what a template finds as the arguments of a call."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": text}}]
    template = "{% set a = messages[0].tool_calls[0].function.arguments %}{{ a is mapping }} {{ a | tojson }}"
    return render_template(template, [{"role": "assistant", "tool_calls": calls}], {})


@pytest.mark.parametrize(
    "text", ['{"a":' * 980 + "1" + "}" * 980, '{"a":' * 65 + "1" + "}" * 65, '{"a": 1', '{"a": NaN}']
)
def test_arguments_that_cannot_be_written_again_are_printed_as_they_were_sent(text: str) -> None:
    assert arguments_of(text) == "True " + text
    assert arguments_of('{"a": [1]}') == 'True {"a": [1]}'


def test_lone_surrogates_in_arguments_become_escapes() -> None:
    assert arguments_of('{"a": ["\\ud800"], "\\udfff": 1}') == 'True {"a": ["\\\\ud800"], "\\\\udfff": 1}'


@pytest.mark.parametrize(
    "template",
    ['a{{ "\\ud800" }}', "{{ '%c' | format(55296) }}", "{{ messages[0].content[0] ~ '\\udc00' }}"],
)
def test_template_that_prints_a_part_of_a_character_is_refused(template: str) -> None:
    process = TemplateProcess()
    for renderer in (LOCAL_RENDERER, process):
        with pytest.raises(InvalidRequestError, match="messages: expected valid Unicode, got the lone surrogate"):
            ChatTemplates({}, {}).render(Conversation([USER]), template, renderer)
    process.close()


@pytest.mark.parametrize(
    "template",
    [
        '{{ raise_exception("a\\ud800" * 10000) }}',
        "{% set n = namespace(x=[]) %}{% for i in range(2000) %}{% set n.x = [n.x] %}{% endfor %}"
        "{{ raise_exception(n.x) }}",
        "{% set n = namespace(x=[]) %}{% for i in range(2000) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=[]) %}{% for i in range(2000) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x | tojson }}",
        "{{ messages | groupby }}",
        "{{ '%d' | format('x') }}",
    ],
)
def test_errors_of_templates_are_short_and_valid_unicode(template: str) -> None:
    process = TemplateProcess()
    for render in (render_template, process.render):
        with pytest.raises(InvalidRequestError, match="messages: the chat template") as caught:
            render(template, [USER], {})
        assert len(caught.value.message.encode()) < 5000
    process.close()


def test_template_stops_when_it_has_printed_the_limit() -> None:
    process, conversation = TemplateProcess(), Conversation([USER])
    for renderer in (LOCAL_RENDERER, process):
        assert len(ChatTemplates({}, {}).render(conversation, LOOPS, renderer, max_length=90_002)) == 90_002
        with pytest.raises(InvalidRequestError, match="messages: the chat template renders more than 90001 characters"):
            ChatTemplates({}, {}).render(conversation, LOOPS, renderer, max_length=90_001)
    process.close()


def test_rendering_has_a_limit_of_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_renderer, "MAX_CPU_S", 0.0)
    with pytest.raises(InvalidRequestError, match="rendering takes more than 0 s of processor time"):
        render_template(LOOPS, [USER], {})


def test_longest_conversation_renders_within_the_limits() -> None:
    text = render_template(CHAT_TEMPLATE, check_messages([USER] * 16384), {"bos_token": "<s>"})
    assert text == "<s>" + "user: hi\n" * 16384


def test_input_of_a_client_s_template_is_limited_in_length() -> None:
    message = {"role": "user", "content": "x" * 2**22}
    with pytest.raises(InvalidRequestError, match="messages: expected at most 4194304 characters of JSON"):
        TemplateProcess().render("x", [message], {})
