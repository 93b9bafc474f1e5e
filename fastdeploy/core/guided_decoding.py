# SPDX-License-Identifier: Apache-2.0
"""Structured output: the constraint that a request puts on its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.json_types import check_unicode, json_type, parse_json, write_json

MAX_SPEC_BYTES = 1 << 17  # compiling a longer one could take more than a second
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass
class GuidedDecodingParams:
    """A constraint on the output; exactly one kind is set.

    Attributes:
        json: a JSON schema, as a mapping or as JSON text.
        regex: a regular expression that the whole output matches.
        choice: strings of which the output is one.
        grammar: a context-free grammar in Lark or GBNF notation.
        json_object: True allows any JSON object.
        structural_tag: tags whose content follows a schema, as a mapping or as JSON text (docs/guide/serving.md).
        source: the field of the request that this comes from, for errors; by default, the field of its kind.
    """

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    source: str = ""

    def __post_init__(self) -> None:
        """Check that one kind is set and has the right type; convert mappings to JSON text.

        Raises:
            InvalidRequestError: names the field.
        """
        kinds = [name for name in KINDS if _is_set(getattr(self, name))]
        if len(kinds) != 1:
            raise InvalidRequestError(
                "guided_decoding", f"expected exactly one kind of constraint, got {kinds or 'none'}"
            )
        self.json = _json_text(self.field, self.json)
        self.structural_tag = _json_text(self.field, self.structural_tag)
        _check_text(self.field, self.regex)
        _check_text(self.field, self.grammar)
        if self.choice is not None:
            _check_choice(self.field, self.choice)
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise InvalidRequestError(self.field, f"expected true or false, got {json_type(self.json_object)}")

    @property
    def kind(self) -> str:
        """Return the name of the attribute that is set."""
        return next(name for name in KINDS if _is_set(getattr(self, name)))

    @property
    def field(self) -> str:
        """Return the field of the request that errors name."""
        return self.source or ("structural_tag" if self.kind == "structural_tag" else f"guided_{self.kind}")


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
