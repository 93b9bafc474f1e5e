# SPDX-License-Identifier: Apache-2.0
"""Texts in each format of tool calls, and the message that they are parsed into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastdeploy.core.reasoning import REASONING_FORMATS, ReasoningState
from fastdeploy.entrypoints.openai.parsers.message import Message, MessageParser, ToolCall
from fastdeploy.entrypoints.openai.parsers.reasoning import CallsInReasoning, ReasoningParser
from fastdeploy.entrypoints.openai.parsers.registry import FORMATS

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
LIST, LIST_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

TWO_CALLS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "ernie": '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź", "days": 2}}\n</tool_call>\n'
    '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nŁódź\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Łódź</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    "pythonic": "[weather(city='Łódź', days=2), now()]",
    "llama3_json": '{"name": "weather", "parameters": {"city": "Łódź", "days": 2}}; {"name": "now", "parameters": {}}',
    "deepseek_v3": f'{LIST}{CALL}function{SEP}weather\n```json\n{{"city": "Łódź", "days": 2}}\n```{CALL_END}\n'
    f"{CALL}function{SEP}now\n```json\n{{}}\n```{CALL_END}{LIST_END}",
    "deepseek_v31": f'{LIST}{CALL}weather{SEP}{{"city": "Łódź", "days": 2}}{CALL_END}'
    f"{CALL}now{SEP}{{}}{CALL_END}{LIST_END}",
}
"""Format -> the calls weather(city="Łódź", days=2) and now()."""

KNOWN: dict[str, dict[str, Any]] = {**SCHEMAS, "f": {}, "g": {}, "user.get-one": {}}
"""The functions of a request: those of the calls, and some with any arguments."""

CALLS = [ToolCall("weather", '{"city": "Łódź", "days": 2}'), ToolCall("now", "{}")]


def make_reasoning_parser(
    reasoning: str, state: ReasoningState, tools: str = "", is_forced: bool = False
) -> ReasoningParser:
    """Return a parser for the names of formats; an empty name of the latter means no tools."""
    tool_format = FORMATS[tools] if tools else None
    marks = REASONING_FORMATS[reasoning].for_tools(tool_format.markers if tool_format else ())
    calls = CallsInReasoning(lambda: tool_format.make_parser(KNOWN), is_forced) if tool_format else None
    return ReasoningParser(marks, state, calls)


def make_parser(
    tools: str = "",
    reasoning: str = "",
    state: ReasoningState = ReasoningState.OPEN,
    max_calls: int | None = None,
    is_forced: bool = False,
) -> MessageParser:
    """Return a parser for the names of formats; an empty name means none."""
    reasoning_parser = make_reasoning_parser(reasoning, state, tools, is_forced) if reasoning else None
    return MessageParser(reasoning_parser, FORMATS[tools].make_parser(KNOWN) if tools else None, max_calls)


def read(pieces: Sequence[str], *args: Any, **kwargs: Any) -> Message:
    """Parse the pieces of a text with a new parser."""
    parser, message = make_parser(*args, **kwargs), Message()
    for number, piece in enumerate(pieces, start=1):
        message.add(parser.push(piece, number == len(pieces)))
    return message
