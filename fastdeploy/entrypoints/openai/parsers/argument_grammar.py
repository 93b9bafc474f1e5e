# SPDX-License-Identifier: Apache-2.0
"""The rules of a call's arguments in the Lark notation of llguidance, for each way in which models write them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastdeploy.core import schema_grammar
from fastdeploy.core.json_schema import SchemaError, with_definitions, within
from fastdeploy.core.json_types import shorten
from fastdeploy.core.schema_dialect import escape_options
from fastdeploy.entrypoints.openai.parsers.pythonic_tool_parser import KEYWORD
from fastdeploy.entrypoints.openai.parsers.tagged_tool_parsers import (
    Glm45ToolParser,
    Qwen3CoderToolParser,
    TaggedToolParser,
    resolve_reference,
    schema_types,
)

ANY_TEXT = r"/(.|\n)*/"
JSON_OPTIONS = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "lenient": False}
PYTHON_STRING = r"""/'([^'\\\x00-\x1f]|\\['"\\nrt])*'|"([^"\\\x00-\x1f]|\\['"\\nrt])*"/"""
PYTHON_NAMES = {"boolean": '"True" | "False"', "null": '"None"'}
TEXT_LIMITS = ("pattern", "format", "minLength", "maxLength")

Literal = Callable[[str], str]
"""Returns a text as terminals."""


def quote(text: str) -> str:
    """Return a text as a terminal."""
    return json.dumps(text, ensure_ascii=False)


def literal(text: str, special_ids: Mapping[str, int]) -> str:
    """Return a text as terminals: special tokens by their ids, the rest quoted."""
    if not special_ids:
        return quote(text) if text else ""
    marker = "|".join(map(re.escape, special_ids))
    pieces = [piece for piece in re.split(f"({marker})", text) if piece]
    return " ".join(f"<[{special_ids[piece]}]>" if piece in special_ids else quote(piece) for piece in pieces)


def without(*texts: str) -> str:
    """Return the expression of whatever contains none of `texts`."""
    pattern = "|".join(re.escape(text).replace("/", "\\/") for text in texts)
    return rf"~/(.|\n)*({pattern})(.|\n)*/"


def json_expression(schema: Any, options: Mapping[str, Any] | None = None) -> str:
    """Return the expression of a JSON value, with fixed spacing as in chat templates.

    With free spacing, a model could emit white space without end.

    Args:
        schema: a schema that `prepare_schema` has returned.
        options: options of llguidance that replace those of the fixed spacing.

    Raises:
        SchemaError: the schema has a number beyond 2^53 at a place that cannot be followed.
    """
    return schema_grammar.json_expression(schema, {**JSON_OPTIONS, **escape_options(schema), **(options or {})})


def _json_arguments(index: int, schema: Mapping[str, Any], literal: Literal) -> list[str]:
    return [f"arguments_{index}: {json_expression(schema)}"]


@dataclass(frozen=True)
class _TaggedArguments:
    """Writes the rules of parameters as tags, in the order of the schema.

    A string contains no tag that its parser takes for the end of a value; of its schema, only `enum` is followed.

    Attributes:
        begin, end: text before and after a value; `{name}` is replaced by the parameter's name.
    """

    parser: type[TaggedToolParser]
    begin: str
    end: str

    def __call__(self, index: int, schema: Mapping[str, Any], literal: Literal) -> list[str]:
        properties = schema.get("properties") or {}
        if not properties and schema.get("additionalProperties") is not False:
            return [f"arguments_{index}: any_{index}*", *self._any_parameter(f"any_{index}", literal)]
        required, rules, lines = _required(schema), [], list[str]()
        for number, (key, value) in enumerate(properties.items()):
            rule = f"parameter_{index}_{number}"
            begin = literal(self.begin.replace("{name}", key))
            if "string" not in schema_types(value, schema):
                with within(f"properties.{key}"):
                    expression = json_expression(with_definitions(value, schema))
                lines.append(f"{rule}: {begin} {expression} {literal(self.end)}")
            elif options := _text_options(resolve_reference(value, schema)):
                lines.append(f"{rule}: {begin} ({' | '.join(map(quote, options))}) {literal(self.end)}")
            else:
                lines += self._text(rule, begin, literal)
            rules.append(rule if key in required else f"{rule}?")
        return [f"arguments_{index}: {' '.join(rules) or quote('')}", *lines]

    def _any_parameter(self, rule: str, literal: Literal) -> list[str]:
        before, after = map(literal, self.begin.split("{name}"))
        return self._text(rule, f"{before} /[^<>\\s]+/ {after}", literal)

    def _text(self, rule: str, begin: str, literal: Literal) -> list[str]:
        """Return the rules of a text between `begin` and the end, which may be a special token."""
        text = f"{ANY_TEXT} & {without(self.parser.parameter_end, self.parser.parameter)}"
        end = literal(self.end)
        if end == quote(self.end):
            return [f"{rule}: {begin} {rule}_text", f"{rule}_text[suffix={end}]: {text}"]
        return [f"{rule}: {begin} {rule.upper()} {end}", f"{rule.upper()}: {text}"]


def _text_options(schema: Mapping[str, Any]) -> list[str]:
    """Return the texts to which `enum` or `const` restricts a value; none if it does not."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def _python_arguments(index: int, schema: Mapping[str, Any], literal: Literal) -> list[str]:
    """Return the rules of keyword arguments, in the order of the schema."""
    string, properties = f"STRING_{index}", schema.get("properties") or {}
    lines = [f"{string}: {PYTHON_STRING}"]
    if not properties and schema.get("additionalProperties") is not False:
        value = _python_value({}, string, schema)
        lines.append(f"any_{index}: /[A-Za-z_][A-Za-z0-9_]*/ {quote('=')} ({value})")
        return [f"arguments_{index}: (any_{index} ({quote(', ')} any_{index})*)?", *lines]
    required, num_properties = _required(schema), len(properties)
    for number, (key, value) in enumerate(properties.items()):
        if not KEYWORD.fullmatch(key):
            raise SchemaError("properties", f"pythonic calls cannot express a parameter named {shorten(key)}")
        argument = f"parameter_{index}_{number}"
        first, rest = f"first_{index}_{number}", f"rest_{index}_{number}"
        with within(f"properties.{key}"):
            lines.append(f"{argument}: {quote(key + '=')} ({_python_value(value, string, schema)})")
        skip = "" if key in required else f" | first_{index}_{number + 1}"
        lines.append(f"{first}: {argument} rest_{index}_{number + 1}{skip}")
        more = f"({quote(', ')} {argument})"
        lines.append(f"{rest}: {more if key in required else more + '?'} rest_{index}_{number + 1}")
    ends = [f"{name}_{index}_{num_properties}: {quote('')}" for name in ("first", "rest")]
    return [f"arguments_{index}: first_{index}_0", *lines, *ends]


def _python_value(schema: Any, string: str, root: Mapping[str, Any]) -> str:
    """Return the expression of a Python literal; numbers, arrays and objects are JSON.

    Args:
        string: the rule of a string.
        root: the schema that has the definitions.
    """
    if not isinstance(schema, Mapping) or not schema:
        return (
            f"{json_expression(schema)} | {string} | {' | '.join(PYTHON_NAMES.values())}"
            if schema == {}
            else json_expression(schema)
        )
    options = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if options and not any(isinstance(option, (dict, list)) for option in options):
        return " | ".join(quote(text) for option in options for text in _python_texts(option))
    if isinstance(schema.get("anyOf"), list):
        return " | ".join(_python_options(schema["anyOf"], string, root))
    declared = schema.get("type")
    kinds = declared if isinstance(declared, list) else [declared]
    return " | ".join(_python_kind(kind, schema, string, root) for kind in kinds)


def _python_options(schemas: Sequence[Any], string: str, root: Mapping[str, Any]) -> Iterator[str]:
    for i, schema in enumerate(schemas):
        with within(f"anyOf[{i}]"):
            yield f"({_python_value(schema, string, root)})"


def _python_kind(kind: Any, schema: Mapping[str, Any], string: str, root: Mapping[str, Any]) -> str:
    if kind == "string" and not any(name in schema for name in TEXT_LIMITS):
        return string
    if kind in PYTHON_NAMES:
        return PYTHON_NAMES[kind]
    return json_expression(with_definitions({**schema, "type": kind} if kind is not None else schema, root))


def _python_texts(value: Any) -> Sequence[str]:
    """Return how a value can be written."""
    return sorted({repr(value), json.dumps(value, ensure_ascii=False)}) if isinstance(value, str) else [repr(value)]


def _required(schema: Mapping[str, Any]) -> set[str]:
    return {name for name in schema.get("required") or () if isinstance(name, str)}


WRITERS: Mapping[str, Callable[[int, Mapping[str, Any], Literal], list[str]]] = {
    "json": _json_arguments,
    "qwen3_coder": _TaggedArguments(Qwen3CoderToolParser, "<parameter={name}>\n", "\n</parameter>\n"),
    "glm45": _TaggedArguments(Glm45ToolParser, "<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>\n"),
    "python": _python_arguments,
}
"""How arguments are written -> the function that returns their rules."""


def argument_beginning(arguments: str, name: str) -> str | None:
    """Return the text before the value of the argument with this name; None for arguments in JSON.

    Args:
        arguments: how they are written: a key of `WRITERS`.
    """
    writer = WRITERS[arguments]
    if isinstance(writer, _TaggedArguments):
        return writer.begin.replace("{name}", name)
    return f"{name}=" if writer is _python_arguments else None


def argument_end(arguments: str) -> str:
    """Return the text after the value of an argument; "" if only a separator follows."""
    writer = WRITERS[arguments]
    return writer.end if isinstance(writer, _TaggedArguments) else ""
