# SPDX-License-Identifier: Apache-2.0
"""Without a configured tool parser, a server reads calls as its chat template writes them, if that is in one way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from fastdeploy.config.server_config import ServerConfig
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.tool_formats import TOOL_CALL_FORMATS
from fastdeploy.detokenize.chat_template import ChatTemplates
from fastdeploy.detokenize.template_renderer import template_traits
from fastdeploy.entrypoints.openai.own_templates import own_traits
from fastdeploy.entrypoints.openai.protocol import ChatCompletionRequest
from fastdeploy.entrypoints.openai.tool_choice import tool_use
from fastdeploy.entrypoints.openai.tool_parser_choice import ToolParserChoice, choose_tool_parser
from tests.entrypoints.chat_server import TEMPLATE, chat_server, says

LIST, LIST_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
HERMES = """{{- '\\n<tool_call>\\n{"name": "' }}{{- f.name }}{{- '", "arguments": ' }}
{%- if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}
{{- '}\\n</tool_call>' }}"""
CODER = """{{- '<tool_call>\\n<function=' + f.name + '>\\n' }}{% for key, value in f.arguments.items() %}
{{- '<parameter=' + key + '>\\n' }}{{ value + '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}"""
AS_TEXT: Any = {"shows_tools": False, "writes_calls": False, "writes_results": False}
CALLS = {
    "hermes": HERMES,
    "hermes, as one object": '<tool_call>\n{{ {"name": f.name, "arguments": f.arguments} | tojson }}\n</tool_call>',
    "qwen3_coder": CODER,
    "glm45": """{{ '\n<tool_call>' + f.name }}
{% set args = f.arguments %}{% for k, v in args.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v }}</arg_value>
{% endfor %}</tool_call>""",
    "glm45, on one line": "<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>"
    "<arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>",
    "pythonic": "[{{ f.name + '(' }}{% for key in f.arguments %}{{ key + '=' }}{{ f.arguments[key] }}{% endfor %})]",
    "llama3_json": """{{- '{"name": "' + f.name + '", ' }}{{- '"parameters": ' }}{{ f.arguments | tojson }}{{ '}' }}""",
    "deepseek_v3": f"{LIST}{CALL}{{{{ call.type + '{SEP}' + f.name + '\\n' + '```json\\n' + f.arguments + '\\n```' }}}}"
    f"{CALL_END}{LIST_END}",
    "deepseek_v31": f"{{{{ '{LIST}{CALL}' + f.name + '{SEP}' + f.arguments + '{CALL_END}' }}}}{LIST_END}",
}
"""What a template writes for a call of the function `f`, by the format, in the ways of published templates."""


SHOWN = "{{ tools | tojson if tools else '' }}"


def template(*calls: str, shown: str = SHOWN) -> str:
    return (
        shown + "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% for call in m.tool_calls or [] %}"
        "{% set f = call.function %}" + "".join(calls) + "{% endfor %}{% endfor %}"
    )


def choose(template: str, configured: str = "auto") -> ToolParserChoice:
    return choose_tool_parser(configured, template_traits(template, {}))


@pytest.mark.parametrize("name", CALLS)
def test_format_in_which_the_template_writes_calls_is_found(name: str) -> None:
    assert choose(template(CALLS[name])) == ToolParserChoice(name.partition(",")[0], is_found=True)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "pythonic", "llama3_json", "deepseek_v31"])
def test_format_is_found_where_it_is_not_written_by_default(name: str) -> None:
    hidden = "{% if mode is defined %}" + CALLS[name] + "{% endif %}"
    assert choose(template(hidden)) == ToolParserChoice(name, is_found=True, writes_calls=False)


def test_template_for_tools_and_the_server_s_own_are_preferred() -> None:
    templates = ChatTemplates({"default": template(HERMES), "tool_use": template(CODER)}, {})
    assert choose_tool_parser("auto", own_traits(templates, None)).name == "qwen3_coder"
    assert choose_tool_parser("auto", own_traits(templates, "default")).name == "hermes"
    assert choose_tool_parser("auto", own_traits(templates, template(CALLS["pythonic"]))).name == "pythonic"


