# SPDX-License-Identifier: Apache-2.0
"""Middleware: the root path, request ids, API keys, and the metrics of HTTP requests."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastdeploy.entrypoints.openai.clients import Client, ClientKeys, set_client
from fastdeploy.entrypoints.openai.errors import REQUEST_ID_KEY, ApiError, error_response
from fastdeploy.metrics.server_metrics import HttpMetrics

DISCONNECTED_STATUS = 499  # of a response that never began because its client had disconnected
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")
REQUEST_ID_HEADER = "X-Request-Id"
MAX_HEADER_ID_LENGTH = 96  # of X-Request-Id, to which a random suffix is appended
OTHER = "other"  # label of unknown paths and methods, so that clients cannot create any number of series


def without_root_path(path: str, root_path: str) -> str:
    """Return the one form of a path that routes, keys, metrics and errors know: without the root path.

    A proxy may forward requests with the root path or without it. It is removed once: what remains is the path of a
    route, or of none.
    """
    is_below = path == root_path or path.startswith(f"{root_path}/")
    return path.removeprefix(root_path) or "/" if is_below else path


class RootPathMiddleware:
    """Removes the root path from the paths of requests, so that all else sees one form of each path."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        """Serve `app` under `root_path`, which does not end with a slash, and under /."""
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request under its path without the root path."""
        if scope["type"] == "http":
            scope["path"] = without_root_path(scope["path"], self._root_path)
        await self._app(scope, receive, send)


class RequestIdMiddleware:
    """Adds `X-Request-Id` to responses without it: the client's, if it is valid, or a fresh one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request whose id errors can name (`request_id_of`)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[REQUEST_ID_KEY] = request_id = header_id_of(scope) or uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault(REQUEST_ID_HEADER, request_id)
            await send(message)

        await self._app(scope, receive, send_with_id)


def header_id_of(scope: Scope) -> str | None:
    """Return the client's `X-Request-Id`; None if there is none, or it is empty, too long or not printable ASCII."""
    header = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
    is_valid = 1 <= len(header) <= MAX_HEADER_ID_LENGTH and header.isascii() and header.isprintable()
    return header if is_valid else None


def request_id_of(scope: Scope) -> str:
    """Return the id that errors of a request name: that of its response, if the server adds it, or a fresh one."""
    request_id: str = scope.get(REQUEST_ID_KEY) or header_id_of(scope) or uuid.uuid4().hex
    scope[REQUEST_ID_KEY] = request_id  # the same one each time
    return request_id


class ApiKeyMiddleware:
    """Requires one of the API keys as `Authorization: Bearer KEY` or `x-api-key: KEY`, except for open paths."""

    def __init__(self, app: ASGIApp, keys: ClientKeys, open_paths: Collection[str]) -> None:
        """Protect `app`; requests for `open_paths` need no key."""
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle requests for open paths and those with a valid key; answer the others with 401."""
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        client = self._find_client(scope)
        if client is None:
            error = ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY; both must agree",
                type="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error_response(error)(scope, receive, send)
            return
        set_client(scope, client)
        await self._app(scope, receive, send)

    def _find_client(self, scope: Scope) -> Client | None:
        """Return the client whose key is in all headers for keys that the request has."""
        headers = dict(scope["headers"])
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        keys = {key.strip() if scheme.lower() == b"bearer" else b""} if b"authorization" in headers else set()
        if b"x-api-key" in headers:
            keys.add(headers[b"x-api-key"].strip())
        return self._keys.find(keys.pop()) if len(keys) == 1 else None


class MetricsMiddleware:
    """Counts responses and measures their duration."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, paths: Collection[str]) -> None:
        """Measure `app`; requests for other paths than `paths` are counted together."""
        self._app = app
        self._metrics = metrics
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request and record its status and duration."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status = time.monotonic(), DISCONNECTED_STATUS

        async def send_and_record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_record_status)
        finally:
            path = scope["path"]
            method = scope["method"] if scope["method"] in METHODS else OTHER
            self._metrics.observe(method, path if path in self._paths else OTHER, status, time.monotonic() - begin)
