# SPDX-License-Identifier: Apache-2.0
"""Chat templates: which one, what they read, and those that a hostile client sends."""

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
OWN = ChatTemplates({"default": "plain", "tool_use": "tools", "rag": "documents"}, {"eos_token": "</s>"})


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    one = TemplateProcess()
    yield one
    one.close()


@pytest.mark.parametrize(
    ("given", "has_tools", "source"),
    [
        (None, False, "plain"),
        (None, True, "tools"),
        ("rag", True, "documents"),
        ("{{ other }}", True, "{{ other }}"),
    ],
)
def test_template_is_the_given_one_or_the_tokenizer_s_for_tools(
    given: str | None, has_tools: bool, source: str
) -> None:
    assert OWN.source(given, has_tools) == source


def test_conversation_with_tools_has_the_default_template_if_there_is_no_other() -> None:
    assert ChatTemplates({"default": "plain"}, {}).source(None, True) == "plain"
    with pytest.raises(InvalidRequestError, match="no chat template"):
        ChatTemplates({}, {}).source(None, False)


def render(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return OWN.render(Conversation(messages, **options), source)


def test_template_reads_tools_special_tokens_and_names() -> None:
    source = "{{ tools[0].function.name }} {{ eos_token }} {{ enable_thinking }} {{ tools | tojson }}"
    text = render(source, [USER], tools=[TOOL], names={"enable_thinking": False})
    assert text.startswith('now </s> False [{"type": "function"')
    assert render("{{ tools is none }}", [USER]) == "True"


@pytest.mark.parametrize(
    "source",
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
def test_arguments_of_earlier_calls_suit_templates_that_read_a_mapping_and_those_that_append_text(source: str) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    assert render("{% set call = messages[0].tool_calls[0].function %}" + source, [message]) == '{"a": 1}'


def test_arguments_that_are_no_object_stay_text() -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": '{"a": '}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    assert render("{{ messages[0].tool_calls[0].function.arguments }}", [message]) == '{"a": '


def test_continued_message_ends_the_prompt_with_its_last_character() -> None:
    messages = [USER, {"role": "assistant", "content": "Well, "}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(TRIMMING, messages, **options) == "[user] hi</s>[assistant] Well, "
    with pytest.raises(InvalidRequestError, match="leaves out the last message"):
        render("{{ messages[0].content }}", messages, **options)


def test_process_renders_as_this_process_does(process: TemplateProcess) -> None:
    conversation = Conversation([USER, {"role": "assistant", "content": "é🙂\n"}], names={"a": [1, None]})
    source = TRIMMING + "{{ a }} {{ eos_token }}"
    assert OWN.render(conversation, source, process.render) == OWN.render(conversation, source)
    with pytest.raises(InvalidRequestError, match="chat_template: cannot be compiled"):
        OWN.render(conversation, "{% if %}", process.render)
    with pytest.raises(InvalidRequestError, match="messages: the chat template refuses them: no"):
        OWN.render(conversation, "{{ raise_exception('no') }}", process.render)


HOSTILE = {
    "a loop longer than the sandbox allows": "{% for i in range(10**9) %}x{% endfor %}",
    "loops within loops": "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "a large number": "{{ 9 ** (9 ** 9) }}",
    "a large text": "{{ 'x' * 10 ** 10 }}",
    "a text that doubles": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x~n.x %}{% endfor %}",
    "padding": "{{ 'x' | center(10 ** 10) }}",
    "much output": "{% for i in range(9999) %}{% for j in range(99) %}{{ 'x' * 99 }}{% endfor %}{% endfor %}",
    "a long source": "x" * (2**20 + 1),
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "deep nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "a change of the messages": "{{ messages.append(1) }}",
    "a file": "{% include '/etc/passwd' %}",
}
CURIOUS = {
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attributes by filter": "{{ (messages | attr('__class__')).mro() }}",
    "attributes by format": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "globals of a helper": "{{ raise_exception.__globals__ }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m.__globals__ }}{{ m.__init__ }}{{ cycler.__init__ }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_hostile_template_is_refused_and_the_next_one_is_rendered(process: TemplateProcess, source: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"chat_template|messages"):
        process.render(source, [USER], {})
    assert process.render("{{ messages[0].content }}", [USER], {}) == "hi"


@pytest.mark.parametrize("source", CURIOUS.values(), ids=CURIOUS)
def test_curious_template_sees_nothing_of_the_interpreter(process: TemplateProcess, source: str) -> None:
    try:
        assert process.render(source, [USER], {}) == ""
    except InvalidRequestError as error:
        assert "unsafe" in error.message or "undefined" in error.message


def test_process_sees_no_key_of_the_server(process: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
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
        "import os; from fastdeploy.detokenize.template_process import TemplateProcess; one = TemplateProcess();"
        "one.render('x', [], {}); print(one._process.pid, flush=True); input(); os._exit(0)"
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


def test_limits_are_said_in_the_message(process: TemplateProcess) -> None:
    with pytest.raises(InvalidRequestError, match="more than 2 s of processor time or 512 MiB") as caught:
        process.render(HOSTILE["loops within loops"], [USER], {})
    assert caught.value.field == "chat_template" and template_process.MAX_CPU_S == 2