@pytest.mark.parametrize(
    "template",
    [
        template("CALL {{ f.name }}"),
        template("<tool_call>{{ f.name }}</tool_call>"),
        SHOWN + "write <tool_call>{ or <function= or [f(x)]{{ messages[0].content }}",
        "{% for tool in tools or messages %}{{ tool | tojson }}{% endfor %}",  # as OpenAI writes tools and calls
        "{{ raise_exception('no') }}",
    ],
)
def test_template_without_a_complete_call_decides_nothing(template: str) -> None:
    choice = choose(template)
    assert (choice.name, choice.candidates, choice.shows_tools) == ("", (), True)
    assert choose_tool_parser("auto", None) == ToolParserChoice()


def test_template_that_cannot_be_compiled_decides_nothing() -> None:
    assert own_traits(ChatTemplates({"default": "{% if %}"}, {}), None) is None
    assert own_traits(ChatTemplates({}, {}), None) is None


def test_template_that_rejects_calls_when_it_writes_them_in_a_branch_is_read() -> None:
    rejects = "{% if messages | selectattr('tool_calls', 'defined') | list %}{{ raise_exception('no') }}{% endif %}"
    assert choose(rejects + template(CODER)).name == "qwen3_coder"


@pytest.mark.parametrize(
    ("calls", "configured", "expected"),
    [
        ("", "auto", ToolParserChoice("hermes", **AS_TEXT)),
        ("", "pythonic", ToolParserChoice("pythonic", **AS_TEXT)),
        (
            "CALL {{ f.name }}",
            "auto",
            ToolParserChoice("hermes", **AS_TEXT),
        ),
        (CALLS["deepseek_v3"], "auto", ToolParserChoice("deepseek_v3", is_found=True, shows_tools=False)),
        (CALLS["deepseek_v3"], "deepseek-r1", ToolParserChoice("deepseek-r1", shows_tools=False)),
        (
            CALLS["glm45"],
            "hermes",
            ToolParserChoice("hermes", **AS_TEXT),
        ),
        (CODER + HERMES, "auto", ToolParserChoice("hermes", is_found=True, shows_tools=False)),
    ],
)
def test_model_whose_template_shows_no_tools_writes_its_calls_or_those_of_hermes(
    calls: str, configured: str, expected: ToolParserChoice
) -> None:
    assert choose(template(calls, shown=""), configured) == expected


def test_template_with_two_formats_decides_nothing() -> None:
    both = choose(template("{% if xml is defined %}" + CODER + "{% else %}" + HERMES + "{% endif %}"))
    assert both == ToolParserChoice(candidates=("hermes", "qwen3_coder"))


def test_configured_parser_is_taken_whatever_the_template() -> None:
    assert choose(template(HERMES), "llama4_json") == ToolParserChoice("llama4_json")
    assert ServerConfig().tool_call_parser == "auto"


def test_unknown_format_is_an_error_that_names_the_flag_and_the_candidates() -> None:
    body = ChatCompletionRequest(tools=[{"type": "function", "function": {"name": "f"}}])

    def refused(choice: ToolParserChoice) -> str:
        with pytest.raises(InvalidRequestError) as caught:
            tool_use(body, choice)
        assert caught.value.field == "tool_choice"
        return caught.value.message

    assert refused(ToolParserChoice(candidates=("hermes", "glm45"))) == (
        "auto needs a server with --tool-call-parser, because its chat template has calls in several formats: "
        "expected one of hermes, glm45; required needs none"
    )
    assert refused(ToolParserChoice()) == (
        "auto needs a server with --tool-call-parser, because its chat template has no call in a known format: "
        "expected one of hermes, qwen3_coder, glm45, pythonic, llama3_json, deepseek_v3, deepseek_v31; "
        "required needs none"
    )
    assert {"hermes", "deepseek_v31"} <= set(TOOL_CALL_FORMATS)


def test_server_names_the_format_at_its_start_and_reads_it(tmp_path: Path) -> None:
    tool: Any = {"type": "function", "function": {"name": "now"}}
    old = "CALL {{ call.function.name }} {{ call.function.arguments.city }}"
    assert old in TEMPLATE
    own = TEMPLATE.replace(old, "{% set f = call.function %}" + HERMES)
    with chat_server(tmp_path / "model", "--chat-template", own) as server:
        assert "  tool calls   hermes, found in the chat template\n" in server.stdout
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
        text = 'So <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        response = client.chat.completions.create(model="default", messages=says(text), tools=[tool])
    message = response.choices[0].message
    assert message.content == "So"
    assert [call.function.name for call in message.tool_calls or []] == ["now"]
