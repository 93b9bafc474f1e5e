# SPDX-License-Identifier: Apache-2.0
"""Converts the forms of requests to grammars in llguidance's notation, and checks them. It needs no NumPy.

The time of everything here is at most proportional to the length of a form, but for the conversion of GBNF.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import llguidance

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.guided_decoding import StructuredOutputsParams
from fastdeploy.core.json_schema import SchemaError
from fastdeploy.core.json_types import parse_json
from fastdeploy.core.large_numbers import has_large_numbers
from fastdeploy.core.schema_dialect import escape_options, prepare_schema
from fastdeploy.core.schema_grammar import json_expression
from fastdeploy.structured_output.gbnf import convert_gbnf
from fastdeploy.structured_output.schema_errors import FormSchemas, find_schema_error, without_lines
from fastdeploy.structured_output.schema_limits import check_schema
from fastdeploy.structured_output.structural_tag import JSON_OPTIONS, structural_tag_to_lark

MAX_GBNF_CHARS = 1 << 16  # GBNF is parsed in Python
MAX_MESSAGE_CHARS = 400
MAX_RULES = 1000  # beyond this, expanding terminals that refer to one another can take minutes
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,  # about 20 ms
    step_lexer_fuel=200_000,  # at most about 15 ms for one bitmask
    step_max_items=50_000,
    max_lexer_states=50_000,  # of up to 2 kB each
    max_grammar_size=30_000,
    verbose_errors=False,
)
_LARK_LINE = re.compile(r"\s*(%llguidance\b|[?!]?start\s*:(?!:=))?")
# In these, no two parts that can repeat the same characters follow one another: a search that fails takes linear time.
_RULE = re.compile(r"[?!]?\w+[ \t]*(?:\[[^\]]*\][ \t]*)?(?:\.[ \t]*-?\d+[ \t]*)?:")
_TEMPERATURE = re.compile(r"[?!]?\w+[ \t]*\[[^\]]*\btemperature\b[ \t]*=")


def make_source(
    spec: StructuredOutputsParams, special_ids: Mapping[str, int], schemas: FormSchemas | None = None
) -> str:
    """Return a form as a grammar in the notation of llguidance.

    Args:
        special_ids: ids of the special tokens by their text; structural tags may contain them.
        schemas: gets the JSON schemas of the form.

    Raises:
        InvalidRequestError: the form is invalid or exceeds a limit; names the field.
    """
    try:
        _check_pattern(spec)
        return _source(spec, special_ids, schemas or FormSchemas())
    except ValueError as error:
        raise InvalidRequestError(spec.field, one_line(str(error))) from None
    except RecursionError:
        raise InvalidRequestError(spec.field, "is nested too deeply") from None


def refusal(spec: StructuredOutputsParams, schemas: FormSchemas, message: str) -> InvalidRequestError:
    """Return the error of a form that llguidance refuses: with a JSON schema, it names the part that is wrong.

    Args:
        message: the error of llguidance.
    """
    for field, schema in schemas.by_field.items():
        if (error := find_schema_error(schema, LIMITS)) is not None:
            return InvalidRequestError(field, one_line(str(error)))
    return InvalidRequestError(spec.field, one_line(without_lines(message) if schemas.by_field else message))


def one_line(message: str) -> str:
    """Return a message without newlines and at most MAX_MESSAGE_CHARS long."""
    return " ".join(message.split())[:MAX_MESSAGE_CHARS]


def _check_pattern(spec: StructuredOutputsParams) -> None:
    """Raise InvalidRequestError if the pattern of the whitespace in JSON is no regular expression."""
    if spec.whitespace_pattern is not None:
        grammar = llguidance.LLMatcher.grammar_from_regex(spec.whitespace_pattern)
        error = llguidance.LLMatcher.validate_grammar(grammar, limits=LIMITS)
        if error:
            raise InvalidRequestError(spec.field, f"whitespace_pattern: {one_line(error)}")


def _source(spec: StructuredOutputsParams, special_ids: Mapping[str, int], schemas: FormSchemas) -> str:
    match spec.kind:
        case "json":
            return _json_schema(spec, spec.json, schemas)
        case "json_object":
            return _json_schema(spec, '{"type": "object"}', schemas)
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(spec.regex or "")
        case "choice":
            return llguidance.LLMatcher.grammar_from_regex("|".join(map(_escaped, spec.choice or ())))
        case "structural_tag":
            lark = structural_tag_to_lark(spec, special_ids, schemas)
            return llguidance.LLMatcher.grammar_from_lark(lark)
    schemas.by_field.update({field: json.loads(text) for field, text in (spec.schemas or {}).items()})
    return _context_free(spec.field, spec.grammar or "")


def _json_schema(spec: StructuredOutputsParams, text: str, schemas: FormSchemas) -> str:
    field = spec.field
    schema = parse_json(field, text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequestError(field, "expected a JSON schema, which is an object or true")
    check_schema(field, schema)
    schemas.by_field[field] = schema
    schema = prepare_schema(schema, schemas.unknown_formats)
    defaults: Any = {**JSON_OPTIONS, **escape_options(schema)}  # a type of the library that only its stubs have
    overrides: Any = {"lenient": False, **spec.json_options}
    if has_large_numbers(schema, schema):
        own_options = schema.get("x-guidance")
        options = {**defaults, **(own_options if isinstance(own_options, dict) else {}), **overrides}
        return llguidance.LLMatcher.grammar_from_lark(f"start: {_expression(field, schema, options)}")
    return llguidance.LLMatcher.grammar_from_json_schema(schema, defaults, overrides)


def _expression(field: str, schema: Any, options: Mapping[str, Any]) -> str:
    try:
        return json_expression(schema, options)
    except SchemaError as error:
        raise InvalidRequestError(field, one_line(str(error))) from None


def _context_free(field: str, text: str) -> str:
    is_lark = _is_lark(text)
    if len(text) > MAX_GBNF_CHARS and not is_lark:
        raise InvalidRequestError(field, f"expected at most {MAX_GBNF_CHARS} characters of GBNF, got {len(text)}")
    if any(_TEMPERATURE.match(line) for line in _lines(text)):
        raise InvalidRequestError(
            field, "the rule attribute temperature is not supported; use the request's temperature"
        )
    lark = text if is_lark else convert_gbnf(text)
    num_rules = sum(_RULE.match(line) is not None for line in _lines(lark))
    if num_rules > MAX_RULES:
        raise InvalidRequestError(field, f"expected at most {MAX_RULES} rules, got {num_rules}")
    return llguidance.LLMatcher.grammar_from_lark(lark)


def _is_lark(text: str) -> bool:
    """Return whether a line begins like one of Lark; what is not Lark is GBNF."""
    start = 0
    while start < len(text):
        line = _LARK_LINE.match(text, start)
        assert line is not None  # it may be empty
        if line.group(1):
            return True
        start = text.find("\n", line.end()) + 1 or len(text)
    return False


def _lines(text: str) -> list[str]:
    return [line.lstrip(" \t") for line in text.split("\n")]


def _escaped(text: str) -> str:
    """Return a regular expression that matches exactly `text`."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&\-~/]", lambda match: "\\" + match.group(), text)
