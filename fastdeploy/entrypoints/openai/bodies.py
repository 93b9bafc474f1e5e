# SPDX-License-Identifier: Apache-2.0
"""Reads and parses the body of a request."""

from __future__ import annotations

import difflib
from email.message import Message
from functools import cache
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from starlette.requests import ClientDisconnect, Request

from fastdeploy.config.server_config import ServerConfig
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.entrypoints.openai.clients import client_of
from fastdeploy.entrypoints.openai.connection_gate import SMALL_BODY_BYTES, body_of
from fastdeploy.entrypoints.openai.errors import ApiError
from fastdeploy.entrypoints.openai.field_rules import FieldRules, objects_of, rules_of
from fastdeploy.entrypoints.openai.json_fields import (
    check_duplicates,
    check_size,
    convert_field,
    decode_field,
    decoder_of,
    split_object,
)
from fastdeploy.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    RequestFields,
)
from fastdeploy.entrypoints.openai.unknown_fields import IGNORED_FIELDS, clean_object

LARGE_BODY_BYTES = 8 * 2**10  # bodies of this size and above are parsed in a thread, not in the event loop

_ANY = decoder_of(Any)
T = TypeVar("T", bound=msgspec.Struct)


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """Return the body, whose memory counts as in flight until `release_body` or the end of the request.

    Raises:
        ApiError: 413 if it is too large; 415 if it is compressed or, according to its header, not JSON in UTF-8; 400,
            408 or 503 if the connection cannot deliver it.
        ClientDisconnect: the client has closed the connection.
    """
    _check_headers(request)
    max_size = config.max_body_size
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_size:
        raise _too_large(max_size)
    parts: list[bytes] = []
    num_bytes, has_more = 0, True
    while has_more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        in_flight = body_of(request.scope)
        if in_flight is not None and in_flight.error is not None:
            raise in_flight.error
        parts.append(message["body"])
        num_bytes += len(message["body"])
        if num_bytes > max_size:
            raise _too_large(max_size)
        has_more = message["more_body"]
        if has_more and in_flight is not None and num_bytes > SMALL_BODY_BYTES and not in_flight.client:
            in_flight.count_for(client_of(request.scope).id)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def parse_body(body: bytes, model: type[T], config: ServerConfig) -> T:
    """Parse a JSON body into `model`; fields that are null count as absent, also in objects and unknown ones.

    Raises:
        ApiError: 400, naming the field: no JSON object, a duplicate field, an unknown field (with the nearest known
            one) unless the server ignores them, a field of the wrong type, a refused one, or one with too many or too
            deeply nested values.
    """
    given = split_object(body)
    known = _known_fields(model)
    rules = rules_of(model)
    unknown = [name for name in given if not (name in known or name in rules.refused or name in rules.without_effect)]
    for name in unknown:
        if bytes(given[name]) != b"null":
            if not config.ignore_unknown_fields:
                raise _unknown_field(name, model)
            IGNORED_FIELDS.record(name)
    check_size(body, given, config.max_json_depth, config.max_json_elements)
    values = {name: decode_field(name, text, known.get(name, _ANY)) for name, text in given.items()}
    check_duplicates(body, given, values)
    for name in unknown:
        del values[name]
    used = {}
    for name, value in _clean_objects(values, model, config.ignore_unknown_fields).items():
        if name in known:
            used[name] = value
        else:
            _check_without_effect(rules, name, value)
    request = model(**used)
    if isinstance(request, GenerationFields) and request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options", "needs stream: true")
    return request


