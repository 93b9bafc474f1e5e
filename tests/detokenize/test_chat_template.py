# SPDX-License-Identifier: Apache-2.0
"""Chat templates: which one is used, what it can access, and the limits for templates of clients."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.detokenize import template_process
from fastdeploy.detokenize.chat_template import ChatTemplates, Conversation
from fastdeploy.detokenize.template_process import TemplateProcess

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
TRIMMING = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TEMPLATES = ChatTemplates({"default": "plain", "tool_use": "tools", "rag": "documents"}, {"eos_token": "</s>"})


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    template_process = TemplateProcess()
    yield template_process
    template_process.close()


@pytest.mark.parametrize(
    ("template", "has_tools", "expected"),
    [
        (None, False, "plain"),
        (None, True, "tools"),
        ("rag", True, "documents"),
        ("{{ other }}", True, "{{ other }}"),
    ],
)
def test_template_is_the_given_one_or_the_tokenizer_s_for_tools(
    template: str | None, has_tools: bool, expected: str
) -> None:
    assert TEMPLATES.select(template, has_tools) == expected


def test_conversation_with_tools_uses_the_default_template_without_a_special_one() -> None:
    assert ChatTemplates({"default": "plain"}, {}).select(None, True) == "plain"
    with pytest.raises(InvalidRequestError, match="no chat template"):
        ChatTemplates({}, {}).select(None, False)


def render(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return TEMPLATES.render(Conversation(messages, **options), template)


def test_template_reads_tools_special_tokens_and_variables() -> None:
    template = "{{ messages[0].content }} {{ tools[0].function.name }} {{ eos_token }} {{ enable_thinking }} "
    text = render(template + "{{ tools | tojson }}", [USER], tools=[TOOL], variables={"enable_thinking": False})
    assert text.startswith('hi now </s> False [{"type": "function"')
    assert render("{{ messages[0].content }} {{ tools is none }}", [USER]) == "hi True"


@pytest.mark.parametrize(
    "template",
    [
        "{{ call.arguments | tojson }}",
        "{{ call.arguments if call.arguments is string else call.arguments | tojson }}",
        "{{ '' + call.arguments }}",
        "{{ call.arguments + '' }}",
        "{{ call.arguments ~ '' }}",
        "{{ call.arguments }}",
        '{"a": {{ call.arguments.a }}}',
        '{% for key, value in call.arguments.items() %}{"{{ key }}": {{ value }}}{% endfor %}',
    ],
)
def test_arguments_of_earlier_calls_can_be_read_as_mapping_or_as_text(template: str) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    assert render("{% set call = messages[0].tool_calls[0].function %}" + template, [message]) == '{"a": 1}'


@pytest.mark.parametrize("text", ['{"a": ', "Beijing", "[1]", "3", "null", '"text"', "", "{'a': 1}", "{}}"])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ a }}", "{}"),
        ("{{ a | tojson }}", "{}"),
        ("{{ a if a is string else a | tojson }}", "{}"),
        ("{{ '' + a }}", "{}"),
        ("{{ a ~ '' }}", "{}"),
        ("{% for key, value in a.items() %}<{{ key }}>{{ value }}{% endfor %}", "<arguments>{}"),
        ("{% for key in a %}<{{ key }}>{{ a[key] }}{% endfor %}", "<arguments>{}"),
        ("{% for key, value in a | dictsort %}<{{ key }}>{{ value }}{% endfor %}", "<arguments>{}"),
        ("{{ a is mapping }}", "True"),
    ],
)
def test_arguments_that_are_no_object_are_printed_as_they_were_sent(template: str, expected: str, text: str) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": text}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    source = "{% set a = messages[0].tool_calls[0].function.arguments %}" + template
    assert render(source, [message]) == expected.format(text)


def test_continued_message_ends_the_prompt_with_its_last_character() -> None:
    messages = [USER, {"role": "assistant", "content": "Well, "}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(TRIMMING, messages, **options) == "[user] hi</s>[assistant] Well, "
    with pytest.raises(InvalidRequestError, match="omits the last message"):
        render("{{ messages[0].content }}", messages, **options)


def test_process_renders_as_this_process_does(process: TemplateProcess) -> None:
    conversation = Conversation([USER, {"role": "assistant", "content": "é🙂\n"}], variables={"a": [1, None]})
    template = TRIMMING + "{{ a }} {{ eos_token }}"
    assert TEMPLATES.render(conversation, template, process) == TEMPLATES.render(conversation, template)
    with pytest.raises(InvalidRequestError, match="chat_template: cannot be compiled"):
        TEMPLATES.render(conversation, "{% if %}", process)
    with pytest.raises(InvalidRequestError, match="messages: the chat template rejects them: no"):
        TEMPLATES.render(conversation, "{{ raise_exception('no') }}", process)


HOSTILE = {
    "a loop longer than the sandbox allows": "{% for i in range(10**9) %}x{% endfor %}",
    "loops within loops": "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "a large number": "{{ 9 ** (9 ** 9) }}",
    "a large text": "{{ 'x' * 10 ** 10 }}",
    "a text that doubles": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x~n.x %}{% endfor %}",
    "padding": "{{ 'x' | center(10 ** 10) }}",
    "much output": "{% for i in range(9999) %}{% for j in range(99) %}{{ 'x' * 99 }}{% endfor %}{% endfor %}",
    "a long template": "x" * (2**20 + 1),
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "deep nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "a change of the messages": "{{ messages.append(1) }}",
    "a file": "{% include '/etc/passwd' %}",
}
INTROSPECTIVE = {
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attributes by filter": "{{ (messages | attr('__class__')).mro() }}",
    "attributes by format": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "globals of a helper": "{{ raise_exception.__globals__ }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m.__globals__ }}{{ m.__init__ }}{{ cycler.__init__ }}",
}


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_hostile_template_is_refused_and_the_next_one_is_rendered(process: TemplateProcess, template: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"chat_template|messages"):
        process.render(template, [USER], {})
    assert process.render("{{ messages[0].content }}", [USER], {}) == "hi"


@pytest.mark.parametrize("template", INTROSPECTIVE.values(), ids=INTROSPECTIVE)
def test_template_cannot_access_the_interpreter(process: TemplateProcess, template: str) -> None:
    try:
        assert process.render(template, [USER], {}) == ""
    except InvalidRequestError as error:
        assert "unsafe" in error.message or "undefined" in error.message


def test_environment_of_the_process_has_no_key_of_the_server(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FD_API_KEY", "secret")
    fresh = TemplateProcess()
    try:
        fresh.render("x", [], {})
        assert fresh._process is not None
        with open(f"/proc/{fresh._process.pid}/environ", "rb") as file:
            assert b"secret" not in file.read()
    finally:
        fresh.close()


def test_process_ends_with_its_parent() -> None:
    script = (
        "import os; from fastdeploy.detokenize.template_process import TemplateProcess; process = TemplateProcess();"
        "process.render('x', [], {}); print(process._process.pid, flush=True); input(); os._exit(0)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    renderer = os.pidfd_open(int(parent.stdout.readline()))
    try:
        assert select.select([renderer], [], [], 0)[0] == []
        parent.communicate("\n", timeout=60)
        assert select.select([renderer], [], [], 60)[0] == [renderer]
    finally:
        os.close(renderer)


def test_message_states_the_limits(process: TemplateProcess) -> None:
    with pytest.raises(InvalidRequestError, match="more than 2 s of processor time") as caught:
        process.render(HOSTILE["loops within loops"], [USER], {})
    assert caught.value.field == "messages"
    assert template_process.MAX_CPU_S == 2


def test_a_limit_that_a_template_exceeds_when_it_is_probed_is_an_error_of_the_template(
    process: TemplateProcess,
) -> None:
    with pytest.raises(InvalidRequestError, match="makes a value of more than 16777216 characters") as caught:
        process.probe("{{ 'a' * 10**9 }}", {})
    assert caught.value.field == "chat_template"
