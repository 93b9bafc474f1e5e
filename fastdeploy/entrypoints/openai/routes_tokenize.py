# SPDX-License-Identifier: Apache-2.0
"""POST /tokenize, /detokenize and /v1/abort_requests."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.detokenize.preprocess import check_token_ids
from fastdeploy.entrypoints.openai.auth import key_salt
from fastdeploy.entrypoints.openai.bodies import read_body
from fastdeploy.entrypoints.openai.prompt import render_prompt
from fastdeploy.entrypoints.openai.protocol import ChatCompletionRequest, parse_body
from fastdeploy.entrypoints.openai.routes_info import json_response, server_of
from fastdeploy.entrypoints.openai.server import ApiServer

ID_PREFIXES = ("", "cmpl-", "chatcmpl-")  # clients know a request by its own name or by its answer's
MAX_IDS = 4096
TEMPLATE_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools")


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize.

    Attributes:
        prompt: the text; or `messages`, rendered as /v1/chat/completions would.
        add_special_tokens: with the tokenizer's opening tokens; default true for a text, false for a conversation.
        return_token_strs: the answer holds each token's text as well.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int] | None = None


class AbortRequests(msgspec.Struct, kw_only=True):
    """Body of POST /v1/abort_requests: ids of requests or answers, or all of this key's."""

    req_ids: list[str] | None = None
    abort_all: bool = False


async def tokenize(request: Request) -> Response:
    """Return the token ids of a text or a conversation."""
    return await _answer(request, _tokenize)


async def detokenize(request: Request) -> Response:
    """Return the text of token ids, special tokens included."""
    return await _answer(request, _detokenize)


async def abort_requests(request: Request) -> Response:
    """End requests of this client's key; return which, and how many tokens each had."""
    server = server_of(request)
    server.check_available()
    body = parse_body(await read_body(request), AbortRequests)
    if body.abort_all == (body.req_ids is not None):
        raise InvalidRequestError("req_ids", "expected a list of request ids, or abort_all: true")
    names = body.req_ids or []
    if len(names) > MAX_IDS:
        raise InvalidRequestError("req_ids", f"at most {MAX_IDS} ids, got {len(names)}")
    wanted = None if body.abort_all else [prefix + name for name in names for prefix in ID_PREFIXES]
    ended = await server.client.abort_requests(wanted, key_salt(request.scope))
    known = {known for request_id, _ in ended for known in (request_id, request_id.rpartition("-")[0])}
    return json_response(
        {
            "aborted": [{"request_id": name, "num_generated_tokens": count} for name, count in ended],
            "not_found": [name for name in names if not any(prefix + name in known for prefix in ID_PREFIXES)],
        }
    )


async def _answer(request: Request, work: Any) -> Response:
    server = server_of(request)
    server.check_available()
    raw_body = await read_body(request)
    return json_response(await asyncio.to_thread(work, server, raw_body))  # a client's template may take seconds


def _tokenize(server: ApiServer, raw_body: bytes) -> dict[str, Any]:
    body = parse_body(raw_body, TokenizeRequest)
    server.check_model(body.model)
    prompt = _prompt(server, body)
    is_text = body.prompt is not None
    add_special = body.add_special_tokens if body.add_special_tokens is not None else is_text
    tokens = server.tokenizer.encode(prompt, add_special) if isinstance(prompt, str) else prompt
    return {
        "count": len(tokens),
        "max_model_len": server.limits.max_model_len,
        "tokens": tokens,
        "token_strs": [server.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None,
    }


def _prompt(server: ApiServer, body: TokenizeRequest) -> str | list[int]:
    """Return the text as given, or the conversation as it would be sent to the model."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("prompt", "expected a text, or messages; one of both")
    given = {name: value for name in TEMPLATE_FIELDS if (value := getattr(body, name)) is not None}
    if body.prompt is None:
        return render_prompt(server, ChatCompletionRequest(messages=body.messages, **given))
    if given:
        raise InvalidRequestError(next(iter(given)), "belongs to messages, not to a prompt")
    return body.prompt


def _detokenize(server: ApiServer, raw_body: bytes) -> dict[str, Any]:
    body = parse_body(raw_body, DetokenizeRequest)
    server.check_model(body.model)
    if body.tokens is None:
        raise InvalidRequestError("tokens", "is missing")
    check_token_ids("tokens", body.tokens, server.limits.vocab_size)
    return {"prompt": server.tokenizer.decode(body.tokens, skip_special_tokens=False)}


ROUTES = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/v1/abort_requests", abort_requests, methods=["POST"]),
]