def _check_headers(request: Request) -> None:
    """Refuse media types other than JSON: browsers send those for pages of other sites without a CORS preflight."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise _unsupported(f"content-encoding: expected none, got {encoding[:64]!r}: send the body uncompressed")
    content_type = request.headers.get("content-type")
    if content_type is None or content_type == "application/json":
        return
    header = Message()
    header["content-type"] = content_type
    media_type, charset = header.get_content_type(), header.get_content_charset("utf-8")
    if media_type != "application/json" or charset not in ("utf-8", "utf8", "us-ascii"):
        raise _unsupported(f"content-type: expected application/json, got {content_type[:64]!r}")


def _unsupported(message: str) -> ApiError:
    return ApiError(415, message, code="unsupported_media_type")


def _too_large(max_size: int) -> ApiError:
    return ApiError(413, f"the body may have at most {max_size} bytes", code="request_too_large")


@cache
def _known_fields(model: type[msgspec.Struct]) -> dict[str, msgspec.json.Decoder[Any]]:
    """Return a decoder for each field; objects with fields of their own are converted after the check of these."""
    structs = _nested_structs(model)
    return {
        field.name: _ANY if field.name in structs else decoder_of(field.type) for field in msgspec.structs.fields(model)
    }  # resolving annotations takes 2 ms


@cache
def _nested_structs(model: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """Return the fields whose value is an object that is described by a struct."""
    return {
        field.name: kind
        for field in msgspec.structs.fields(model)
        if get_origin(field.type) is UnionType  # such as `StreamOptions | None`
        for kind in get_args(field.type)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    }


def _clean_objects(values: dict[str, Any], model: type[msgspec.Struct], ignores_unknown: bool) -> dict[str, Any]:
    """Return the fields that are not null; in objects whose fields are known, nulls count as absent as well."""
    values = {name: value for name, value in values.items() if value is not None}
    structs = _nested_structs(model)
    if dict not in map(type, values.values()) and structs.keys().isdisjoint(values):
        return values
    for path, known in objects_of(model).items():
        parent, _, name = path.rpartition(".")
        fields = values.get(parent) if parent else values
        if isinstance(fields, dict) and isinstance(value := fields.get(name), dict):
            fields[name] = clean_object(path, value, known, ignores_unknown)
    for name, kind in structs.items():
        if isinstance(value := values.get(name), dict):
            value = clean_object(name, value, kind.__struct_fields__, ignores_unknown)
            for key in value:
                if key not in kind.__struct_fields__:
                    known = ", ".join(kind.__struct_fields__)
                    raise InvalidRequestError(f"{name}.{key[:64]}", f"unknown key; known keys: {known}")
        if name in values:
            values[name] = convert_field(name, value, kind)
    return values


def _check_without_effect(rules: FieldRules, name: str, value: Any) -> None:
    """Check a field that the server does not use."""
    if name in rules.refused:
        _check_refused(rules, name, value)
        return
    rules.note(name, name, value)
    if name == "metadata":
        _check_metadata(value)


def _check_refused(rules: FieldRules, name: str, value: Any) -> None:
    reason, neutral = rules.refused[name]
    if value not in neutral:
        raise ApiError(400, f"{name}: {reason}", param=name, code="unsupported_parameter")


def _check_metadata(value: Any) -> None:
    """Refuse values that are not texts: older clients of FastDeploy put settings here, which would have no effect."""
    if not isinstance(value, dict) or not all(isinstance(tag, str | None) for tag in value.values()):
        raise InvalidRequestError("metadata", "expected a mapping to texts; settings are fields of their own")


def _unknown_field(name: str, model: type[msgspec.Struct]) -> ApiError:
    if issubclass(model, RequestFields) and name in _known_fields(ChatCompletionRequest):
        hint = "it belongs to /v1/chat/completions"
    elif issubclass(model, RequestFields) and name in _known_fields(CompletionRequest):
        hint = "it belongs to /v1/completions"
    else:
        rules = rules_of(model)
        known = [*_known_fields(model), *rules.refused, *rules.without_effect]
        nearest = difflib.get_close_matches(name[:64], known, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else ""
    message = f"{name[:64]}: unknown field" + (f"; {hint}" if hint else "")
    return ApiError(400, message, param=name[:64], code="unknown_parameter")
