# SPDX-License-Identifier: Apache-2.0
"""The form of the output, from the fields in which OpenAI, vLLM and FastDeploy ask for one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.guided_decoding import GuidedDecodingParams
from fastdeploy.entrypoints.openai.protocol import GenerationFields

KINDS_BY_FIELD = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
TAG_KEYS = ("structures", "triggers", "format")


def guided_decoding(asked: GenerationFields) -> GuidedDecodingParams | None:
    """Return the form that a request asks for, None if it may be any.

    Raises:
        InvalidRequestError: more than one form is asked for, or one is not well made; names the field.
    """
    given = {name: value for name in KINDS_BY_FIELD if (value := getattr(asked, name)) is not None}
    by_format = _response_format(asked.response_format)
    names = [*given, *(["response_format"] if by_format is not None else [])]
    if len(names) > 1:
        raise InvalidRequestError(names[-1], f"a request has one form at most; this one has {' and '.join(names)}")
    for name, value in given.items():
        if value is False:
            raise InvalidRequestError(name, "the schema false has no value")
        return GuidedDecodingParams(**{KINDS_BY_FIELD[name]: value}, source=name)
    return by_format


def _response_format(given: Mapping[str, Any] | None) -> GuidedDecodingParams | None:
    if given is None:
        return None
    kind = given.get("type")
    source = "response_format"
    if kind == "text":
        _check_keys(source, given, ("type",))
        return None
    if kind == "json_object":
        _check_keys(source, given, ("type",))
        return GuidedDecodingParams(json_object=True, source=source)
    if kind == "json_schema":
        _check_keys(source, given, ("type", "json_schema"))
        return _json_schema("response_format.json_schema", given.get("json_schema"))
    if kind == "structural_tag":
        _check_keys(source, given, ("type", *TAG_KEYS))
        return GuidedDecodingParams(structural_tag=dict(given), source=source)
    raise InvalidRequestError("response_format.type", f"expected one of {', '.join(RESPONSE_FORMATS)}, got {kind!r}")


def _json_schema(at: str, given: Any) -> GuidedDecodingParams:
    """Read OpenAI's `json_schema`: the schema is followed to the letter, whatever `strict` says."""
    if not isinstance(given, Mapping):
        raise InvalidRequestError(at, f"expected an object with name and schema, got {type(given).__name__}")
    _check_keys(at, given, ("name", "schema", "strict", "description"))
    for name, kind in (("name", str), ("description", str), ("strict", bool)):
        value = given.get(name)
        if value is not None and not isinstance(value, kind):
            raise InvalidRequestError(f"{at}.{name}", f"expected a {kind.__name__}, got {type(value).__name__}")
    schema = given.get("schema")
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(f"{at}.schema", f"expected an object, got {type(schema).__name__}")
    return GuidedDecodingParams(json=dict(schema), source="response_format")


def _check_keys(at: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    for key in given:
        if key not in known:
            raise InvalidRequestError(f"{at}.{key}", f"unknown key; known keys: {', '.join(known)}")
