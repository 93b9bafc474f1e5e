# SPDX-License-Identifier: Apache-2.0
"""Decodes the fields of a JSON object one by one, after checks of the text whose cost is small and linear.

A text of a few megabytes can hold millions of values, whose decoding takes seconds and gigabytes. msgspec holds the
interpreter's lock all that time, so a thread would not help. Depth and number of the values are therefore counted in
the text with operations on bytes, before anything is built.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.json_types import with_integers
from fastdeploy.entrypoints.openai.errors import ApiError

_ANY = msgspec.json.Decoder(Any)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SPACE = b" \t\n\r"
_END_OF_KEY, _OTHER_ENDS = b'":', (b" :", b"\t:", b"\n:", b"\r:")
_WITHOUT_KEYS = frozenset({str, int, float, bool, type(None)})
_TO_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


def split_object(text: bytes) -> dict[str, msgspec.Raw]:
    """Return the fields of a JSON object as texts, none of them decoded; of a duplicate key the last one.

    Raises:
        ApiError: 400, the text is not valid JSON, or no object.
    """
    try:
        return _FIELDS.decode(text)
    except msgspec.ValidationError as error:
        got = str(error).rpartition("got ")[2].strip("`")
        raise _invalid_json(f"the body must be a JSON object, got {_JSON_TYPES.get(got, 'a number')}") from None
    except RecursionError:
        raise _invalid_json("the body is not valid JSON: too many arrays and objects in each other") from None
    except ValueError as error:  # of msgspec, or of a key that is not UTF-8
        hint = "; half of a surrogate pair is not a text" if _SURROGATE.search(text) else ""
        raise _invalid_json(f"the body is not valid JSON: {error}{hint}") from None


def check_size(text: bytes, fields: Mapping[str, msgspec.Raw], max_depth: int, max_elements: int) -> None:
    """Check depth and number of the values in a body.

    Args:
        text: the whole body.
        fields: its fields, from `split_object`.
        max_depth: of each field.
        max_elements: values and keys in all fields.

    Raises:
        InvalidRequestError: a field has too many levels, or too many values and keys with the fields before it.
    """
    num_open = text.count(b"[") + text.count(b"{")  # this counts the characters in strings, too
    if num_open <= max_depth and num_open + text.count(b",") + text.count(b":") < max_elements:
        return
    total = 0
    for name, value in fields.items():
        outline = _outline(bytes(value), max_elements)
        total += max_elements + 1 if outline is None else _num_elements(outline)
        if outline is None or total > max_elements:
            raise InvalidRequestError(name, f"more than {max_elements} values and keys (--max-json-elements)")
        if _is_deeper(outline, max_depth):
            message = f"more than {max_depth} arrays and objects in each other (--max-json-depth)"
            raise InvalidRequestError(name, message)


@cache
def decoder_of(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return the decoder of values of a type and of null; msgspec takes 10 us to make one."""
    return msgspec.json.Decoder(kind | None if kind is not Any else Any)


def decode_field(name: str, text: msgspec.Raw, decoder: msgspec.json.Decoder[Any]) -> Any:
    """Return the value of a field; where its type has integers, 5.0 is one.

    Raises:
        InvalidRequestError: it is not of the decoder's type.
        ApiError: 400, a text in it is not valid UTF-8.
    """
    try:
        try:
            return decoder.decode(text)
        except msgspec.ValidationError:
            return convert_field(name, _ANY.decode(text), decoder.type)
    except msgspec.ValidationError as error:
        raise _wrong_type(name, error) from None
    except (ValueError, RecursionError) as error:
        raise _invalid_json(f"{name}: is not valid JSON: {error}", name) from None


def convert_field(name: str, value: Any, kind: Any) -> Any:
    """Return a decoded value as a value of a type; where the type has integers, 5.0 is one.

    Raises:
        InvalidRequestError: it is not of that type.
    """
    try:
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError:
            return msgspec.convert(with_integers(value), kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(name, error) from None


def _wrong_type(name: str, error: msgspec.ValidationError) -> InvalidRequestError:
    message = str(error).replace("`", "").replace(" | null", "").replace("$", name)
    return InvalidRequestError(name, message[:1].lower() + message[1:])


def check_duplicates(text: bytes, fields: Mapping[str, msgspec.Raw], values: Mapping[str, Any]) -> None:
    """Refuse duplicate keys at any depth: parsers differ in which of the values they use.

    Decoding keeps one value per key, so there is a duplicate if the text has more keys than the decoded values.

    Args:
        text: the whole body.
        fields: its fields, from `split_object`.
        values: the decoded fields.

    Raises:
        ApiError: 400, naming the key.
    """
    num_keys = len(fields)
    for name, value in values.items():
        if type(value) not in _WITHOUT_KEYS and b"{" in bytes(fields[name]):
            num_keys += _num_keys(value)
    # The bounds count some colons in strings, too. That makes them larger, so that they never hide a duplicate.
    if text.count(b":") == num_keys:
        return
    if text.count(_END_OF_KEY) <= num_keys and sum(map(text.count, (_END_OF_KEY, *_OTHER_ENDS))) == num_keys:
        return
    outline = _outline(text)
    if outline is not None and outline.count(b":") != num_keys:
        json.loads(text, object_pairs_hook=_raise_duplicate)


def _outline(text: bytes, max_strings: int | None = None) -> bytes | None:
    """Return a JSON text with 0 in place of each string; None if there are more than `max_strings`."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    if max_strings is not None and text.count(b'"') > 2 * max_strings:
        return None
    return b"0".join(text.split(b'"')[::2])


def _num_elements(outline: bytes) -> int:
    """Return the number of values and keys in a JSON text."""
    outline = outline.translate(None, _SPACE)
    num_filled = sum(outline.count(bracket) for bracket in (b"[", b"{"))
    num_filled -= sum(outline.count(empty) for empty in (b"[]", b"{}"))
    return 1 + num_filled + outline.count(b",") + outline.count(b":")


def _is_deeper(outline: bytes, max_depth: int) -> bool:
    """Return whether a JSON text has more levels: each pass removes the innermost level of every branch."""
    brackets = outline.translate(_TO_ONE_KIND, _NOT_BRACKETS)
    for _ in range(max_depth):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _num_keys(value: Any) -> int:
    """Return the number of keys in all objects of a decoded value."""
    count, rest = 0, [value]
    while rest:
        item = rest.pop()
        if type(item) is dict:
            count += len(item)
            rest += item.values()
        elif type(item) is list:
            rest += item
    return count


def _raise_duplicate(pairs: list[tuple[str, Any]]) -> None:
    seen = set()
    for name, _ in pairs:
        if name in seen:
            raise _invalid_json(f"{name[:64]}: given twice in one object", name[:64])
        seen.add(name)


def _invalid_json(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_json")


_JSON_TYPES = {"array": "an array", "str": "a string", "bool": "a boolean", "null": "null"}
