# SPDX-License-Identifier: Apache-2.0
"""Grammars (Lark notation of llguidance) under which a model writes calls that its parser reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastdeploy.entrypoints.openai.parsers.registry import Schemas, ToolFormat
from fastdeploy.entrypoints.openai.parsers.tagged import schema_kinds

ANY_TEXT = r"/(.|\n)*/"
TAG_END = "\n</parameter>\n"
JSON_OPTIONS = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "lenient": False}
NO_OBJECT = r"/([^{\s](.|\n)*)?/"


@dataclass(frozen=True)
class CallGrammar:
    """Makes the grammars of one request.

    Attributes:
        schemas: of the functions that may be called.
        special_ids: text -> id of the format's markers that are special tokens; others are written as text.
        max_calls: most calls of a message; None for any number.
    """

    form: ToolFormat
    schemas: Schemas
    special_ids: Mapping[str, int]
    max_calls: int | None = None

    def required(self) -> str:
        """Return the grammar of a message that is calls and nothing else."""
        return self._grammar("calls", [])

    def optional(self, answer: str) -> str:
        """Return the grammar of a message that is calls, or the answer that the Lark expression `answer` describes."""
        return self._grammar("answer | calls", [f"answer: {answer}"])

    def within_text(self) -> str:
        """Return the grammar of a text with calls anywhere in it; what begins like a call is one."""
        if self.form.is_bare:
            return self._grammar("answer | calls", ["answer: TEXT", f"TEXT: {NO_OBJECT}"])
        opening = (self.form.list_begin or self.form.begin).replace("{name}", "\0")
        trigger = next(marker for marker in self.form.markers if opening.startswith(marker))
        if trigger in self.special_ids:
            head = [f"calls_in_text: TEXT {self._literal(trigger)} calls_rest"]
        else:
            head = [f"trigger[lazy]: TEXT {_quote(trigger)}", "calls_in_text: trigger calls_rest"]
        count = "*" if self.max_calls is None else f"{{0,{self.max_calls}}}"
        lines = [f"start: calls_in_text{count} tail", "tail: TEXT", f"TEXT: {ANY_TEXT}", *head]
        return "\n".join([*lines, *self._calls("calls_rest", len(trigger)), ""])

    def _grammar(self, start: str, lines: Sequence[str]) -> str:
        return "\n".join([f"start: {start}", *lines, *self._calls("calls", 0), ""])

    def _calls(self, rule: str, num_cut: int) -> list[str]:
        """Return the rules of a list of calls, the first `num_cut` characters of its opening left out."""
        form, names = self.form, list(self.schemas)
        first = "call"
        lines = []
        if num_cut and not form.list_begin:
            first = "first_call"
            lines.append(_alternatives(first, [self._call(name, num_cut) for name in names]))
        begin = self._literal(form.list_begin[num_cut:])
        further = f"({self._literal(form.separator)} call)"
        count = "*" if self.max_calls is None else f"{{0,{self.max_calls - 1}}}"
        more = "" if self.max_calls == 1 else further + count
        lines.append(f"{rule}: {begin} {first} {more} {self._literal(form.list_end)}")
        if first == "call" or more:
            lines.append(_alternatives("call", [self._call(name, 0) for name in names]))
        write = _tagged_arguments if form.is_tagged else _json_arguments
        return [*lines, *(line for at, name in enumerate(names) for line in write(at, self.schemas[name]))]

    def _call(self, name: str, num_cut: int) -> str:
        begin = self.form.begin.replace("{name}", name)[num_cut:]
        arguments = f"arguments_{list(self.schemas).index(name)}"
        return f"{self._literal(begin)} {arguments} {self._literal(self.form.end)}"

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
    """Return the Lark expression of a JSON value, spaced as templates write it; free spacing might never end."""
    schema = ({} if schema else {"not": {}}) if isinstance(schema, bool) else schema
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"


def _json_arguments(at: int, schema: Mapping[str, Any]) -> list[str]:
    return [f"arguments_{at}: {json_expression(schema)}"]


def _tagged_arguments(at: int, schema: Mapping[str, Any]) -> list[str]:
    """Return the rules of parameters as tags, in the schema's order; a text may be any text."""
    lines, rules = [], []
    for number, (key, value) in enumerate((schema.get("properties") or {}).items()):
        rule = f"parameter_{at}_{number}"
        begin = _quote(f"<parameter={key}>\n")
        if "string" in schema_kinds(value):
            lines += [f"{rule}: {begin} {rule}_text", f"{rule}_text[suffix={_quote(TAG_END)}]: {ANY_TEXT}"]
        else:
            definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
            value = value if isinstance(value, bool) else {**definitions, **value}
            lines.append(f"{rule}: {begin} {json_expression(value)} {_quote(TAG_END)}")
        rules.append(rule if key in (schema.get("required") or ()) else f"{rule}?")
    return [f"arguments_{at}: {' '.join(rules) or _quote('')}", *lines]


def _alternatives(rule: str, options: Sequence[str]) -> str:
    return f"{rule}: " + "\n    | ".join(options)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
