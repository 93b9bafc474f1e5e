# SPDX-License-Identifier: Apache-2.0
"""Schemas of tools, and of answers beside them, are followed as those of `response_format` are, at every endpoint."""

from __future__ import annotations

import json
import logging
from typing import Any

import llguidance
import pytest

from fastdeploy.core import schema_dialect
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.entrypoints.openai.parsers.registry import FORMATS
from fastdeploy.entrypoints.openai.parsers.tool_grammar import ToolCallGrammar
from tests.entrypoints.server_process import ServerProcess
from tests.structured_output.schema_grammars import allowed_texts

INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
VALUES = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=p>\n{}\n</parameter>\n</function>\n</tool_call>",
    "hermes": '<tool_call>\n{{"name": "f", "arguments": {{"p": {}}}}}\n</tool_call>',
    "pythonic": "[f(p={})]",
}


def object_of(part: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"p": part}, "required": ["p"], "additionalProperties": False}


def allowed_values(format_name: str, part: Any, values: list[str]) -> list[str]:
    """Return the values that a parameter with this schema may have in a required call."""
    texts = {VALUES[format_name].format(value): value for value in values}
    grammar = ToolCallGrammar(FORMATS[format_name], {"f": object_of(part)}, {}).required()
    return [texts[text] for text in allowed_texts(list(texts), grammar=grammar)]


@pytest.mark.parametrize("format_name", VALUES)
def test_numbers_of_parameters_are_exact(format_name: str) -> None:
    values = [str(n) for n in (2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 5)]
    assert allowed_values(format_name, INT64, values) == [str(2**63 - 1), str(-(2**63)), "5"]
    assert allowed_values(format_name, {"const": 2**53 + 1}, [str(2**53), str(2**53 + 1)]) == [str(2**53 + 1)]
    lists = [f"[{2**63 - 1}, 5]", f"[{2**63}]", "[]"]
    assert allowed_values(format_name, {"type": "array", "items": INT64}, lists) == [lists[0], lists[2]]


def test_formats_and_patterns_of_parameters_mean_the_same() -> None:
    dates = ['"2024-02-29"', '"2023-02-29"']
    for format_name in ("hermes", "pythonic"):
        assert allowed_values(format_name, {"type": "string", "format": "date"}, dates) == dates[:1]
        assert allowed_values(format_name, {"type": "string", "format": "path"}, ['"/a"']) == ['"/a"']
        assert allowed_values(format_name, {"type": "string", "pattern": "^.$"}, ['"a"', '"\u2028"']) == ['"a"']
    assert allowed_values("pythonic", {"type": "string", "format": "path"}, ["'/a'"]) == ["'/a'"]


def test_names_in_arguments_cannot_be_escaped() -> None:
    nested = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    for format_name in VALUES:
        values = ['{"a": 1}', r'{"\u0061": "x"}']
        assert allowed_values(format_name, nested, values) == values[:1]


def test_unknown_formats_of_parameters_are_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema_dialect, "_noted_formats", set())
    with caplog.at_level(logging.INFO, "fastdeploy.server"):
        for _ in range(2):
            allowed_values("hermes", {"type": "string", "format": "iri"}, [])
    assert [message.split(":")[0] for message in caplog.messages] == ["JSON schemas with the format 'iri'"]


@pytest.mark.parametrize("format_name", VALUES)
def test_large_numbers_that_cannot_be_followed_are_refused_by_tool_and_path(format_name: str) -> None:
    part = {"anyOf": [{"type": "null"}, {"type": "array", "items": {"allOf": [INT64]}}]}
    fields = {"f": "tools[3].function.parameters"}
    with pytest.raises(InvalidRequestError) as caught:
        ToolCallGrammar(FORMATS[format_name], {"f": object_of(part)}, {}, fields=fields).required()
    assert caught.value.field == "tools[3].function.parameters"
    assert caught.value.message.startswith("properties.p.anyOf[1].items.allOf: is not supported")


WRONG = object_of({"type": "array", "uniqueItems": True})
LARGE = object_of({"const": 9007199254740993})
MESSAGES = [{"role": "user", "content": "x"}]


