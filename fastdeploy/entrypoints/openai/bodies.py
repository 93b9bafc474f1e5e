# SPDX-License-Identifier: Apache-2.0
"""The body of a request: how large it may be, and that it is what it says it is."""

from __future__ import annotations

from email.message import Message

from starlette.requests import Request

from fastdeploy.entrypoints.openai.errors import ApiError

MAX_BODY_BYTES = 32 * 2**20
LARGE_BODY_BYTES = 8 * 2**10  # from here on the work on a body is done beside the event loop


async def read_body(request: Request) -> bytes:
    """Return the body.

    Raises:
        ApiError: 413 it is too large, 415 it is compressed or, by its own header, no JSON in UTF-8.
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


def _check_headers(request: Request) -> None:
    """Refuse other forms than JSON: web pages of other sites can send those without the browser asking first."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise _unsupported(f"content-encoding: expected none, got {encoding[:64]!r}: send the body as it is")
    given = request.headers.get("content-type")
    if given is None:
        return
    header = Message()
    header["content-type"] = given
    kind, charset = header.get_content_type(), header.get_content_charset("utf-8")
    if kind != "application/json" or charset not in ("utf-8", "utf8", "us-ascii"):
        raise _unsupported(f"content-type: expected application/json, got {given[:64]!r}")


def _unsupported(message: str) -> ApiError:
    return ApiError(415, message, code="unsupported_media_type")


def _too_large() -> ApiError:
    return ApiError(413, f"the body may hold {MAX_BODY_BYTES} bytes", code="request_too_large")
