# SPDX-License-Identifier: Apache-2.0
"""The HTTP application, and the endpoints that generate."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.faults import fault_point
from fastdeploy.core.generation_request import add_client_mark
from fastdeploy.entrypoints.openai import pages, routes_cluster, routes_info, routes_tokenize, routes_tokenizer_info
from fastdeploy.entrypoints.openai.bodies import LARGE_BODY_BYTES, parse_body, read_body
from fastdeploy.entrypoints.openai.clients import Client, client_of
from fastdeploy.entrypoints.openai.connection_gate import release_body
from fastdeploy.entrypoints.openai.errors import (
    ApiError,
    deadline_exceeded,
    error_response,
    method_not_allowed,
    route_not_found,
    to_api_error,
)
from fastdeploy.entrypoints.openai.generation_response import GenerationResponse
from fastdeploy.entrypoints.openai.json_fields import split_object
from fastdeploy.entrypoints.openai.messages_api import routes as messages_routes
from fastdeploy.entrypoints.openai.messages_api.errors import MESSAGES_PATH, MessagesErrorResponse
from fastdeploy.entrypoints.openai.messages_api.protocol import MessagesRequest
from fastdeploy.entrypoints.openai.messages_api.responses import MessageEvent, MessageResponse
from fastdeploy.entrypoints.openai.messages_api.serving import ServingMessages
from fastdeploy.entrypoints.openai.middleware import (
    MAX_HEADER_ID_LENGTH,
    REQUEST_ID_HEADER,
    ApiKeyMiddleware,
    header_id_of,
    request_id_of,
)
from fastdeploy.entrypoints.openai.openapi import GENERATION_ERRORS, Endpoint, build_document
from fastdeploy.entrypoints.openai.params import check_request_fields
from fastdeploy.entrypoints.openai.prompt import has_client_template
from fastdeploy.entrypoints.openai.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
    CompletionRequest,
    RequestFields,
)
from fastdeploy.entrypoints.openai.responses import (
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
    CompletionResponse,
    CompletionStreamResponse,
)
from fastdeploy.entrypoints.openai.responses_api.output import AnyEvent, ResponseObject
from fastdeploy.entrypoints.openai.responses_api.protocol import ResponsesRequest
from fastdeploy.entrypoints.openai.responses_api.serving import ServingResponses
from fastdeploy.entrypoints.openai.routes_info import server_of
from fastdeploy.entrypoints.openai.server import ApiServer
from fastdeploy.entrypoints.openai.serving_base import Serving
from fastdeploy.entrypoints.openai.serving_chat import ServingChat
from fastdeploy.entrypoints.openai.serving_chat_batch import ServingChatBatch
from fastdeploy.entrypoints.openai.serving_completion import ServingCompletion
from fastdeploy.entrypoints.openai.threads import run_in_template_thread, run_in_thread
from fastdeploy.version import __version__

MARK_LENGTH = 12  # digits of the key's digest in the ids of its requests
NO_TELEMETRY: Any = dict.fromkeys(("tracing", "metrics", "logs", "operation_spans", "auto_configure"), False)


def make_app(server: ApiServer) -> FastAPI:
    """Return the application; `server` is its state.

    The endpoints are Starlette's routes. FastAPI's own routes take three times as long, and they serialize an ASGI
    response that a handler returns instead of sending it: the client gets status 200 and `{}`.
    """
    config = server.config
    known = ENDPOINTS if config.disable_fastapi_docs else (*ENDPOINTS, *pages.DOCS_ENDPOINTS)
    endpoints = [endpoint for endpoint in known if not endpoint.flag or getattr(config, endpoint.flag)]
    app = FastAPI(
        title="FastDeploy",
        version=__version__,
        openapi_url=None,  # the routes for the documentation are in the table of endpoints
        redirect_slashes=False,
        telemetry=NO_TELEMETRY,
        exception_handlers={
            ApiError: _on_error,
            InvalidRequestError: _on_error,
            HTTPException: _on_http_exception,
            ClientDisconnect: _on_disconnect,
            Exception: _on_error,
        },
    )
    for endpoint in endpoints:
        app.add_route(endpoint.path, endpoint.handler, methods=list(endpoint.methods))
    app.state.server = server
    app.openapi = cache(  # type: ignore[method-assign]
        lambda: build_document(endpoints, config.root_path, server.keys is not None)
    )
    server.known_paths = frozenset(endpoint.path for endpoint in endpoints)
    if server.keys is not None:
        open_paths = [endpoint.path for endpoint in endpoints if endpoint.is_open]
        app.add_middleware(ApiKeyMiddleware, keys=server.keys, open_paths=open_paths)
    if config.allowed_origins:  # outermost: the preflight request of a browser has no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=[REQUEST_ID_HEADER],
        )
    return app


@dataclass(frozen=True)
class BodyKind:
    """A kind of request that generates.

    Attributes:
        model: struct of its body.
        make_serving: checks a body and makes the request.
        prompts: fields of which a body of this kind has one, where a route accepts several kinds.
        is_light: a small body takes little time to check.
    """

    model: type[RequestFields]
    make_serving: Callable[[ApiServer, Any], Serving]
    prompts: tuple[str, ...] = ()
    is_light: bool = True


COMPLETION = BodyKind(CompletionRequest, ServingCompletion, ("prompt", "prompt_token_ids"))
CHAT = BodyKind(ChatCompletionRequest, ServingChat, ("messages",))
CHAT_BATCH = BodyKind(BatchChatCompletionRequest, ServingChatBatch, is_light=False)  # a few bytes are a conversation
MESSAGES = BodyKind(MessagesRequest, ServingMessages)
RESPONSES = BodyKind(ResponsesRequest, ServingResponses)


async def completions(request: Request) -> GenerationResponse:
    """Complete one or several prompts."""
    return await _generate(request, COMPLETION)


async def chat_completions(request: Request) -> GenerationResponse:
    """Generate the next message of a conversation."""
    return await _generate(request, CHAT)


async def chat_completions_batch(request: Request) -> GenerationResponse:
    """Generate the next message of each of several conversations."""
    return await _generate(request, CHAT_BATCH)


async def invocations(request: Request) -> GenerationResponse:
    """Generate the next message of a conversation, or complete prompts: what the body has decides, as for SageMaker."""
    return await _generate(request, CHAT, COMPLETION)


async def messages(request: Request) -> GenerationResponse:
    """Generate the next message of a conversation, in the protocol of Anthropic's API."""
    return await _generate(request, MESSAGES)


