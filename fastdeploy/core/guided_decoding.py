# SPDX-License-Identifier: Apache-2.0
"""What the form of an output must be."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from fastdeploy.core.errors import InvalidRequestError

MAX_SPEC_BYTES = 1 << 20


@dataclass
class GuidedDecodingParams:
    """A constraint on the output's form; exactly one kind is given.

    Attributes:
        json: a JSON schema, as mapping or text.
        regex: a regular expression that the whole output matches.
        choice: texts of which the output is one.
        grammar: a context-free grammar in Lark or GBNF notation.
        json_object: True asks for any JSON object.
        structural_tag: tags whose content follows a schema, as mapping or text, in the shape of the field of that name.
    """

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None

    def __post_init__(self) -> None:
        """Check that one kind is given and has the right type; mappings become their JSON text.

        Raises:
            InvalidRequestError: naming the kind.
        """
        given = [spec.name for spec in fields(self) if getattr(self, spec.name) not in (None, False)]
        if len(given) != 1:
            raise InvalidRequestError(
                "guided_decoding", f"expected exactly one kind of constraint, got {given or 'none'}"
            )
        for name in ("json", "structural_tag"):
            setattr(self, name, _json_text(name, getattr(self, name)))
        for name in ("regex", "grammar"):
            _check_text(name, getattr(self, name))
        if self.choice is not None:
            _check_choice(self.choice)

    @property
    def kind(self) -> str:
        """The attribute that is set."""
        return next(spec.name for spec in fields(self) if getattr(self, spec.name) not in (None, False))


def _json_text(name: str, value: Any) -> str | None:
    """Return a mapping (or a JSON schema's True) as text, and check a text to be JSON."""
    if value is None:
        return None
    if isinstance(value, str):
        _check_text(name, value)
        try:
            json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"guided_{name}", f"is not valid JSON: {error}") from None
        return value
    if not isinstance(value, (dict, bool)):
        raise InvalidRequestError(f"guided_{name}", f"expected a JSON object or its text, got {type(value).__name__}")
    text = json.dumps(value, ensure_ascii=False)
    _check_text(name, text)
    return text


def _check_text(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"guided_{name}", "expected a text that is not empty")
    if len(value.encode()) > MAX_SPEC_BYTES:
        raise InvalidRequestError(f"guided_{name}", f"expected at most {MAX_SPEC_BYTES} bytes")


def _check_choice(choice: Any) -> None:
    if not isinstance(choice, list) or not choice or any(not isinstance(text, str) or not text for text in choice):
        raise InvalidRequestError("guided_choice", "expected a list of texts, not empty")
    _check_text("choice", "".join(choice))
