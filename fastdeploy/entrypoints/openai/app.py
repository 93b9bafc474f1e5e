# SPDX-License-Identifier: Apache-2.0
"""Routes of the HTTP server."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import uuid
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.entrypoints.openai.chat import ChatJob
from fastdeploy.entrypoints.openai.completions import CompletionJob
from fastdeploy.entrypoints.openai.errors import ApiError, error_response, to_api_error
from fastdeploy.entrypoints.openai.job import Job, JobResponse
from fastdeploy.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, T, parse_body
from fastdeploy.entrypoints.openai.server import ApiServer
from fastdeploy.version import __version__

MAX_BODY_BYTES = 32 * 2**20
LARGE_BODY_BYTES = 64 * 2**10  # from here on the work on a body is done beside the event loop
KEY_SALT = "fastdeploy.key_salt"
OPEN_PATHS = ("/health", "/metrics", "/version")  # probes and dashboards bring no key


def make_app(server: ApiServer) -> Starlette:
    """Return the application; `server` is its state."""
    app = Starlette(
        routes=[
            Route("/v1/completions", _completions, methods=["POST"]),
            Route("/v1/chat/completions", _chat, methods=["POST"]),
            Route("/v1/models", _models),
            Route("/v1/models/{name:path}", _model),
            Route("/health", _health),
            Route("/metrics", _metrics),
            Route("/version", _version),
            Route("/load", _load),
            Route("/config-info", _config_info),
        ],
        exception_handlers={
            ApiError: _on_error,
            InvalidRequestError: _on_error,
            HTTPException: _on_error,
            ClientDisconnect: _on_leaving,
            Exception: _on_error,
        },
    )
    app.state.server = server
    if server.config.api_keys:
        app.add_middleware(_KeyCheck, keys=server.config.api_keys)
    return app


class _KeyCheck:
    """Lets in who brings one of the keys as `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        key = self._known_key(scope)
        if key is None:
            error = ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY",
                type="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error_response(error)(scope, receive, send)
            return
        scope[KEY_SALT] = hashlib.blake2b(key, digest_size=16).hexdigest()
        await self._app(scope, receive, send)

    def _known_key(self, scope: Scope) -> bytes | None:
        brought = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = brought.partition(b" ")
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]  # all, so that time tells nothing
        return key.strip() if kind.lower() == b"bearer" and any(matches) else None


async def _completions(request: Request) -> Any:
    return await _start(request, CompletionRequest, CompletionJob)


async def _chat(request: Request) -> Any:
    return await _start(request, ChatCompletionRequest, ChatJob)


async def _start(request: Request, model: type[T], make_job: Callable[[ApiServer, T], Job]) -> JobResponse:
    """Parse, check, and return the answer that will run the job."""
    server = _server(request)
    server.check_available()
    body = await _read_body(request)

    def prepare() -> Job:
        asked = parse_body(body, model)
        server.check_model(asked.model)
        return make_job(server, asked)

    job = prepare() if len(body) < LARGE_BODY_BYTES else await asyncio.to_thread(prepare)
    for one in job.requests:  # cached prefixes are shared within one key only
        one.cache_salt = f"{request.scope.get(KEY_SALT, '')}{one.cache_salt}"
    return JobResponse(job)


async def _read_body(request: Request) -> bytes:
    too_large = ApiError(413, f"the body may hold {MAX_BODY_BYTES} bytes", code="request_too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise too_large
    return bytes(body)


async def _models(request: Request) -> Response:
    return _json({"object": "list", "data": [_model_card(_server(request))]})


async def _model(request: Request) -> Response:
    server = _server(request)
    server.check_model(request.path_params["name"])
    return _json(_model_card(server))


def _model_card(server: ApiServer) -> dict[str, Any]:
    return {
        "id": server.model_name,
        "object": "model",
        "created": server.created_s,
        "owned_by": "FastDeploy",
        "root": server.engine_config.model,
        "parent": None,
        "max_model_len": server.description().get("max_model_len", server.engine_config.max_model_len),
    }


async def _health(request: Request) -> Response:
    status = _server(request).status
    return _json({"status": status}, 200 if status == "ready" else 503)


async def _metrics(request: Request) -> Response:
    return Response(generate_latest(_server(request).registry), headers={"content-type": CONTENT_TYPE_LATEST})


async def _version(request: Request) -> Response:
    library = _server(request).description().get("fingerprint", {}).get("operator_library")
    return _json({"version": __version__, "operator_library": library})


async def _load(request: Request) -> Response:
    server = _server(request)
    stats = server.client.stats
    return _json(
        {
            "num_requests": server.gate.num_inside,
            "max_concurrency": server.config.max_concurrency,
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "num_free_blocks": stats.num_free_blocks,
            "num_blocks": stats.num_blocks,
        }
    )


async def _config_info(request: Request) -> Response:
    server = _server(request)
    masked = {**asdict(server.config), "api_keys": ["***"] * len(server.config.api_keys)}
    return _json({"engine": server.description(), "engine_config": asdict(server.engine_config), "server": masked})


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(to_api_error(error, request.headers.get("x-request-id") or uuid.uuid4().hex))


async def _on_leaving(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


def _server(request: Request) -> ApiServer:
    server: ApiServer = request.app.state.server
    return server


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
