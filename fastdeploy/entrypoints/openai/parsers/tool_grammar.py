# SPDX-License-Identifier: Apache-2.0
"""Grammars in the Lark notation of llguidance, which restrict an output to tool calls that its parser accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.json_schema import SchemaError
from fastdeploy.core.schema_dialect import note_unknown_formats, prepare_schema
from fastdeploy.entrypoints.openai.parsers.argument_grammar import ANY_TEXT, WRITERS, literal, quote, without
from fastdeploy.entrypoints.openai.parsers.registry import ToolFormat
from fastdeploy.entrypoints.openai.parsers.tool_parser import Schemas


@dataclass(frozen=True)
class ToolCallGrammar:
    """Builds the grammars of one request.

    Attributes:
        tool_format: how the model writes calls.
        schemas: function -> schema of its arguments, for the functions that may be called.
        special_ids: text -> token id of the format's markers that are special tokens; other markers are plain text.
        max_calls: maximum number of calls; None for no limit.
        fields: function -> the field of the request that has its schema, for errors.
    """

    tool_format: ToolFormat
    schemas: Schemas
    special_ids: Mapping[str, int]
    max_calls: int | None = None
    fields: Mapping[str, str] = field(default_factory=dict)

    def required(self) -> str:
        """Return the grammar of a message that consists of calls."""
        return self._grammar("calls", [])

    def optional(self, answer: str) -> str:
        """Return the grammar of a message that consists of calls or matches the Lark expression `answer`."""
        return self._grammar("answer | calls", [f"answer: {answer}"])

    def within_text(self) -> str:
        """Return the grammar of a text with calls anywhere in it; what starts like a call must be a valid one."""
        if self.tool_format.is_unmarked:
            return self._grammar("answer | calls", ["answer: TEXT", f"TEXT: {self._unlike_a_call()}"])
        opening = self.tool_format.opening.replace("{name}", "\0")
        trigger = next(marker for marker in self.tool_format.markers if opening.startswith(marker))
        if trigger in self.special_ids:
            head = [f"triggered_calls: TEXT {self._literal(trigger)} calls_rest"]
        else:
            head = [f"trigger[lazy]: TEXT {quote(trigger)}", "triggered_calls: trigger calls_rest"]
        bare_trigger = self.tool_format.bare_begin.partition("{name}")[0]
        if bare_trigger:
            head += ["calls_in_text: triggered_calls | bare_call", *self._bare_calls(bare_trigger)]
        else:
            head += ["calls_in_text: triggered_calls"]
        count = "*" if self.max_calls is None else f"{{0,{self.max_calls}}}"
        text = f"{ANY_TEXT} & {without(bare_trigger)}" if bare_trigger else ANY_TEXT
        lines = [f"start: calls_in_text{count} tail", "tail: TEXT", f"TEXT: {text}", *head]
        return "\n".join([*lines, *self._calls("calls_rest", len(trigger)), ""])

    def _unlike_a_call(self) -> str:
        """Return the expression of a text that is no call of a format without markers around calls."""
        text = rf"/([^\{self.tool_format.opening[0]}\s](.|\n)*)?/"
        return f"{text} & {without(*self.tool_format.markers)}" if self.tool_format.markers else text

    def _bare_calls(self, trigger: str) -> list[str]:
        """Return the rules of a text that ends with a call without its first marker."""
        begin, end = self.tool_format.bare_begin.removeprefix(trigger), self._literal(self.tool_format.bare_end)
        calls = [
            f"{quote(begin.replace('{name}', name))} arguments_{index} {end}" for index, name in enumerate(self.schemas)
        ]
        return [
            f"bare_trigger[lazy]: {ANY_TEXT} {quote(trigger)}",
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
        for index, name in enumerate(names):
            lines += self._arguments(index, name)
        return lines

    def _arguments(self, index: int, name: str) -> list[str]:
        """Return the rules of the arguments of a function."""
        unknown_formats = set[str]()
        schema = prepare_schema(self.schemas[name], unknown_formats)
        note_unknown_formats(unknown_formats)
        try:
            return WRITERS[self.tool_format.arguments](index, schema, self._literal)
        except SchemaError as error:
            raise InvalidRequestError(self.fields.get(name, "tools"), str(error)) from None

    def _call(self, index: int, name: str, num_skipped: int) -> str:
        begin = self.tool_format.begin.replace("{name}", name)[num_skipped:]
        return f"{self._literal(begin)} arguments_{index} {self._literal(self.tool_format.end)}"

    def _literal(self, text: str) -> str:
        return literal(text, self.special_ids)


def _alternatives(rule: str, options: Sequence[str]) -> str:
    return f"{rule}: " + "\n    | ".join(options)
