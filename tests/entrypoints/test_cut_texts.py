# SPDX-License-Identifier: Apache-2.0
"""Texts that end anywhere, even within a character, give the same message and counts whatever the deltas.

Tokens go through the detokenizer, the parser and the counter of reasoning tokens as in the server.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.reasoning import REASONING_FORMATS, ReasoningState
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.text_output import TextAssembler, make_detokenizer
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.entrypoints.openai.parsers.json_tool_parsers import NamedToolParser
from fastdeploy.entrypoints.openai.parsers.message import Message, MessageParser, ToolCall
from fastdeploy.entrypoints.openai.parsers.reasoning import ReasoningCounter
from fastdeploy.entrypoints.openai.parsers.registry import FORMATS, JSON_ARRAY
from tests.detokenize.tokenizers_for_tests import save_tokenizer
from tests.entrypoints.message_texts import (
    CALL,
    CALL_END,
    CALLS,
    KNOWN,
    LIST,
    LIST_END,
    SEP,
    TWO_CALLS,
    make_parser,
    make_reasoning_parser,
    read,
)
from tests.pairwise import pairwise

DISTINCT_REASONING = {format_: name for name, format_ in reversed(REASONING_FORMATS.items())}
REASONING_NAMES = ("", *sorted(DISTINCT_REASONING.values()))
NUM_TEXTS = 200  # for each format of calls
CASES = pairwise(["", *FORMATS], REASONING_NAMES, list(ReasoningState), ["special", "plain", "fallback"])
PROSE = (
    "The format is ",
    "Well: ",
    "a < b, ",
    "Łódź 😀 ",
    "\n\n",
    "`{}` ",
    '{"name": "Bob", "age": 5}',
    "[1, 2] ",
    "</",
    "}",
)
MARKERS = sorted({marker for tool_format in FORMATS.values() for marker in tool_format.markers})
THINKING = ("<think>", "</think>", "<response>", "</response>")


@cache
def tokenizer(kind: str) -> Tokenizer:
    """Return a tokenizer with the markers as special tokens or as text, or one whose unknown characters are bytes."""
    with TemporaryDirectory() as folder:
        special = [*MARKERS, *THINKING] if kind == "special" else []
        return Tokenizer.from_pretrained(
            save_tokenizer(Path(folder), "byte_fallback" if kind == "fallback" else "byte_level", special)
        )


def random_text(rng: random.Random, tools: str) -> str:
    """Return reasoning, prose, and calls in a format, some of them broken."""
    calls, markers = TWO_CALLS[tools or "hermes"], FORMATS[tools].markers if tools else MARKERS[:2]
    pieces = []
    for _ in range(rng.randint(1, 5)):
        kind = rng.randrange(8)
        if kind < 2:
            pieces.append(rng.choice(PROSE))
        elif kind == 2:
            pieces.append(rng.choice(THINKING))
        elif kind == 3:
            pieces.append(rng.choice(markers))
        elif kind == 4:
            at = rng.randrange(len(calls))  # a call with a character too many
            pieces.append(calls[:at] + rng.choice("}])\"'<x ") + calls[at:])
        elif kind == 5:
            at = rng.randrange(len(calls))  # and one with some too few
            pieces.append(calls[:at] + calls[at + rng.randint(1, 9) :])
        else:
            pieces.append(calls)
    return "".join([rng.choice(["", "", "<think>", "hm ", "hm </think>"]), *pieces])


def cut_tokens(rng: random.Random, kind: str, text: str) -> list[int]:
    """Return the tokens of the first bytes of a text; those of an incomplete character are tokens of single bytes."""
    known, data = tokenizer(kind), text.encode()
    data = data[: rng.randint(0, len(data))] if rng.random() < 0.8 else data
    whole = data.decode(errors="ignore")
    ids = known.encode(whole, add_special_tokens=False)
    return ids + [_byte_id(kind, byte) for byte in data[len(whole.encode()) :]]


@cache
def _byte_id(kind: str, byte: int) -> int:
    known = tokenizer(kind)
    return next(i for i in range(known.vocab_size) if known.has_token(i) and known.token_bytes(i) == bytes([byte]))


def run(kind: str, pieces: Sequence[list[int]], case: tuple[str, str, ReasoningState, bool]) -> tuple[Message, int]:
    """Return the message and the number of reasoning tokens of an output that arrives in these deltas."""
    tools, reasoning, state, is_forced = case
    known, markers = tokenizer(kind), list(THINKING) if reasoning else []
    markers += FORMATS[tools].markers if tools else ()
    params = SamplingParams(visible_token_ids=list(known.find_special_ids(markers).values()))
    assembler, parser, message = TextAssembler(known, [], params), make_parser(*case[:3], None, is_forced), Message()
    counter = None
    if reasoning:
        counting = make_reasoning_parser(reasoning, state, tools, is_forced)
        counter = ReasoningCounter(counting, make_detokenizer(known, [], params))
    for number, token_ids in enumerate(pieces, start=1):
        is_last = number == len(pieces)
        text = assembler.push(TokenDelta("a", 0, token_ids, finish_reason="length" if is_last else None))
        message.add(parser.push(text, is_last))
        if counter is not None:
            counter.push(token_ids, text, is_last)
    return message, counter.num_tokens if counter is not None else 0


def random_pieces(rng: random.Random, ids: list[int], longest: int) -> list[list[int]]:
    """Divide tokens as steps with accepted drafts do."""
    pieces, at = list[list[int]](), 0
    while at < len(ids):
        size = rng.randint(1, longest)
        pieces.append(ids[at : at + size])
        at += size
    return pieces or [[]]


@pytest.mark.parametrize("tools", ["", *FORMATS])
def test_message_and_count_do_not_depend_on_the_deltas(tools: str) -> None:
    cases = [(reasoning, state, kind) for name, reasoning, state, kind in CASES if name == tools]
    rng = random.Random(f"cut {tools}")
    for number in range(NUM_TEXTS):
        reasoning, state, kind = cases[number % len(cases)]
        case = (tools, reasoning, state, number % 3 == 0)
        ids = cut_tokens(rng, kind, random_text(rng, tools))
        whole, count = run(kind, [ids], case)
        for longest in (1, 6):
            streamed = run(kind, random_pieces(rng, ids, longest), case)
            assert streamed == (whole, count), (case, tokenizer(kind).decode(ids, skip_special_tokens=False))
        if reasoning:
            before, _ = run(kind, [ids[:count]], case)
            assert before.calls == [] and before.reasoning.strip() == whole.reasoning.strip(), "the count is right"


SECOND_CALL = {  # where the second call of TWO_CALLS begins
    "pythonic": ", now",
    "llama3_json": '; {"name": "now"',
    "deepseek_v3": f"{CALL}function{SEP}now",
    "deepseek_v31": f"{CALL}now",
}


@pytest.mark.parametrize("tools", FORMATS)
def test_a_call_that_is_cut_in_its_end_leaves_no_content(tools: str) -> None:
    text = TWO_CALLS[tools]
    second = text.index(SECOND_CALL[tools]) if tools in SECOND_CALL else text.rindex("<tool_call>")
    for length in range(len(text) + 1):
        content = read([text[:length]], tools).content
        heads = [text[begin:length].strip() for begin in (0, second) if begin < length]
        assert content.strip() in ("", *heads), "the beginning of a call"
    complete = [length for length in range(len(text)) if read([text[:length]], tools) == Message(calls=CALLS)]
    assert complete[-1] == len(text) - 1, "the end marker may lack its last character"


@pytest.mark.parametrize(
    ("tools", "before_ends"),
    [
        *((name, ("\n</tool_call>",)) for name in ("hermes", "ernie")),
        ("qwen3_coder", ("</function>", "</tool_call>")),
        ("glm45", ("</tool_call>\n",)),
        ("pythonic", (", now", "]")),
        ("llama3_json", ("; ",)),
        ("deepseek_v3", ("```", CALL_END, LIST_END)),
        ("deepseek_v31", (CALL_END, LIST_END)),
    ],
)
@pytest.mark.parametrize("surplus", ["}", "}}", "}\n]", ")"])
def test_surplus_brackets_before_an_end_marker_leave_no_content(
    tools: str, before_ends: tuple[str, ...], surplus: str
) -> None:
    for end in before_ends:
        if tools == "pythonic" and "]" in surplus:
            continue  # it ends the list
        text = TWO_CALLS[tools].replace("```json", "<fence>").replace(end, surplus + end).replace("<fence>", "```json")
        assert text != TWO_CALLS[tools]
        assert read([text], tools) == read(list(text), tools) == Message(calls=CALLS)
        assert read([TWO_CALLS[tools] + surplus], tools) == Message(calls=CALLS)


F, OPEN_F, PYTHON_F = ToolCall("f", '{"a": 1}'), ToolCall("f", '{"a": 1'), ToolCall("f", "{'a': 1}")
BAD_QUOTES = ToolCall("f", '{"a": "so "so!" so"}')
HEAD = '<tool_call>{"name": "f", "arguments": '
GLM = "<tool_call>f<arg_key>a</arg_key><arg_value>1"
QWEN = "<function=f><parameter=a>1"
V3, V31 = f"{LIST}{CALL}function{SEP}f\n```json\n", f"{LIST}{CALL}f{SEP}"


@pytest.mark.parametrize(
    ("tools", "text", "expected"),
    [
        # what follows a call is kept if it is no part of its end
        ("hermes", HEAD + '{"a": 1}}}</tool_call> Done.', Message("", " Done.", [F])),
        ("hermes", HEAD + '{"a": 1}}} Done.', Message("", "} Done.", [F])),
        ("hermes", HEAD + '{"a": 1}}</tools>', Message("", "</tools>", [F])),
        ("hermes", HEAD + '{"a": 1}} <', Message(calls=[F])),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}} Done.', Message("", "} Done.", [F])),
        ("deepseek_v3", V3 + '{"a": 1}\n```' + CALL_END + LIST_END + "```x```", Message("", "```x```", [F])),
        ("hermes", HEAD + '{"a": 1}}' + "}" * 64 + "</tool_call>.", Message("", ".", [F])),
        ("hermes", HEAD + '{"a": 1}}' + "}" * 65 + ".", Message("", "}" * 65 + ".", [F])),
        ("hermes", HEAD + '{"a": 1}}' + "\n" * 65 + "</tool_call>.", Message("", ".", [F])),
        # end markers are written twice, or in another order
        ("hermes", HEAD + '{"a": 1}}</tool_call></tool_call>', Message(calls=[F])),
        ("qwen3_coder", QWEN + "</parameter></parameter></function>", Message(calls=[F])),
        ("qwen3_coder", QWEN + "</parameter></tool_call></function>x", Message("", "x", [F])),
        ("glm45", GLM + "</arg_value></tool_call></tool_call>", Message(calls=[F])),
        # a tag is cut after a value, or after a name
        ("qwen3_coder", QWEN + "</param", Message(calls=[OPEN_F])),
        ("qwen3_coder", QWEN + "</parameter><param", Message(calls=[OPEN_F])),
        ("qwen3_coder", QWEN + "</func", Message(calls=[F])),
        ("glm45", GLM + "</arg_", Message(calls=[OPEN_F])),
        ("glm45", "<tool_call>f</too", Message(calls=[ToolCall("f", "{}")])),
        ("glm45", "<tool_call>f<", Message(content="<tool_call>f<")),
        # arguments that are not JSON are passed on up to the marker
        ("hermes", HEAD + "{'a': 1}}</tool_call>.", Message("", ".", [PYTHON_F])),
        ("hermes", HEAD + '{"a": "so "so!" so"}}\n</tool_call>.', Message("", ".", [BAD_QUOTES])),
        ("hermes", HEAD + '{"a": "so "so!" so"}\n</tool', Message(calls=[ToolCall("f", BAD_QUOTES.arguments + "\n")])),
        ("hermes", f'{HEAD}{{"a": 1\n{HEAD}{{"a": 1}}}}', Message(calls=[ToolCall("f", '{"a": 1\n'), F])),
        ("hermes", HEAD + '{"a": 1}, "id": it\'s}</tool_call>.', Message("", ".", [F])),
        ("hermes", HEAD + '{"a": 1}, "id": it\'s}</tool', Message(calls=[F])),
        ("deepseek_v31", f"{V31}{{'a': 1}}{CALL_END}{LIST_END}.", Message("", ".", [PYTHON_F])),
        ("deepseek_v31", f"{V31}{{'a': 1}}{CALL}f{SEP}{F.arguments}", Message(calls=[PYTHON_F, F])),
        ("deepseek_v3", f"{V3}{{'a': 1}}\n```{CALL_END}{LIST_END}", Message(calls=[PYTHON_F])),
    ],
)
def test_ends_of_calls(tools: str, text: str, expected: Message) -> None:
    assert read([text], tools) == expected
    assert read(list(text), tools) == expected


def test_brackets_without_end_are_passed_on() -> None:
    """A model that repeats itself must not be held back, nor examined anew with each piece."""
    parser = make_parser("hermes")
    parser.push(HEAD + '{"a": 1}}', False)
    assert "".join(part.text for _ in range(100) for part in parser.push("}", False)) == "}" * 100


def test_head_of_a_call_in_the_reasoning_may_be_long() -> None:
    name_last = '{"arguments": {"a": "' + "x" * 3000 + '"}, "name": "f"}'
    call = ToolCall("f", '{"a": "' + "x" * 3000 + '"}')
    for text, expected in (
        (f"hm <tool_call>{name_last}</tool_call>", Message("hm", "", [call])),
        (f"hm <tool_call>{name_last}."[:-3], Message(f"hm <tool_call>{name_last}."[:-3])),
    ):
        assert read([text], "hermes", "qwen3") == read(list(text), "hermes", "qwen3") == expected


def test_calls_of_servers_without_a_format_do_not_depend_on_the_deltas() -> None:
    texts = ('[{"name": "f", "parameters": {"a": 1}}, {"parameters": {"é": []}, "name": "g"}] x', '{"a": "é"}')
    parsers = (lambda: JSON_ARRAY.make_parser(KNOWN), lambda: NamedToolParser("f"))
    for text, make in zip(texts, parsers, strict=True):
        for length in range(len(text) + 1):
            whole, streamed = Message(), Message()
            whole.add(MessageParser(None, make()).push(text[:length], True))
            parser = MessageParser(None, make())
            for number, char in enumerate(text[:length], start=1):
                streamed.add(parser.push(char, number == length))
            assert streamed == whole, text[:length]
        assert whole.calls[0].name == "f" and whole.content in ("", " x")