def chat_tools(schema: Any, **options: Any) -> tuple[str, dict[str, Any]]:
    functions = [{"name": "first", "parameters": {"type": "object"}}, {"name": "second", "parameters": schema}]
    tools = [{"type": "function", "function": {**function, "strict": True}} for function in functions]
    return "/v1/chat/completions", {"model": "demo", "messages": MESSAGES, "tools": tools, **options}


def chat_format(schema: Any) -> tuple[str, dict[str, Any]]:
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return "/v1/chat/completions", {"model": "demo", "messages": MESSAGES, "response_format": response_format}


def response_format(schema: Any) -> tuple[str, dict[str, Any]]:
    text = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    return "/v1/responses", {"model": "demo", "input": "x", "text": text}


def response_tools(schema: Any) -> tuple[str, dict[str, Any]]:
    tools = [{"type": "function", "name": name, "parameters": part} for name, part in (("a", {}), ("b", schema))]
    return "/v1/responses", {"model": "demo", "input": "x", "tools": tools, "tool_choice": "required"}


def message_format(schema: Any) -> tuple[str, dict[str, Any]]:
    config = {"format": {"type": "json_schema", "schema": schema}}
    return "/v1/messages", {"model": "demo", "max_tokens": 60, "messages": MESSAGES, "output_config": config}


def message_tools(schema: Any) -> tuple[str, dict[str, Any]]:
    tools = [{"name": name, "input_schema": part} for name, part in (("a", {"type": "object"}), ("b", schema))]
    body = {"model": "demo", "max_tokens": 60, "messages": MESSAGES, "tools": tools, "tool_choice": {"type": "any"}}
    return "/v1/messages", body


DOORS = [
    (lambda schema: chat_tools(schema, tool_choice="required"), "tools[1].function.parameters"),
    (chat_tools, "tools[1].function.parameters"),
    (
        lambda schema: chat_tools(schema, tool_choice={"type": "function", "function": {"name": "second"}}),
        "tools[1].function.parameters",
    ),
    (chat_format, "response_format"),
    (response_format, "text.format"),
    (response_tools, "tools[1].parameters"),
    (message_format, "output_config.format"),
    (message_tools, "tools[1].input_schema"),
]


@pytest.mark.parametrize(("make", "field"), DOORS, ids=range(len(DOORS)))
def test_errors_name_the_field_path_and_keyword_at_every_endpoint(
    drafting_server: ServerProcess, make: Any, field: str
) -> None:
    path, body = make(WRONG)
    answer = drafting_server.post(path, body)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert message.endswith(f'{field}: properties.p: Unimplemented keys: ["uniqueItems"]'), message


def test_an_answer_beside_tools_has_its_own_field(drafting_server: ServerProcess) -> None:
    path, body = chat_tools({"type": "object"}, tool_choice="auto")
    answer = drafting_server.post(path, {**body, **{"response_format": chat_format(WRONG)[1]["response_format"]}})
    assert answer.json()["error"]["message"].endswith(
        'response_format: properties.p: Unimplemented keys: ["uniqueItems"]'
    )


@pytest.mark.parametrize("make", [chat_format, response_format, message_format])
def test_digits_of_large_integers_reach_the_output(drafting_server: ServerProcess, make: Any) -> None:
    path, body = make(LARGE)
    answer = drafting_server.post(path, body).text
    assert "9007199254740993" in answer and "9007199254740992" not in answer, answer


def test_large_integers_of_tools_reach_the_call(drafting_server: ServerProcess) -> None:
    for number in (9007199254740993, 10**30 + 1):
        choice = {"type": "function", "function": {"name": "second"}}
        path, body = chat_tools(object_of({"const": number}), tool_choice=choice)
        message = drafting_server.post(path, {**body, "max_tokens": 100}).json()["choices"][0]["message"]
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"p": number}


def test_the_library_that_compiles_grammars_reads_no_digits_beyond_doubles() -> None:
    """If this changes, schemas need no grammars of their own for large numbers."""
    grammar = llguidance.LLMatcher.grammar_from_json_schema({"const": 2**53 + 1})
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    assert matcher.try_consume_tokens(list(b"9007199254740993")) < 16
