# SPDX-License-Identifier: Apache-2.0
"""Texts and JSON values of clients: their limits, and how errors show them.

Python reads lone surrogates, which cannot be sent to anybody, and values so deep that they can be read but no longer
written. What these functions accept can be converted, stored, printed and sent.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from fastdeploy.core.errors import InvalidRequestError

MAX_DEPTH = 64  # of objects and arrays in one another; the readers of JSON recurse
MAX_SHOWN = 64  # characters of a value in an error
MAX_SHOWN_BITS = 200  # of an integer, which are at most 61 digits
_NAMES = {str: "a string", bool: "a boolean", int: "a number", float: "a number", type(None): "null"}


def json_type(value: Any) -> str:
    """Return the name of a value's JSON type, with its article: `an object`."""
    if isinstance(value, Mapping):
        return "an object"
    return "an array" if isinstance(value, (list, tuple)) else _NAMES.get(type(value), type(value).__name__)


def shorten(value: Any) -> str:
    """Return how an error shows a value: its beginning, or the name of its type if it is a container or very large."""
    if isinstance(value, str):
        return repr(value[:MAX_SHOWN])
    is_large = isinstance(value, int) and value.bit_length() > MAX_SHOWN_BITS
    return json_type(value) if is_large or isinstance(value, (Mapping, list, tuple)) else repr(value)[:MAX_SHOWN]


def to_python(value: Any) -> Any:
    """Return a number or an array of NumPy, or of a library like it, as Python's number or list; others as they are."""
    tolist = getattr(value, "tolist", None)
    return value if tolist is None else tolist()


def to_list(field: str, value: Any, expected: str) -> list[Any]:
    """Return the items of a list, of an array, or of another iterable that is no text and no mapping.

    Raises:
        InvalidRequestError: it is none of these; the message begins with `expected`.
    """
    items = None if isinstance(value, (str, bytes, bytearray, memoryview, Mapping)) else to_python(value)
    if not isinstance(items, Iterable):
        raise InvalidRequestError(field, f"{expected}, got {shorten(value)}")
    return list(items)


def to_integer(value: Any) -> Any:
    """Return a whole number as an int, whatever type it has; other values are returned as they are.

    In JSON 5.0 is an integer, equal to 5, and NumPy has integers of its own. A boolean is none.
    """
    if type(value) is int:
        return value
    value = to_python(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    return operator.index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else value


def to_integers(values: Iterable[Any]) -> list[Any]:
    """Return the values of a list or an array, each converted by `to_integer`."""
    values = list(to_python(values))
    return values if set(map(type, values)) <= {int} else [to_integer(value) for value in values]


def to_number(value: Any) -> Any:
    """Return a real number as an int or a float, whatever type it has; other values are returned as they are."""
    value = to_python(value)
    if isinstance(value, (int, float, str)) or not hasattr(value, "__float__"):
        return value
    try:
        return float(value)
    except OverflowError:
        return value


def with_integers(value: Any) -> Any:
    """Return a JSON value whose whole numbers, at any depth, are ints."""
    if isinstance(value, list):
        return [with_integers(item) for item in value]
    if isinstance(value, dict):
        return {name: with_integers(item) for name, item in value.items()}
    return to_integer(value)


def parse_json(field: str, text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        InvalidRequestError: the text is not valid JSON, is nested too deeply, or has a lone surrogate or a number
            that is not finite; names the field.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep(field) from None
    except ValueError as error:
        raise InvalidRequestError(field, f"is not valid JSON: {error}") from None
    check_json(field, value)
    return value


def write_json(field: str, value: Any) -> str:
    """Return a value as JSON text.

    Raises:
        InvalidRequestError: JSON cannot express the value, it is nested too deeply, or has a lone surrogate; names the
            field.
    """
    check_json(field, value)
    try:
        return json.dumps(value, ensure_ascii=False)
    except (RecursionError, TypeError, ValueError) as error:
        raise InvalidRequestError(field, f"is not valid JSON: {error}") from None


def check_json(field: str, value: Any, max_length: int | None = None) -> None:
    """Check the depth of a value, its texts, names and numbers, and its length.

    Args:
        max_length: limit of the characters of all texts and names, plus one for each value; None for no limit.

    Raises:
        InvalidRequestError: more than `MAX_DEPTH` objects and arrays are nested, the value is longer than `max_length`,
            or has a lone surrogate or a number that is not finite; names the field.
    """
    length, depth, level = 0, 0, [value]
    while level:
        containers = [item for item in level if isinstance(item, (Mapping, list, tuple))]
        texts = [item for item in level if isinstance(item, str)]
        texts += [name for item in containers if isinstance(item, Mapping) for name in item if isinstance(name, str)]
        length += len(level) + sum(map(len, texts))
        if max_length is not None and length > max_length:
            raise InvalidRequestError(field, f"expected at most {max_length} characters of JSON")
        for text in texts:
            check_unicode(field, text)
        if any(isinstance(item, float) and not math.isfinite(item) for item in level):
            raise InvalidRequestError(field, "expected finite numbers, which JSON can express")
        depth += bool(containers)
        if depth > MAX_DEPTH:
            raise _too_deep(field)
        level = [part for item in containers for part in (item.values() if isinstance(item, Mapping) else item)]


def check_unicode(field: str, text: str) -> None:
    """Raise InvalidRequestError if a text has a lone surrogate, and so cannot be encoded as UTF-8."""
    if text.isascii():  # known without looking at the text
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = ascii(text[error.start])
        raise InvalidRequestError(
            field, f"expected valid Unicode, got the lone surrogate {surrogate} at character {error.start}"
        ) from None


def replace_surrogates(text: str) -> str:
    """Return a text in which lone surrogates are written as escapes, such as `\\ud800`."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def _too_deep(field: str) -> InvalidRequestError:
    return InvalidRequestError(
        field, f"is nested too deeply: expected at most {MAX_DEPTH} levels of objects and arrays"
    )