async def create_response(request: Request) -> GenerationResponse:
    """Generate the next items of a conversation; nothing is stored."""
    return await _generate(request, RESPONSES)


async def _generate(request: Request, *kinds: BodyKind) -> GenerationResponse:
    """Parse and check the body; return the response, which runs the request when it is sent.

    Args:
        kinds: that the body may be of; of several, the first one whose prompt it has.

    Raises:
        ApiError: 504, the request's time is over before it could run.
    """
    server, arrival_s = server_of(request), asyncio.get_running_loop().time()
    deadline_s = _deadline_s(arrival_s, server.config.request_timeout)
    try:
        async with asyncio.timeout_at(deadline_s) as limit:
            return await _prepare(request, kinds, arrival_s, limit)
    except TimeoutError:
        if limit.expired():
            raise deadline_exceeded() from None
        raise


async def _prepare(
    request: Request, kinds: Sequence[BodyKind], arrival_s: float, limit: asyncio.Timeout
) -> GenerationResponse:
    """Do the work of `_generate`, and set the deadline once the body is known."""
    server = server_of(request)
    server.check_available()
    header_id = _header_id(request)
    raw_body = await read_body(request, server.config)
    arrived_s = time.monotonic()

    def parse() -> tuple[BodyKind, RequestFields]:
        kind = kinds[0] if len(kinds) == 1 else _kind_of(raw_body, kinds)
        body = parse_body(raw_body, kind.model, server.config)
        fault_point("parse", body.request_id or "")
        server.check_model(body.model)
        check_request_fields(body)
        if body.request_id is None and header_id is not None:
            body.request_id = f"{header_id}-{uuid.uuid4().hex[:8]}"  # several requests may have the same header
        return kind, body

    is_small = len(raw_body) < LARGE_BODY_BYTES
    client = client_of(request.scope)
    kind, body = parse() if is_small else await run_in_thread(client.id, client.weight, parse)
    deadline_s = _deadline_s(arrival_s, server.config.request_timeout, body.timeout)
    limit.reschedule(deadline_s)
    if has_client_template(server, getattr(body, "chat_template", None)):
        serving = await run_in_template_thread(client.id, client.weight, kind.make_serving, server, body)
    elif is_small and kind.is_light:
        serving = kind.make_serving(server, body)
    else:
        serving = await run_in_thread(client.id, client.weight, kind.make_serving, server, body)
    release_body(request.scope)  # not before: the fields wait for a thread as the body does
    server.check_num_sequences(client, serving.requests)
    _assign_client(serving, client, arrived_s)
    return GenerationResponse(serving, client, deadline_s, header_id)


