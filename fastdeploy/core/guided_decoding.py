# SPDX-License-Identifier: Apache-2.0
"""Structured output: the constraint that a request puts on its output."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.json_schema import close_objects
from fastdeploy.core.json_types import check_unicode, json_type, parse_json, shorten, write_json
from fastdeploy.core.notes import note_once

MAX_SPEC_BYTES = 1 << 17  # compiling a longer one could take more than a second
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_KINDS_WITH_SCHEMAS = ("json", "structural_tag")
_KINDS_WITH_JSON = (*_KINDS_WITH_SCHEMAS, "json_object")
_KINDS_BY_OPTION = {
    "disable_any_whitespace": _KINDS_WITH_JSON,
    "disable_additional_properties": _KINDS_WITH_SCHEMAS,
    "whitespace_pattern": _KINDS_WITH_JSON,
}
"""Option -> the kinds of constraint that have it."""
FORM_KEYS = (*KINDS, "disable_fallback", "backend", *_KINDS_BY_OPTION)
"""Fields of `structured_outputs`."""
OTHER_BACKENDS = ("xgrammar", "outlines", "lm-format-enforcer")
"""Backends of vLLM that stand for llguidance here, which a line of the log says."""
BACKENDS = ("auto", "guidance", "llguidance", *OTHER_BACKENDS)
BACKEND_NOTE = "forms are compiled by llguidance"


@dataclass
class StructuredOutputsParams:
    """A constraint on the output; exactly one kind is set.

    Attributes:
        json: a JSON schema, as a mapping or as JSON text.
        regex: a regular expression that the whole output matches.
        choice: strings of which the output is one.
        grammar: a context-free grammar in Lark or GBNF notation.
        json_object: True allows any JSON object.
        structural_tag: tags whose content follows a schema, as a mapping or as JSON text (docs/guide/serving.md).
        disable_fallback: accepted without effect, since there is one backend.
        disable_any_whitespace: write JSON without any whitespace between its tokens.
        disable_additional_properties: objects of a schema have no properties beyond those that it names, unless it
            says otherwise.
        whitespace_pattern: a regular expression of what may stand between the tokens of JSON.
        source: the field of the request that this comes from, for errors; by default, the attribute of its kind.
        schemas: for a grammar that the server has made: field of the request -> the text of its JSON schema,
            for errors.
        backend: accepted without effect, since there is one backend; the log says so, and the attribute becomes None.
    """

    NAME: ClassVar[str] = "structured_outputs"

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    source: str = ""
    schemas: dict[str, str] | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        """Check that one kind is set and has the right type; convert mappings to JSON text.

        Raises:
            InvalidRequestError: names the field.
        """
        kinds = [name for name in KINDS if _is_set(getattr(self, name))]
        if len(kinds) != 1:
            raise InvalidRequestError(self.NAME, f"expected exactly one kind of constraint, got {kinds or 'none'}")
        self.source = self.source or self._default_source(kinds[0])
        self.json = _json_text(self.field, self.json)
        self.structural_tag = _json_text(self.field, self.structural_tag)
        _check_text(self.field, self.regex)
        _check_text(self.field, self.grammar)
        if self.choice is not None:
            _check_choice(self.field, self.choice)
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise InvalidRequestError(self.field, f"expected true or false, got {json_type(self.json_object)}")
        self._check_options()
        if self.disable_additional_properties and self.json is not None:
            self.json = json.dumps(close_objects(json.loads(self.json)), ensure_ascii=False)

    @classmethod
    def from_fields(cls, name: str, given: Mapping[str, Any]) -> StructuredOutputsParams:
        """Return the constraint of an object of a request, in which null means not given.

        Args:
            name: the object's field, for errors.

        Raises:
            InvalidRequestError: it has an unknown field, with the nearest known one, or is invalid; names the field.
        """
        given = {str(key): value for key, value in given.items() if value is not None}
        for key in given:
            if key not in FORM_KEYS:
                nearest = difflib.get_close_matches(key[:64], FORM_KEYS, n=1)
                hint = f"did you mean {nearest[0]!r}?" if nearest else f"known keys: {', '.join(FORM_KEYS)}"
                raise InvalidRequestError(f"{name}.{key[:64]}", f"unknown key; {hint}")
        if given.get("json") is False:
            raise InvalidRequestError(f"{name}.json", "no value matches the schema false")
        return cls(**given)

    @property
    def kind(self) -> str:
        """Return the name of the attribute that is set."""
        return next(name for name in KINDS if _is_set(getattr(self, name)))

    @property
    def field(self) -> str:
        """Return the field of the request that errors name."""
        return self.source

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the attributes that define the form; forms with equal ones are the same."""
        names = (self.kind, *(name for name in _KINDS_BY_OPTION if getattr(self, name)))
        arguments = {name: getattr(self, name) for name in names}
        return {**arguments, "schemas": self.schemas} if self.schemas else arguments

    @property
    def json_options(self) -> dict[str, Any]:
        """Return the options of llguidance for the whitespace in JSON, which replace others; empty for the usual."""
        pattern = self.whitespace_pattern
        if pattern is None and not self.disable_any_whitespace:
            return {}
        separators = {"item_separator": ",", "key_separator": ":"}
        return {**separators, "whitespace_pattern": pattern, "whitespace_flexible": pattern is not None}

    def _default_source(self, kind: str) -> str:
        return f"{self.NAME}.{kind}"

    def _check_options(self) -> None:
        for name in ("disable_fallback", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                expected = f"expected true or false, got {shorten(getattr(self, name))}"
                raise InvalidRequestError(f"{self.NAME}.{name}", expected)
        self._note_backend()
        _check_text(f"{self.NAME}.whitespace_pattern", self.whitespace_pattern)
        for name, kinds in _KINDS_BY_OPTION.items():
            if getattr(self, name) and self.kind not in kinds:
                raise InvalidRequestError(f"{self.NAME}.{name}", f"needs {' or '.join(kinds)}, got {self.kind}")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise InvalidRequestError(f"{self.NAME}.whitespace_pattern", "contradicts disable_any_whitespace")

    def _note_backend(self) -> None:
        if self.backend is None:
            return
        name = f"{self.NAME}.backend"
        if self.backend not in BACKENDS:
            raise InvalidRequestError(name, f"expected one of {', '.join(BACKENDS)}, got {shorten(self.backend)}")
        if self.backend in OTHER_BACKENDS:
            note_once(f"{name} {self.backend} has no effect: {BACKEND_NOTE}")
        self.backend = None


@dataclass
class GuidedDecodingParams(StructuredOutputsParams):
    """The same for `SamplingParams(guided_decoding=...)`; errors name the fields `guided_json`, `guided_regex`, ..."""

    NAME: ClassVar[str] = "guided_decoding"

    def _default_source(self, kind: str) -> str:
        return kind if kind == "structural_tag" else f"guided_{kind}"


def _is_set(value: Any) -> bool:
    return value is not None and value is not False


def _json_text(field: str, value: Any) -> str | None:
    """Return a mapping, or the JSON schema True, as JSON text; check that a string is JSON."""
    if value is None:
        return None
    if isinstance(value, str):
        _check_text(field, value)
        parse_json(field, value)
        return value
    if not isinstance(value, (dict, bool)):
        raise InvalidRequestError(field, f"expected a JSON object or its text, got {json_type(value)}")
    text = write_json(field, value)
    _check_text(field, text)
    return text


def _check_text(field: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(field, "expected a non-empty string")
    check_unicode(field, value)
    if len(value.encode(errors="replace")) > MAX_SPEC_BYTES:
        raise InvalidRequestError(field, f"expected at most {MAX_SPEC_BYTES} bytes")


def _check_choice(field: str, choice: Any) -> None:
    if not isinstance(choice, list) or not choice or any(not isinstance(text, str) or not text for text in choice):
        raise InvalidRequestError(field, "expected a non-empty list of non-empty strings")
    _check_text(field, "".join(choice))
