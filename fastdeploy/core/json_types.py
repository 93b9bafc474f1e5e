# SPDX-License-Identifier: Apache-2.0
"""JSON in error messages: the names of its types, and its depth."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastdeploy.core.errors import InvalidRequestError

MAX_DEPTH = 64  # of objects and arrays in one another; the readers of JSON recurse
_NAMES = {str: "a string", bool: "a boolean", int: "a number", float: "a number", type(None): "null"}


def json_type(value: Any) -> str:
    """Return the name of a value's JSON type, with its article: `an object`."""
    if isinstance(value, Mapping):
        return "an object"
    return "an array" if isinstance(value, (list, tuple)) else _NAMES.get(type(value), type(value).__name__)


def parse_json(field: str, text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        InvalidRequestError: the text is not valid JSON, or nested too deeply; names the field.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep(field) from None
    except ValueError as error:
        raise InvalidRequestError(field, f"is not valid JSON: {error}") from None
    check_depth(field, value)
    return value


def write_json(field: str, value: Any) -> str:
    """Return a value as JSON text.

    Raises:
        InvalidRequestError: JSON cannot express the value, or it is nested too deeply; names the field.
    """
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise _too_deep(field) from None
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(field, f"is not valid JSON: {error}") from None
    check_depth(field, value)
    return text


def check_depth(field: str, value: Any) -> None:
    """Raise InvalidRequestError if objects and arrays are nested more than MAX_DEPTH levels deep."""
    level, depth = _containers([value]), 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep(field)
        level = [part for one in level for part in _containers(one.values() if isinstance(one, Mapping) else one)]


def _containers(values: Any) -> list[Any]:
    return [value for value in values if isinstance(value, (Mapping, list, tuple))]


def _too_deep(field: str) -> InvalidRequestError:
    return InvalidRequestError(
        field, f"is nested too deeply: expected at most {MAX_DEPTH} levels of objects and arrays"
    )
