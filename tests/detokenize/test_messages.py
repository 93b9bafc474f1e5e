# SPDX-License-Identifier: Apache-2.0
"""What a template is given for messages without content, with reasoning, and of roles that only it knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.detokenize.chat_template import ChatTemplates, Conversation
from fastdeploy.detokenize.messages import check_messages
from fastdeploy.detokenize.template_process import TemplateProcess
from tests.detokenize.published_templates import DEEPSEEK_V3, DEEPSEEK_V3_0324, LLAMA32, QWEN3

DEMO = json.loads(Path("fastdeploy/assets/demo_model/tokenizer_config.json").read_text())["chat_template"]
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
HI: dict[str, Any] = {"role": "user", "content": "hi"}


def render(template: str, *messages: dict[str, Any], **options: Any) -> str:
    conversation = Conversation(check_messages(messages), **options)
    return ChatTemplates({"default": template}, {"bos_token": "<s>"}).render(conversation, template)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN3, '<user>hi<assistant><call>f {"a": "é"}<tool>rain<assistant>It rains.<user>hi'),
        (
            LLAMA32,
            '<s><system><user>hi<assistant>{"name": "f", "parameters": {"a": "é"}}<ipython>"rain"'
            "<assistant>It rains.<user>hi",
        ),
        (
            DEEPSEEK_V3,
            '<s><user>hi<assistant><call>function f ```{"a": "é"}```<tool>rain<end of outputs>It rains.<user>hi',
        ),
        (
            DEEPSEEK_V3_0324,
            '<s><user>hi<assistant><calls><call>function f ```{"a": "é"}```<tool>rain<end of outputs>It rains.<user>hi',
        ),
        (DEMO, "<s>hi\n\n\n\nrain\n\nIt rains.\n\nhi"),
    ],
    ids=["Qwen3", "Llama 3.2", "DeepSeek V3", "DeepSeek V3 0324", "demo"],
)
@pytest.mark.parametrize("content", [{"content": None}, {}], ids=["null", "absent"])
def test_second_turn_of_a_tool_conversation_is_rendered(template: str, expected: str, content: dict[str, Any]) -> None:
    """An agent sends the assistant's calls back as it got them, with content null, or leaves the content out."""
    calls = {"role": "assistant", **content, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
    assert render(template, HI, calls, result, {"role": "assistant", "content": "It rains."}, HI) == expected


@pytest.mark.parametrize(
    ("expression", "is_none"),
    [
        ("{% if m.content is none %}{% endif %}", True),
        ("{% if m['content'] is not none %}{% endif %}", True),
        ("{% set c = m.get('content') %}{% if c == none %}{% endif %}", True),
        ("{% set c = m.content %}{% set d = c %}{% if none != d %}{% endif %}", True),
        ("{% macro f(content) %}{{ content is none }}{% endmacro %}", True),
        ("{% if m.reasoning_content is none %}{{ m.content }}{% endif %}", False),
        ("{% if m.tool_calls is none and m.content == '' %}{% endif %}", False),
        ("{% if m.content is string %}{% endif %}", False),
        ("{# m.content is none #}{% if 'm.content is none' %}{% endif %}", False),
        ("{% set content_type = m.type %}{% if content_type is none %}{% endif %}", False),
    ],
)
def test_missing_content_is_none_only_for_templates_that_compare_it_with_none(expression: str, is_none: bool) -> None:
    template = "{% for m in messages %}" + expression + "{{ m.content | tojson }}{% endfor %}"
    assert render(template, {"role": "assistant"}) == ("null" if is_none else '""')
    assert render(template, {"role": "assistant", "content": ""}) == '""'


def test_template_of_a_request_gets_missing_content_as_the_server_s_template_does() -> None:
    process = TemplateProcess()
    try:
        messages = check_messages([{"role": "assistant"}])
        assert process.render("{{ messages[0].content | tojson }}", messages, {}) == '""'
        assert process.render("{{ messages[0].content is none }}", messages, {}) == "True"
    finally:
        process.close()


@pytest.mark.parametrize(
    "given", [{"reasoning": "hm"}, {"reasoning_content": "hm"}, dict.fromkeys(("reasoning", "reasoning_content"), "hm")]
)
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_template_finds_the_reasoning_under_both_names(given: dict[str, str], name: str) -> None:
    assert render("{{ messages[0]." + name + " }}", {"role": "assistant", **given}) == "hm"


def test_reasoning_that_differs_from_reasoning_content_is_refused() -> None:
    message = {"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b"}
    with pytest.raises(InvalidRequestError, match=r"^messages\[1\].reasoning: differs from reasoning_content"):
        check_messages([HI, message])
    with pytest.raises(InvalidRequestError, match=r"^messages\[0\].reasoning: expected text, got 3"):
        check_messages([{"role": "assistant", "reasoning": 3}])


SOME_ROLES = "{% for m in messages if m.role != 'critic' %}[{{ m.role }}] {{ m.content | trim }}{% endfor %}"


def test_other_roles_are_handed_to_the_template() -> None:
    messages = [{"role": "latest_reminder", "content": " be\n"}, {"role": "ipython", "content": '"1"'}, HI]
    assert render(SOME_ROLES, *messages) == '[latest_reminder] be[ipython] "1"[user] hi'
    assert render(LLAMA32, *messages[1:]) == '<s><system><ipython>"\\"1\\""<user>hi'
    assert render(SOME_ROLES, {"role": "developer", "content": "be"}) == "[system] be"


@pytest.mark.parametrize("content", ["h", "", " hi", "so"])
def test_role_that_the_template_leaves_out_is_refused_even_if_its_text_is_elsewhere(content: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(SOME_ROLES, HI, {"role": "ipython", "content": "so"}, {"role": "critic", "content": content})
    message = "the chat template 'default' leaves out messages of role 'critic'; send them as system or user"
    assert str(caught.value) == f"messages[2].role: {message}"


def test_role_is_checked_in_a_conversation_that_is_continued() -> None:
    last = {"role": "assistant", "content": "Well, "}
    options = {"add_generation_prompt": False, "continue_final_message": True}
    template = "{% for m in messages if m.role != 'critic' %}[{{ m.role }}] {{ m.content }}{% endfor %} end"
    assert render(template, {"role": "judge", "content": "x"}, last, **options) == "[judge] x[assistant] Well, "
    with pytest.raises(InvalidRequestError, match="leaves out messages of role 'critic'"):
        render(template, {"role": "critic", "content": "x"}, last, **options)


def test_other_roles_do_not_change_the_limit_of_the_text() -> None:
    template, conversation = "{{ messages[0].content }}", Conversation([{"role": "critic", "content": "x" * 10}])
    assert ChatTemplates({}, {}).render(conversation, template, max_length=10) == "x" * 10
    with pytest.raises(InvalidRequestError, match="the chat template renders more than 9 characters"):
        ChatTemplates({}, {}).render(conversation, template, max_length=9)