def _kind_of(raw_body: bytes, kinds: Sequence[BodyKind]) -> BodyKind:
    """Return the first kind whose prompt a body has; null counts as absent.

    Raises:
        ApiError: 400, the body is no JSON object.
        InvalidRequestError: it has no prompt of any kind.
    """
    given = {name for name, value in split_object(raw_body).items() if bytes(value) != b"null"}
    for kind in kinds:
        if not given.isdisjoint(kind.prompts):
            return kind
    names = [name for kind in kinds for name in kind.prompts]
    raise InvalidRequestError(names[0], f"is missing; expected one of {', '.join(names)}")


def _deadline_s(arrival_s: float, *timeouts_s: float | None) -> float | None:
    """Return the time at which the first of the timeouts is over; None if there is none."""
    given_s = [timeout_s for timeout_s in timeouts_s if timeout_s is not None]
    return arrival_s + min(given_s) if given_s else None


def _assign_client(serving: Serving, client: Client, arrived_s: float) -> None:
    """Mark the prompts as requests of this client; ids and cached prefixes are separate for each key.

    Args:
        arrived_s: when the body had arrived whole; the times of the request count from then.
    """
    for request in serving.requests:
        if client.salt:
            request.request_id = add_client_mark(request.request_id, client.salt[:MARK_LENGTH])
        request.cache_salt = f"{client.salt}{request.cache_salt}"
        request.priority = serving.body.priority
        request.client_id, request.client_name = client.id, client.name
        request.client_weight = client.weight
        request.client_max_sequences = client.max_sequences
        request.arrived_s = arrived_s


def _header_id(request: Request) -> str | None:
    """Return the client's `X-Request-Id`, None if there is none.

    Raises:
        ApiError: 400, the header is empty, too long, or not printable ASCII.
    """
    header_id = header_id_of(request.scope)
    if header_id is None and REQUEST_ID_HEADER in request.headers:
        message = f"{REQUEST_ID_HEADER}: expected 1 to {MAX_HEADER_ID_LENGTH} printable ASCII characters"
        raise ApiError(400, message, param=REQUEST_ID_HEADER, code="invalid_value")
    return header_id


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(to_api_error(error, request_id_of(request.scope)))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Return the response for a route or method that does not exist."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]  # not from the URL, which a client's Host header can make invalid
    if error.status_code == 404:
        return error_response(
            route_not_found(path, [route.path for route in request.app.routes if "{" not in route.path])
        )
    if error.status_code == 405:
        return error_response(method_not_allowed(request.method, path, (error.headers or {}).get("Allow", "")))
    return await _on_error(request, error)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # it is not sent: the connection is closed


ENDPOINTS = (
    Endpoint(
        "/v1/completions",
        completions,
        methods=("POST",),
        request=CompletionRequest,
        response=CompletionResponse,
        event=CompletionStreamResponse,
        errors=GENERATION_ERRORS,
        tag="Generation",
    ),
    Endpoint(
        "/v1/chat/completions",
        chat_completions,
        methods=("POST",),
        request=ChatCompletionRequest,
        response=ChatCompletionResponse,
        event=ChatCompletionStreamResponse,
        errors=GENERATION_ERRORS,
        tag="Generation",
    ),
    Endpoint(
        "/v1/chat/completions/batch",
        chat_completions_batch,
        methods=("POST",),
        request=BatchChatCompletionRequest,
        response=ChatCompletionResponse,
        event=ChatCompletionStreamResponse,
        errors=GENERATION_ERRORS,
        tag="Generation",
    ),
    Endpoint(
        "/invocations",
        invocations,
        methods=("POST",),
        request=ChatCompletionRequest | CompletionRequest,
        response=ChatCompletionResponse | CompletionResponse,
        event=ChatCompletionStreamResponse | CompletionStreamResponse,
        errors=GENERATION_ERRORS,
        tag="Generation",
    ),
    Endpoint(
        MESSAGES_PATH,
        messages,
        methods=("POST",),
        request=MessagesRequest,
        response=MessageResponse,
        event=MessageEvent,
        names_events=True,
        errors=dict.fromkeys(GENERATION_ERRORS, MessagesErrorResponse),
        error=MessagesErrorResponse,
        tag="Generation",
    ),
    *messages_routes.ENDPOINTS,
    Endpoint(
        "/v1/responses",
        create_response,
        methods=("POST",),
        request=ResponsesRequest,
        response=ResponseObject,
        event=AnyEvent,
        names_events=True,
        errors=GENERATION_ERRORS,
        tag="Generation",
    ),
    *routes_tokenize.ENDPOINTS,
    *routes_tokenizer_info.ENDPOINTS,
    *routes_info.ENDPOINTS,
    *routes_cluster.ENDPOINTS,
    *pages.ENDPOINTS,
)
