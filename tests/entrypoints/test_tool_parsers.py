# SPDX-License-Identifier: Apache-2.0
"""Tool calls are parsed from a text, independently of the pieces in which it arrives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fastdeploy.core.reasoning import REASONING_FORMATS, ReasoningState
from fastdeploy.core.tool_formats import TOOL_CALL_FORMATS
from fastdeploy.entrypoints.openai.parsers.json_tool_parsers import JsonArrayToolParser, NamedToolParser
from fastdeploy.entrypoints.openai.parsers.message import Message, MessageParser, ToolCall
from fastdeploy.entrypoints.openai.parsers.registry import FORMATS
from fastdeploy.entrypoints.openai.parsers.stream_parser import JsonScanner
from fastdeploy.entrypoints.openai.parsers.tagged_tool_parsers import convert
from tests.entrypoints.message_texts import CALL, CALL_END, CALLS, LIST, LIST_END, SEP, TWO_CALLS, make_parser, read

ROOT = Path(__file__).parents[2]
F = ToolCall("f", '{"a": 1}')
F_AB = ToolCall("f", '{"a": 1, "b": 2}')
OPEN_AB = ToolCall("f", '{"a": 1, "b": 2')
TWO_FUNCTIONS = Message(calls=[ToolCall("f", "{}"), ToolCall("g", "{}")])


def test_every_name_has_a_format_and_every_format_a_name() -> None:
    assert set(TOOL_CALL_FORMATS.values()) == set(FORMATS) == set(TWO_CALLS)


def test_docs_list_every_format() -> None:
    text = (ROOT / "docs" / "guide" / "serving.md").read_text()
    assert [name for name in (*TOOL_CALL_FORMATS, *REASONING_FORMATS) if f"`{name}`" not in text] == []


@pytest.mark.parametrize("format_name", FORMATS)
def test_two_calls_are_parsed(format_name: str) -> None:
    assert read([TWO_CALLS[format_name]], format_name) == Message(calls=CALLS)


@pytest.mark.parametrize("format_name", [name for name, tool_format in FORMATS.items() if not tool_format.is_unmarked])
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
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_', Message(calls=[F])),
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
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", Message(calls=[F])),
        (
            "glm45",
            "<tool_call> f\n<arg_key>a</arg_key>\n<arg_value>1<arg_key>b</arg_key>\n<arg_value>2",
            Message(calls=[OPEN_AB]),
        ),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call> x", Message("", " x", [F])),
        ("glm45", "<tool_call>f<arg_key>a<arg_value>1</arg_value></tool_call>", Message(calls=[F])),
        ("glm45", "<tool_call>f\n</tool_call><tool_call>g</tool_call>", TWO_FUNCTIONS),
        ("glm45", "<tool_call>f<arg_key>a", Message(calls=[ToolCall("f", "{")])),
        # Python
        ("pythonic", " [ f( a = 1 ) ]\n", Message(calls=[F])),
        ("pythonic", "<|python_start|>[f(a=1)]<|python_end|>", Message(calls=[F])),
        ("pythonic", "So: <|python_start|>[f(a=1)]<|python_end|>.", Message("", "So:.", [F])),
        ("pythonic", "[f(), g()]", TWO_FUNCTIONS),
        ("pythonic", "[f(a=1,), f(a=1, b=2)]", Message(calls=[F, F_AB])),
        ("pythonic", "[f(a=1]", Message(calls=[F])),
        ("pythonic", "[f(a=1) and more", Message("", " and more", [F])),
        ("pythonic", "[f(a=1), 2]", Message("", ", 2]", [F])),
        ("pythonic", "[f(a=1, 2)]", Message("", "2)]", [F])),
        ("pythonic", "[f(a=1, b=2", Message(calls=[OPEN_AB])),
        ("pythonic", "[f(a=1, b", Message(calls=[ToolCall("f", '{"a": 1')])),
        (
            "pythonic",
            "[f(a=')]', b=\"),(\", c={'x': [1, (2,)]})]",
            Message(calls=[ToolCall("f", '{"a": ")]", "b": "),(", "c": {"x": [1, [2]]}}')]),
        ),
        (
            "pythonic",
            "[user.get-one(a=True, b=false, c=None, d=-1.5, e=[])]",
            Message(calls=[ToolCall("user.get-one", '{"a": true, "b": false, "c": null, "d": -1.5, "e": []}')]),
        ),
        ("pythonic", "[f(a=New York, b=x(1, 2))]", Message(calls=[ToolCall("f", '{"a": "New York", "b": "x(1, 2)"}')])),
        ("pythonic", "[1, 2]", Message(content="[1, 2]")),
        ("pythonic", "[link(s)](http)", Message(content="[link(s)](http)")),
        ("pythonic", "See [f(a=1)]", Message(content="See [f(a=1)]")),
        ("pythonic", "[f(", Message(content="[f(")),
        ("pythonic", f"[f(a=1, {'b' * 500}=2)]", Message("", f"{'b' * 500}=2)]", [F])),
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
        # without a marker, a call has arguments and names a function of the request
        ("llama3_json", '{"name": "Bob", "age": 5}', Message(content='{"name": "Bob", "age": 5}')),
        ("llama3_json", '{"name": "f", "age": 5}', Message(content='{"name": "f", "age": 5}')),
        ("llama3_json", '{"name": "f"}', Message(content='{"name": "f"}')),
        ("llama3_json", '{"name": "x", "parameters": {}}', Message(content='{"name": "x", "parameters": {}}')),
        ("llama3_json", '{"parameters": {}, "name": "x"}', Message(content='{"parameters": {}, "name": "x"}')),
        (
            "llama3_json",
            '{"type": "function", "function": {"name": "f"}}',
            Message(content='{"type": "function", "function": {"name": "f"}}'),
        ),
        ("llama3_json", '{"parameters": {"a": 1}, "name": "f"}', Message(calls=[F])),
        ("llama3_json", '{"name": "f", "arguments": null}', Message(calls=[ToolCall("f", "{}")])),
        ("llama3_json", '{"function": {"name": "f", "parameters": {"a": 1}}}', Message(calls=[F])),
        (
            "llama3_json",
            '{"name": "f", "parameters": {"a": 1}}; {"name": "Bob", "age": 5}',
            Message("", '; {"name": "Bob", "age": 5}', [F]),
        ),
        ("pythonic", "[x(a=1)]", Message(content="[x(a=1)]")),
        ("pythonic", "[f(a=1), x()]", Message("", ", x()]", [F])),
        # with a marker, whatever the model names
        ("llama3_json", '<|python_tag|>{"name": "x"}', Message(calls=[ToolCall("x", "{}")])),
        ("hermes", '<tool_call>{"name": "x"}</tool_call>', Message(calls=[ToolCall("x", "{}")])),
        ("pythonic", "<|python_start|>[x()]<|python_end|>", Message(calls=[ToolCall("x", "{}")])),
        ("qwen3_coder", "<function=x></function>", Message(calls=[ToolCall("x", "{}")])),
        ("glm45", "<tool_call>x</tool_call>", Message(calls=[ToolCall("x", "{}")])),
        ("deepseek_v31", f"{LIST}{CALL}x{SEP}{{}}{CALL_END}{LIST_END}", Message(calls=[ToolCall("x", "{}")])),
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
    *("<|python_start|>", "[f(", "a=", "'", ")", "(", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "f"),
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


@pytest.mark.parametrize("format_name", [name for name in FORMATS if FORMATS[name].arguments == "json"])
def test_arguments_are_streamed(format_name: str) -> None:
    parser, text = make_parser(format_name), TWO_CALLS[format_name]
    parts = [part for char in text for part in parser.push(char, False)]
    kinds = [(part.kind, part.index) for part in parts]
    assert kinds[0] == ("call", 0) and kinds.count(("call", 0)) == 1
    assert kinds.count(("arguments", 0)) > 10, "one piece per character"
    assert kinds.index(("call", 1)) > kinds.index(("arguments", 0))


@pytest.mark.parametrize(
    ("format_name", "text"),
    [
        ("hermes", '<tool_call>{"' + 300 * "x"),
        ("llama3_json", '{"name": "Bob"'),
        ("llama3_json", '{"city'),
        ("pythonic", "[x(a="),
    ],
)
def test_content_is_streamed_as_soon_as_it_is_no_call(format_name: str, text: str) -> None:
    parts = make_parser(format_name).push(text + '"', False)
    assert [part.kind for part in parts] == ["content"]


def test_calls_beyond_the_maximum_are_dropped() -> None:
    assert read([TWO_CALLS["hermes"]], "hermes", max_calls=1).calls == CALLS[:1]
    assert read(list(TWO_CALLS["hermes"]), "hermes", max_calls=1).calls == CALLS[:1]


def test_array_and_named_function_are_parsed_as_calls() -> None:
    message = Message()
    text = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    message.add(MessageParser(None, JsonArrayToolParser({})).push(text, True))
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
        ("{'a': True}", {"type": "object"}, {"a": True}),
        ("True", {"type": "boolean"}, True),
        ("True", {}, "True"),
        ("3", {"enum": ["3", "4"]}, "3"),
        ("3", {"enum": [3, "auto"]}, 3),
        ("3", {"const": "3"}, "3"),
        ("3", {"$ref": "#/$defs/text"}, "3"),
        ("null", {"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]}, None),
        ("3", {"allOf": [{"$ref": "#/definitions/number"}]}, 3),
        ("3", {"$ref": "#/$defs/self"}, "3"),
        ("3", {"$ref": "#/$defs/missing"}, 3),
        ("3", {"$ref": "#/elsewhere"}, 3),
    ],
)
def test_tagged_values_have_the_type_of_the_parameter(text: str, schema: dict[str, object], value: object) -> None:
    root: dict[str, object] = {
        "$defs": {
            "text": {"enum": ["3", "null"]},
            "self": {"anyOf": [{"$ref": "#/$defs/self"}, {"type": "string"}, {"$ref": "#/$defs/self"}]},
        },
        "definitions": {"number": {"type": "integer"}},
    }
    assert convert(text, schema, root) == value


GLM = "<tool_call>save\n<arg_key>text</arg_key>\n<arg_value>{text}</arg_value>\n<arg_key>data</arg_key>\n"
GLM += "<arg_value>{data}</arg_value>\n</tool_call>"
GLM_SCHEMAS = {"save": {"properties": {"text": {"$ref": "#/$defs/t"}, "data": {}}, "$defs": {"t": {"type": "string"}}}}


@given(
    text=st.text().filter(lambda text: "</arg_value>" not in text and "<arg_key>" not in text),
    data=st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x), max_leaves=5),
    size=st.integers(1, 9),
)
def test_calls_of_glm_keep_texts_as_they_are_and_read_other_values_as_json(text: str, data: object, size: int) -> None:
    dumped = json.dumps(data)  # no tag is within it, unless a text has one
    assume("<arg_key>" not in dumped and "</arg_value>" not in dumped)
    call = GLM.format(text=text, data=dumped) * 2
    parser, message = MessageParser(None, FORMATS["glm45"].make_parser(GLM_SCHEMAS)), Message()
    for begin in range(0, len(call), size):
        message.add(parser.push(call[begin : begin + size], begin + size >= len(call)))
    assert message.content == ""
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == [
        ("save", {"text": text, "data": data})
    ] * 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(value=JSON)
def test_argument_in_python_is_read_whatever_its_value(value: object) -> None:
    text = f"[f(a={value!r})]"
    arguments = json.dumps({"a": value}, ensure_ascii=False)
    assert read([text], "pythonic") == read(list(text), "pythonic") == Message(calls=[ToolCall("f", arguments)])


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


@pytest.mark.parametrize("value", [DEEP, "NaN", "1e999", "9" * 5000])
def test_value_that_could_not_be_sent_again_is_a_text(value: str) -> None:
    arguments = json.dumps({"days": value})
    assert read([call_with_days(value)], "qwen3_coder") == Message(calls=[ToolCall("weather", arguments)])
