# SPDX-License-Identifier: Apache-2.0
"""Middleware: API keys, and the metrics of HTTP requests."""

from __future__ import annotations

import time
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastdeploy.entrypoints.openai.clients import Client, ClientKeys, set_client
from fastdeploy.entrypoints.openai.errors import ApiError, error_response
from fastdeploy.metrics.server_metrics import HttpMetrics

DISCONNECTED_STATUS = 499  # of a response that never began because its client had disconnected
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")
OTHER = "other"  # label of unknown paths and methods, so that clients cannot create any number of series


def path_of(scope: Scope) -> str:
    """Return the path of a request without the server's root path."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path


class ApiKeyMiddleware:
    """Requires one of the API keys as `Authorization: Bearer KEY`, except for open paths."""

    def __init__(self, app: ASGIApp, keys: ClientKeys, open_paths: Collection[str]) -> None:
        """Protect `app`; requests for `open_paths` need no key."""
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle requests for open paths and those with a valid key; answer the others with 401."""
        if scope["type"] != "http" or path_of(scope) in self._open_paths:
            await self._app(scope, receive, send)
            return
        client = self._find_client(scope)
        if client is None:
            error = ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY",
                type="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error_response(error)(scope, receive, send)
            return
        set_client(scope, client)
        await self._app(scope, receive, send)

    def _find_client(self, scope: Scope) -> Client | None:
        header = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = header.partition(b" ")
        return self._keys.find(key.strip()) if scheme.lower() == b"bearer" else None


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
            path = path_of(scope)
            method = scope["method"] if scope["method"] in METHODS else OTHER
            self._metrics.observe(method, path if path in self._paths else OTHER, status, time.monotonic() - begin)
