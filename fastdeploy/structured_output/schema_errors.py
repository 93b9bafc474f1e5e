# SPDX-License-Identifier: Apache-2.0
"""Finds which part of a JSON schema llguidance refuses, for errors that name its path and keyword."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import llguidance

from fastdeploy.core.json_schema import DEFINITIONS, SchemaError, join_path, subschemas, with_definitions
from fastdeploy.core.panics import RustPanicError, convert_panics
from fastdeploy.core.schema_dialect import escape_options, prepare_schema
from fastdeploy.core.schema_grammar import json_expression

MAX_SEARCH_S = 0.5  # of processor time, after which the error names the part found so far
MAX_SUSPECTS = 8  # subschemas that are compiled one by one; more are halved
_POSITION = re.compile(r"^(at )?[0-9]+\([0-9]+\): (failed to compile JSON schema: )?")
_LINES = re.compile(r"\s+[0-9]+ \| .*", re.DOTALL)
_UNSATISFIABLE = "Unsatisfiable schema"


@dataclass
class FormSchemas:
    """The JSON schemas of a form.

    Attributes:
        by_field: field of the request -> the schema there.
        unknown_formats: the formats of these schemas that are not followed.
    """

    by_field: dict[str, Any] = field(default_factory=dict)
    unknown_formats: set[str] = field(default_factory=set)


def without_lines(message: str) -> str:
    """Return an error of llguidance without its lines of a grammar that the server has made."""
    return _LINES.sub("", _POSITION.sub("", message))


def find_schema_error(schema: Any, limits: llguidance.LLParserLimits) -> SchemaError | None:
    """Return what is wrong with a schema, with the path of the smallest part that is refused; None if nothing is."""
    if not isinstance(schema, Mapping):
        return None
    return _Search(schema, limits).run("", schema)


class _Search:
    """Compiles the parts of a schema, from the whole to its parts, as long as there is time."""

    def __init__(self, root: Mapping[str, Any], limits: llguidance.LLParserLimits) -> None:
        self._root = root
        self._limits = limits
        self._deadline_s = time.process_time() + MAX_SEARCH_S

    def run(self, path: str, schema: Mapping[str, Any]) -> SchemaError | None:
        error = self._error(path, schema)
        if error is None:
            return None
        for name, part in self._suspects(schema, error):
            if time.process_time() > self._deadline_s:
                break
            found = self.run(join_path(path, name), part)
            if found is not None and (_is_unsatisfiable(error) or not _is_unsatisfiable(found)):
                return found
        return SchemaError(error.path, self._with_keyword(path, schema, error.message))

    def _suspects(self, schema: Mapping[str, Any], error: SchemaError) -> list[tuple[str, Any]]:
        """Return some direct subschemas, in their order; if any is refused, one of these is."""
        parts = [(name, part) for name, part in subschemas(schema) if isinstance(part, Mapping)]
        parts.sort(key=lambda item: item[0].partition(".")[0] in DEFINITIONS)
        while len(parts) > MAX_SUSPECTS:
            half = {str(i): part for i, (_, part) in enumerate(parts[: len(parts) // 2])}
            required = list(half) if _is_unsatisfiable(error) else []
            together = {"type": "object", "properties": half, "required": required}
            is_refused = self._error("", together) is not None
            parts = parts[: len(half)] if is_refused else parts[len(half) :]
        return parts

    def _with_keyword(self, path: str, schema: Mapping[str, Any], message: str) -> str:
        """Put the keywords before a message without which the schema would be accepted."""
        keywords = []
        for keyword in schema:
            if keyword not in (*DEFINITIONS, "type") and time.process_time() < self._deadline_s:
                rest = {name: value for name, value in schema.items() if name != keyword}
                if self._error(path, rest) is None:
                    keywords.append(keyword)
        missing = [keyword for keyword in keywords if keyword not in message]
        return f"{' and '.join(missing)}: {message}" if missing else message

    def _error(self, path: str, schema: Mapping[str, Any]) -> SchemaError | None:
        """Return the error of a part of the schema as a whole."""
        prepared = prepare_schema(with_definitions(schema, self._root), set())
        try:
            expression = json_expression(prepared, escape_options(prepared))
            message = self._validate(expression)
        except SchemaError as error:
            return SchemaError(join_path(path, error.path), error.message)
        except (ValueError, RustPanicError) as error:
            message = str(error)
        return SchemaError(path, without_lines(message)) if message else None

    @convert_panics
    def _validate(self, expression: str) -> str:
        grammar = llguidance.LLMatcher.grammar_from_lark(f"start: {expression}")
        return llguidance.LLMatcher.validate_grammar(grammar, limits=self._limits)


def _is_unsatisfiable(error: SchemaError) -> bool:
    return error.message.startswith(_UNSATISFIABLE)
