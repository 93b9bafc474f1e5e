# SPDX-License-Identifier: Apache-2.0
"""Tool calls are parsed from a text, independently of the pieces in which it arrives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.core.reasoning import REASONING_FORMATS, ReasoningState
from fastdeploy.core.tool_formats import TOOL_CALL_FORMATS
from fastdeploy.entrypoints.openai.parsers.json_tool_parsers import JsonArrayToolParser, NamedToolParser
from fastdeploy.entrypoints.openai.parsers.message import Message, MessageParser, ToolCall
from fastdeploy.entrypoints.openai.parsers.qwen3_coder_tool_parser import convert
from fastdeploy.entrypoints.openai.parsers.registry import FORMATS
from fastdeploy.entrypoints.openai.parsers.stream_parser import JsonScanner
from tests.entrypoints.message_texts import CALL, CALL_END, CALLS, LIST, LIST_END, SEP, TWO_CALLS, make_parser, read

ROOT = Path(__file__).parents[2]
F = ToolCall("f", '{"a": 1}')
F_AB = ToolCall("f", '{"a": 1, "b": 2}')
TWO_FUNCTIONS = Message(calls=[ToolCall("f", "{}"), ToolCall("g", "{}")])


def test_every_name_has_a_format_and_every_format_a_name() -> None:
    assert set(TOOL_CALL_FORMATS.values()) == set(FORMATS) == set(TWO_CALLS)


def test_docs_list_every_format() -> None:
    text = (ROOT / "docs" / "guide" / "serving.md").read_text()
    assert [name for name in (*TOOL_CALL_FORMATS, *REASONING_FORMATS) if f"`{name}`" not in text] == []


@pytest.mark.parametrize("format_name", FORMATS)
def test_two_calls_are_parsed(format_name: str) -> None:
    assert read([TWO_CALLS[format_name]], format_name) == Message(calls=CALLS)


@pytest.mark.parametrize("format_name", [format_name for format_name in FORMATS if format_name != "llama3_json"])
def test_text_around_calls_is_kept(format_name: str) -> None:
    message = read([f"Let me look.\n{TWO_CALLS[format_name].strip()}\nDone."], format_name)
    assert message == Message(content="Let me look.\nDone.", calls=CALLS)


@pytest.mark.parametrize("format_name", FORMATS)
def test_text_without_calls_is_unchanged_content(format_name: str) -> None:
    text = ' a < b, <tool and {"x": 1} <|py \n'
    assert read([text], format_name) == read(list(text), format_name) == Message(content=text)


@pytest.mark.parametrize(
    ("format_name", "text", "expected"),
    [
        # arguments before the name, other keys, quoted arguments, OpenAI's format
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', Message(calls=[F])),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "}"}</tool_call>', Message(calls=[F])),
        ("hermes", '<tool_call>{"id": 7, "name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', Message(calls=[F])),
        ("hermes", '<tool_call>{"function": {"name": "f", "arguments": {"a": 1}}}</tool_call>', Message(calls=[F])),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', Message(calls=[ToolCall("f", "{}")])),
        # a missing brace or end marker
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> x', Message("", " x", [F])),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', Message(calls=[F])),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_', Message("", "</tool_", [F])),
        # the end marker within a text
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>\\""}}</tool_call>',
            Message(calls=[ToolCall("f", '{"a": "</tool_call>\\""}')]),
        ),
        # truncated within the arguments
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1', Message(calls=[ToolCall("f", '{"a": [1')])),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>\n1", Message(calls=[ToolCall("f", '{"a": 1')])),
        # without the first marker, or end tags
        ("qwen3_coder", "<function=f><parameter=a>1</parameter></function>", Message(calls=[F])),
        ("qwen3_coder", "So:\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>.", Message("", "So:.", [F])),
        ("qwen3_coder", "<tool_call><function=f></function><function=g></function></tool_call>", TWO_FUNCTIONS),
        ("qwen3_coder", "<function=f></function>\n<tool_call>\n<function=g>\n</function>\n</tool_call>", TWO_FUNCTIONS),
        (
            "qwen3_coder",
            "<function=f><parameter=a>\n1\n<parameter=b>\n2\n</parameter></function>",
            Message(calls=[F_AB]),
        ),
        ("qwen3_coder", "<function=f><parameter=a>1<parameter=b>2</function> x", Message("", " x", [F_AB])),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</tool_call> x", Message("", " x", [F])),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter></tool_call>", Message(calls=[F])),
        (
            "qwen3_coder",
            "<function=f><parameter=a>1</function><function=f><parameter=a>1<parameter=b>2</parameter></function>",
            Message(calls=[F, F_AB]),
        ),
        # other tags within a value
        (
            "qwen3_coder",
            "<function=f><parameter=a><tool_call></function></parameter></function>",
            Message(calls=[ToolCall("f", '{"a": "<tool_call></function>"}')]),
        ),
        # not calls
        (
            "qwen3_coder",
            "write <function=NAME or <function= f g>",
            Message(content="write <function=NAME or <function= f g>"),
        ),
        ("hermes", '<tool_call>{"name": "f", "argum', Message(content='<tool_call>{"name": "f", "argum')),
        ("hermes", "<tool_call>f(1)</tool_call>", Message(content="<tool_call>f(1)</tool_call>")),
        ("hermes", '<tool_call>{"name": 3}</tool_call>', Message(content='<tool_call>{"name": 3}</tool_call>')),
        ("hermes", '<tool_call>{"city": "x"}</tool_call>', Message(content='<tool_call>{"city": "x"}</tool_call>')),
        ("hermes", '<tool_call>[{"name": "f"}]', Message(content='<tool_call>[{"name": "f"}]')),
        ("hermes", '<tool_call>{"name": "f"]', Message(content='<tool_call>{"name": "f"]')),
        ("llama3_json", ' {"answer": 1}', Message(content=' {"answer": 1}')),
        ("llama3_json", '{"name": "f", "parameters": [1]}', Message(content='{"name": "f", "parameters": [1]}')),
        ("deepseek_v3", f"{LIST}{CALL}x{CALL_END}{LIST_END}", Message(content=f"{LIST}{CALL}x{CALL_END}{LIST_END}")),
        ("qwen3_coder", "<tool_call><func>", Message(content="<tool_call><func>")),
        ("qwen3_coder", "<tool_call><function=>", Message(content="<tool_call><function=>")),
        # a call after text that is not one
        ("hermes", '<tool_call>no <tool_call>{"name": "f", "arguments": {"a": 1}}', Message("", "<tool_call>no", [F])),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', Message(calls=[F])),
        (
            "deepseek_v3",
            f'{LIST}{CALL}function{SEP}f\n```json\n{{"a": 1}}\n```{CALL_END}\n{CALL}nonsense{CALL_END}',
            Message("", f"{CALL}nonsense{CALL_END}", [F]),
        ),
    ],
)
def test_unusual_calls(format_name: str, text: str, expected: Message) -> None:
    assert read([text], format_name) == expected
    assert read(list(text), format_name) == expected


MARKERS = ["<think>", "</think>", "<response>", "</response>", "<tool_call>", "</tool_call>", "<|python_tag|>", "; "]
FRAGMENTS = [
    *MARKERS,
    *(LIST, LIST_END, CALL, CALL_END, SEP, f"{CALL}function{SEP}f\n```json\n", "\n```"),
    *('{"name": "f", "arguments": ', '{"name": "f"', '{"a": 1}', '{"a": "}\\" </tool_call>"', "{", "}", "]", '"', "\\"),
    *("<function=f>", "<parameter=a>", "</parameter>", "</function>", "\n", "  ", "text", "é🙂", ",", "1"),
]
TEXTS = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    st.sampled_from(list(TWO_CALLS.values())).flatmap(lambda text: st.integers(0, len(text)).map(lambda n: text[:n])),
)
STATES = st.sampled_from(list(ReasoningState))


@pytest.mark.parametrize("format_name", ["", *FORMATS])
@given(text=TEXTS, reasoning=st.sampled_from(["", "qwen3", "ernie-x1"]), state=STATES, data=st.data())
def test_message_does_not_depend_on_the_pieces_of_the_text(
    format_name: str, text: str, reasoning: str, state: ReasoningState, data: st.DataObject
) -> None:
    bounds = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[begin:end] for begin, end in zip([0, *bounds], [*bounds, len(text)], strict=True)]
    assert read(pieces, format_name, reasoning, state) == read([text], format_name, reasoning, state)


@pytest.mark.parametrize("format_name", FORMATS)
@given(text=TEXTS)
def test_text_without_a_call_is_never_lost(format_name: str, text: str) -> None:
    message = read([text], format_name)
    if not message.calls:
        assert message.content == text


@pytest.mark.parametrize("format_name", [format_name for format_name in FORMATS if format_name != "qwen3_coder"])
def test_arguments_are_streamed(format_name: str) -> None:
    parser, text = make_parser(format_name), TWO_CALLS[format_name]
    parts = [part for char in text for part in parser.push(char, False)]
    kinds = [(part.kind, part.index) for part in parts]
    assert kinds[0] == ("call", 0) and kinds.count(("call", 0)) == 1
    assert kinds.count(("arguments", 0)) > 10, "one piece per character"
    assert kinds.index(("call", 1)) > kinds.index(("arguments", 0))


def test_calls_beyond_the_maximum_are_dropped() -> None:
    assert read([TWO_CALLS["hermes"]], "hermes", max_calls=1).calls == CALLS[:1]
    assert read(list(TWO_CALLS["hermes"]), "hermes", max_calls=1).calls == CALLS[:1]


def test_array_and_named_function_are_parsed_as_calls() -> None:
    message = Message()
    text = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    message.add(MessageParser(None, JsonArrayToolParser()).push(text, True))
    assert message == Message(calls=[F, ToolCall("g", "{}")])
    message, parser = Message(), MessageParser(None, NamedToolParser("f"))
    message.add(parser.push('{"a"', False) + parser.push(": 1}", True))
    assert message == Message(calls=[F])


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        ("3", {"type": "string"}, "3"),
        ("3", {}, 3),
        ("three", {"type": "integer"}, "three"),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ("5", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "5"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
    ],
)
def test_tagged_values_have_the_type_of_the_parameter(text: str, schema: dict[str, object], value: object) -> None:
    assert convert(text, schema) == value


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(value=st.lists(JSON) | st.dictionaries(st.text(), JSON), indent=st.none() | st.integers(0, 2))
def test_scanner_finds_the_end_of_any_json_value(value: object, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    scanner = JsonScanner()
    assert scanner.feed(text + "]}x") == len(text) and scanner.is_done
    by_character = JsonScanner()
    assert sum(by_character.feed(char) for char in text) == len(text) and by_character.is_done


DEEP = '{"a": ' * 970 + "1" + "}" * 970


def call_with_days(value: str) -> str:
    """Return a call in Qwen3-Coder's format with a parameter that should be an integer."""
    return f"<tool_call>\n<function=weather>\n<parameter=days>\n{value}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}</tool_call>',
        '<tool_call>{"arguments": {}, "name": "\\ud800"}</tool_call>',
        '<tool_call>{"arguments": {"a": 1e999}, "name": "f"}</tool_call>',
        f'<tool_call>{{"arguments": {DEEP}, "name": "f"}}</tool_call>',
    ],
)
def test_call_that_could_not_be_sent_again_is_content(text: str) -> None:
    assert read([text], "hermes") == Message(content=text)


@pytest.mark.parametrize("value", ['"\\ud800"', DEEP, "NaN", "1e999", "9" * 5000])
def test_value_that_could_not_be_sent_again_is_a_text(value: str) -> None:
    arguments = json.dumps({"days": value})
    assert read([call_with_days(value)], "qwen3_coder") == Message(calls=[ToolCall("weather", arguments)])
