# SPDX-License-Identifier: Apache-2.0
"""Grammars in the Lark notation of llguidance, which restrict an output to tool calls that its parser accepts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastdeploy.entrypoints.openai.parsers.qwen3_coder_tool_parser import VALUE_ENDS, schema_types
from fastdeploy.entrypoints.openai.parsers.registry import Schemas, ToolFormat

ANY_TEXT = r"/(.|\n)*/"
TAG_END = "\n</parameter>\n"
JSON_OPTIONS = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "lenient": False}
NOT_AN_OBJECT = r"/([^{\s](.|\n)*)?/"


@dataclass(frozen=True)
class ToolCallGrammar:
    """Builds the grammars of one request.

    Attributes:
        tool_format: how the model writes calls.
        schemas: function -> schema of its arguments, for the functions that may be called.
        special_ids: text -> token id of the format's markers that are special tokens; other markers are plain text.
        max_calls: maximum number of calls; None for no limit.
    """

    tool_format: ToolFormat
    schemas: Schemas
    special_ids: Mapping[str, int]
    max_calls: int | None = None

    def required(self) -> str:
        """Return the grammar of a message that consists of calls."""
        return self._grammar("calls", [])

    def optional(self, answer: str) -> str:
        """Return the grammar of a message that consists of calls or matches the Lark expression `answer`."""
        return self._grammar("answer | calls", [f"answer: {answer}"])

    def within_text(self) -> str:
        """Return the grammar of a text with calls anywhere in it; what starts like a call must be a valid one."""
        if self.tool_format.is_unmarked:
            return self._grammar("answer | calls", ["answer: TEXT", f"TEXT: {NOT_AN_OBJECT}"])
        opening = (self.tool_format.list_begin or self.tool_format.begin).replace("{name}", "\0")
        trigger = next(marker for marker in self.tool_format.markers if opening.startswith(marker))
        if trigger in self.special_ids:
            head = [f"triggered_calls: TEXT {self._literal(trigger)} calls_rest"]
        else:
            head = [f"trigger[lazy]: TEXT {_quote(trigger)}", "triggered_calls: trigger calls_rest"]
        bare_trigger = self.tool_format.bare_begin.partition("{name}")[0]
        if bare_trigger:
            head += ["calls_in_text: triggered_calls | bare_call", *self._bare_calls(bare_trigger)]
        else:
            head += ["calls_in_text: triggered_calls"]
        count = "*" if self.max_calls is None else f"{{0,{self.max_calls}}}"
        text = text_without(bare_trigger) if bare_trigger else ANY_TEXT
        lines = [f"start: calls_in_text{count} tail", "tail: TEXT", f"TEXT: {text}", *head]
        return "\n".join([*lines, *self._calls("calls_rest", len(trigger)), ""])

    def _bare_calls(self, trigger: str) -> list[str]:
        """Return the rules of a text that ends with a call without its first marker."""
        begin, end = self.tool_format.bare_begin.removeprefix(trigger), self._literal(self.tool_format.bare_end)
        calls = [
            f"{_quote(begin.replace('{name}', name))} arguments_{index} {end}"
            for index, name in enumerate(self.schemas)
        ]
        return [
            f"bare_trigger[lazy]: {ANY_TEXT} {_quote(trigger)}",
            "bare_call: bare_trigger bare_rest",
            _alternatives("bare_rest", calls),
        ]

    def _grammar(self, start: str, lines: Sequence[str]) -> str:
        return "\n".join([f"start: {start}", *lines, *self._calls("calls", 0), ""])

    def _calls(self, rule: str, num_skipped: int) -> list[str]:
        """Return the rules of a list of calls without the first `num_skipped` characters of its beginning."""
        tool_format, names = self.tool_format, list(self.schemas)
        first = "call"
        lines = []
        if num_skipped and not tool_format.list_begin:
            first = "first_call"
            lines.append(
                _alternatives(first, [self._call(index, name, num_skipped) for index, name in enumerate(names)])
            )
        begin = self._literal(tool_format.list_begin[num_skipped:])
        next_call = f"({self._literal(tool_format.separator)} call)"
        count = "*" if self.max_calls is None else f"{{0,{self.max_calls - 1}}}"
        more = "" if self.max_calls == 1 else next_call + count
        lines.append(f"{rule}: {begin} {first} {more} {self._literal(tool_format.list_end)}")
        if first == "call" or more:
            lines.append(_alternatives("call", [self._call(index, name, 0) for index, name in enumerate(names)]))
        write = _tagged_arguments if tool_format.is_tagged else _json_arguments
        return [*lines, *(line for index, name in enumerate(names) for line in write(index, self.schemas[name]))]

    def _call(self, index: int, name: str, num_skipped: int) -> str:
        begin = self.tool_format.begin.replace("{name}", name)[num_skipped:]
        return f"{self._literal(begin)} arguments_{index} {self._literal(self.tool_format.end)}"

    def _literal(self, text: str) -> str:
        """Return `text` as terminals: special tokens by their ids, the rest quoted."""
        if not self.special_ids:
            return _quote(text) if text else ""
        marker = "|".join(map(re.escape, self.special_ids))
        pieces = [piece for piece in re.split(f"({marker})", text) if piece]
        return " ".join(
            f"<[{self.special_ids[piece]}]>" if piece in self.special_ids else _quote(piece) for piece in pieces
        )


def json_expression(schema: Any) -> str:
    """Return the Lark expression of a JSON value, with fixed spacing as in chat templates.

    With free spacing, a model could emit white space without end.
    """
    schema = ({} if schema else {"not": {}}) if isinstance(schema, bool) else schema
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"


def text_without(*texts: str) -> str:
    """Return the Lark expression of a text that contains none of `texts`."""
    pattern = "|".join(re.escape(text).replace("/", "\\/") for text in texts)
    return rf"{ANY_TEXT} & ~/(.|\n)*({pattern})(.|\n)*/"


def _json_arguments(index: int, schema: Mapping[str, Any]) -> list[str]:
    return [f"arguments_{index}: {json_expression(schema)}"]


def _tagged_arguments(index: int, schema: Mapping[str, Any]) -> list[str]:
    """Return the rules of parameters as tags, in the order of the schema; strings contain no tag that ends them."""
    lines, rules = [], []
    text = text_without(*VALUE_ENDS)
    required = {name for name in schema.get("required") or () if isinstance(name, str)}
    for number, (key, value) in enumerate((schema.get("properties") or {}).items()):
        rule = f"parameter_{index}_{number}"
        begin = _quote(f"<parameter={key}>\n")
        if "string" in schema_types(value):
            lines += [f"{rule}: {begin} {rule}_text", f"{rule}_text[suffix={_quote(TAG_END)}]: {text}"]
        else:
            definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
            value = value if isinstance(value, bool) else {**definitions, **value}
            lines.append(f"{rule}: {begin} {json_expression(value)} {_quote(TAG_END)}")
        rules.append(rule if key in required else f"{rule}?")
    return [f"arguments_{index}: {' '.join(rules) or _quote('')}", *lines]


def _alternatives(rule: str, options: Sequence[str]) -> str:
    return f"{rule}: " + "\n    | ".join(options)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
