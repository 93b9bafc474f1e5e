# SPDX-License-Identifier: Apache-2.0
"""Limits of JSON schemas whose compilation is known to take long; what they miss is stopped by the trial of a form."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Any

from fastdeploy.core.errors import InvalidRequestError

MAX_PROPERTIES = 1000  # of one object: the time is quadratic, and about 0.2 s for this many
MAX_MULTIPLE_OF_DIGITS = 5  # time and memory are proportional to the number, and about 0.5 s and 60 MiB for 99,991


def check_schema(field: str, schema: Any) -> None:
    """Raise InvalidRequestError if any part of a JSON schema exceeds a limit; it names the field and the limit."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            _check_properties(field, part.get("properties"))
            _check_multiple_of(field, part.get("multipleOf"))
            parts += part.values()
        elif isinstance(part, list):
            parts += part


def _check_properties(field: str, properties: Any) -> None:
    if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
        found = f"an object has {len(properties)}"
        raise InvalidRequestError(field, f"expected at most {MAX_PROPERTIES} properties; {found}")


def _check_multiple_of(field: str, number: Any) -> None:
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        return
    try:
        num_digits = len(Decimal(repr(number)).normalize().as_tuple().digits)
    except InvalidOperation:
        return
    if num_digits > MAX_MULTIPLE_OF_DIGITS:
        expected = f"at most {MAX_MULTIPLE_OF_DIGITS} significant digits"
        raise InvalidRequestError(field, f"multipleOf: expected a number of {expected}, got {number!r}")
