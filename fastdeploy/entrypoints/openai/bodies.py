# SPDX-License-Identifier: Apache-2.0
"""Reads and parses the body of a request."""

from __future__ import annotations

import difflib
import json
from email.message import Message
from functools import cache
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.entrypoints.openai.errors import ApiError
from fastdeploy.entrypoints.openai.protocol import (
    REFUSED,
    WITHOUT_EFFECT,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
)

MAX_BODY_BYTES = 32 * 2**20
LARGE_BODY_BYTES = 8 * 2**10  # bodies of this size and above are parsed in a thread, not in the event loop

T = TypeVar("T", bound=msgspec.Struct)


async def read_body(request: Request) -> bytes:
    """Return the body.

    Raises:
        ApiError: 413 if it is too large; 415 if it is compressed or, according to its header, not JSON in UTF-8.
    """
    _check_headers(request)
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
    return bytes(body)


def parse_body(body: bytes, model: type[T]) -> T:
    """Parse a JSON body into `model`.

    Raises:
        ApiError: 400, naming the field: no JSON object, a duplicate field, an unknown field (with the nearest known
            one), a field of the wrong type, or a refused one.
    """
    given = _decode(body)
    known = _known_fields(model)
    is_generation = issubclass(model, GenerationFields)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name in known:
            if value is not None:
                values[name] = _convert(name, value, known[name])
        elif is_generation and name in REFUSED:
            _check_refused(name, value)
        elif is_generation and name == "metadata":
            _check_metadata(value)
        elif not is_generation or name not in WITHOUT_EFFECT:
            raise _unknown_field(name, model)
    request = model(**values)
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


def _too_large() -> ApiError:
    return ApiError(413, f"the body may have at most {MAX_BODY_BYTES} bytes", code="request_too_large")


@cache
def _known_fields(model: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(model)}  # resolving annotations takes 2 ms


def _decode(body: bytes) -> dict[str, Any]:
    try:
        given = msgspec.json.decode(body)
        json.loads(body, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(given, dict):
        raise ApiError(400, f"the body must be a JSON object, got {_json_type(given)}", code="invalid_json")
    return given


def _without_duplicates(pairs: list[tuple[str, Any]]) -> None:
    """Refuse a duplicate key: parsers differ in which of its values they use."""
    seen = set()
    for name, _ in pairs:
        if name in seen:
            raise ApiError(400, f"{name}: given twice in one object", param=name, code="invalid_json")
        seen.add(name)


def _convert(name: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text = str(error).replace("`", "").replace(" | null", "").replace("$", name)
        raise InvalidRequestError(name, text[:1].lower() + text[1:]) from None


def _check_refused(name: str, value: Any) -> None:
    reason, neutral = REFUSED[name]
    if value is not None and value not in neutral:
        raise ApiError(400, f"{name}: {reason}", param=name, code="unsupported_parameter")


def _check_metadata(value: Any) -> None:
    """Refuse values that are not texts: older clients of FastDeploy put settings here, which would have no effect."""
    if value is not None and (not isinstance(value, dict) or not all(isinstance(tag, str) for tag in value.values())):
        raise InvalidRequestError("metadata", "expected a mapping to texts; settings are fields of their own")


def _unknown_field(name: str, model: type[msgspec.Struct]) -> ApiError:
    if model is CompletionRequest and name in _known_fields(ChatCompletionRequest):
        hint = "it belongs to /v1/chat/completions"
    elif model is ChatCompletionRequest and name in _known_fields(CompletionRequest):
        hint = "it belongs to /v1/completions"
    else:
        known = [*_known_fields(model), *([*REFUSED, *WITHOUT_EFFECT] if issubclass(model, GenerationFields) else [])]
        nearest = difflib.get_close_matches(name[:64], known, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else ""
    message = f"{name[:64]}: unknown field" + (f"; {hint}" if hint else "")
    return ApiError(400, message, param=name[:64], code="unknown_parameter")


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
