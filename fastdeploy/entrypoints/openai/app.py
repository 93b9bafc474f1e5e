# SPDX-License-Identifier: Apache-2.0
"""The HTTP application: its routes, and the two that generate."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.entrypoints.openai import routes_info, routes_tokenize
from fastdeploy.entrypoints.openai.absent_routes import no_route, wrong_method
from fastdeploy.entrypoints.openai.auth import KeyCheck, key_salt
from fastdeploy.entrypoints.openai.bodies import LARGE_BODY_BYTES, read_body
from fastdeploy.entrypoints.openai.errors import ApiError, error_response, to_api_error
from fastdeploy.entrypoints.openai.params import check_request_fields
from fastdeploy.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    parse_body,
)
from fastdeploy.entrypoints.openai.routes_info import server_of
from fastdeploy.entrypoints.openai.server import ApiServer
from fastdeploy.entrypoints.openai.serving_base import GenerationResponse, ServingBase
from fastdeploy.entrypoints.openai.serving_chat import ServingChat
from fastdeploy.entrypoints.openai.serving_completion import ServingCompletion

REQUEST_ID_HEADER = "X-Request-Id"
MAX_HEADER_ID_LENGTH = 96


def make_app(server: ApiServer) -> Starlette:
    """Return the application; `server` is its state."""
    app = Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            *routes_tokenize.ROUTES,
            *routes_info.ROUTES,
        ],
        exception_handlers={
            ApiError: _on_error,
            InvalidRequestError: _on_error,
            HTTPException: _on_wrong_route,
            ClientDisconnect: _on_leaving,
            Exception: _on_error,
        },
    )
    app.state.server = server
    config = server.config
    if config.api_keys:
        app.add_middleware(KeyCheck, keys=config.api_keys)
    if config.allowed_origins:  # outermost: a browser's first question brings no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=[REQUEST_ID_HEADER],
        )
    return app


async def completions(request: Request) -> Any:
    """POST /v1/completions."""
    return await _start(request, CompletionRequest, ServingCompletion)


async def chat_completions(request: Request) -> Any:
    """POST /v1/chat/completions."""
    return await _start(request, ChatCompletionRequest, ServingChat)


async def _start(
    request: Request, model: type[Any], make_serving: Callable[[ApiServer, Any], ServingBase]
) -> GenerationResponse:
    """Parse, check, and return the answer that will run the serving."""
    server = server_of(request)
    server.check_available()
    header_id = _header_id(request)
    raw_body = await read_body(request)

    def parse() -> GenerationFields:
        body: GenerationFields = parse_body(raw_body, model)
        server.check_model(body.model)
        check_request_fields(body)
        if body.request_id is None and header_id is not None:
            body.request_id = f"{header_id}-{uuid.uuid4().hex[:8]}"  # one header may come with several requests
        return body

    is_small = len(raw_body) < LARGE_BODY_BYTES
    body = parse() if is_small else await asyncio.to_thread(parse)
    is_quick = is_small and getattr(body, "chat_template", None) is None  # a client's template may take seconds
    serving = make_serving(server, body) if is_quick else await asyncio.to_thread(make_serving, server, body)
    for one in serving.requests:  # cached prefixes are shared within one key only
        one.cache_salt = f"{key_salt(request.scope)}{one.cache_salt}"
        one.priority = serving.body.priority
    return GenerationResponse(serving, header_id)


def _header_id(request: Request) -> str | None:
    """Return the client's name for this request.

    Raises:
        ApiError: 400, it is empty, too long, or no printable ASCII.
    """
    given = request.headers.get(REQUEST_ID_HEADER)
    if given is not None and not (1 <= len(given) <= MAX_HEADER_ID_LENGTH and given.isascii() and given.isprintable()):
        message = f"{REQUEST_ID_HEADER}: expected 1 to {MAX_HEADER_ID_LENGTH} printable ASCII characters"
        raise ApiError(400, message, param=REQUEST_ID_HEADER, code="invalid_value")
    return given


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(to_api_error(error, request.headers.get(REQUEST_ID_HEADER) or uuid.uuid4().hex))


async def _on_wrong_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        return error_response(no_route(path, [route.path for route in request.app.routes if "{" not in route.path]))
    if error.status_code == 405:
        return error_response(wrong_method(request.method, path, (error.headers or {}).get("Allow", "")))
    return await _on_error(request, error)


async def _on_leaving(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it
