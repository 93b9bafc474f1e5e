# SPDX-License-Identifier: Apache-2.0
"""POST /tokenize, /detokenize and /v1/abort_requests."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.generation_request import without_marks, without_prompt_number
from fastdeploy.core.panics import RustPanicError
from fastdeploy.detokenize.preprocess import (
    MAX_LONG_TEXT_LENGTH,
    TRUNCATED_FACTOR,
    check_text,
    check_token_ids,
    max_text_length,
)
from fastdeploy.entrypoints.openai.bodies import LARGE_BODY_BYTES, parse_body, read_body
from fastdeploy.entrypoints.openai.clients import client_of
from fastdeploy.entrypoints.openai.custom_tools import without_custom_tools
from fastdeploy.entrypoints.openai.openapi import BODY_ERRORS, Endpoint
from fastdeploy.entrypoints.openai.prompt import has_client_template, render_prompt
from fastdeploy.entrypoints.openai.protocol import ChatCompletionRequest
from fastdeploy.entrypoints.openai.renaming import renamed_errors
from fastdeploy.entrypoints.openai.responses import ResponseBody
from fastdeploy.entrypoints.openai.routes_info import json_response, server_of
from fastdeploy.entrypoints.openai.server import ApiServer
from fastdeploy.entrypoints.openai.threads import run_in_template_thread, run_in_thread

ID_PREFIXES = ("", "cmpl-", "chatcmpl-", "resp_", "msg_")  # clients may send the request's id or the response's
MAX_IDS = 4096
TEMPLATE_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools")

T = TypeVar("T", bound=msgspec.Struct)


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize.

    Attributes:
        model: as in completions
        prompt: the text to tokenize
        messages: a conversation to render and tokenize, instead of `prompt`
        add_special_tokens: add the tokenizer's special tokens (default: true for a text, false for a conversation)
        return_token_strs: add the text of each token to the response
        add_generation_prompt, continue_final_message, chat_template, chat_template_kwargs, tools: as in chats
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
    """Body of POST /detokenize.

    Attributes:
        model: as in completions
        tokens: the token ids to decode
    """

    model: str | None = None
    tokens: list[int] | None = None


class AbortRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/abort_requests.

    Attributes:
        req_ids: ids of requests or responses; of several nodes, any may be asked for a request of any other
        abort_all: abort all requests of the client's API key, on all nodes; an administrator's key aborts those of all
            keys
    """

    req_ids: list[str] | None = None
    abort_all: bool = False


class TokenizeResponse(ResponseBody, kw_only=True):
    """Body of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(ResponseBody, kw_only=True):
    """Body of POST /detokenize."""

    prompt: str


class AbortedRequest(ResponseBody, kw_only=True):
    """A request that was aborted.

    Attributes:
        num_generated_tokens: of all prompts and choices
    """

    request_id: str
    num_generated_tokens: int


class AbortResponse(ResponseBody, kw_only=True):
    """Body of POST /v1/abort_requests.

    Attributes:
        not_found: ids that no running request of this API key has, or none of an API process that answers in a second
    """

    aborted: list[AbortedRequest]
    not_found: list[str]


async def tokenize(request: Request) -> Response:
    """Return the token ids of a text or a conversation."""
    server, body = await parse_request(request, TokenizeRequest)
    is_client_template = has_client_template(server, body.chat_template)
    run = run_in_template_thread if is_client_template else run_in_thread
    client = client_of(request.scope)
    return await run(client.id, client.weight, _tokenize, server, body)


async def detokenize(request: Request) -> Response:
    """Return the text of token ids, special tokens included."""
    server, body = await parse_request(request, DetokenizeRequest)
    client = client_of(request.scope)
    return await run_in_thread(client.id, client.weight, _detokenize, server, body)


async def abort_requests(request: Request) -> Response:
    """Abort requests of the client's API key and return how many tokens each of them had generated.

    An administrator's key aborts requests of all keys. With several nodes, requests are found on any of them.
    """
    server, body = await parse_request(request, AbortRequest)
    if body.abort_all == (body.req_ids is not None):
        raise InvalidRequestError("req_ids", "expected a list of request ids, or abort_all: true")
    req_ids = body.req_ids or []
    if len(req_ids) > MAX_IDS:
        raise InvalidRequestError("req_ids", f"at most {MAX_IDS} ids, got {len(req_ids)}")
    engine_ids = None if body.abort_all else [prefix + req_id for req_id in req_ids for prefix in ID_PREFIXES]
    client = client_of(request.scope)
    aborted = await server.scheduler.abort_requests(engine_ids, "" if client.is_admin else client.salt)
    num_tokens: Counter[str] = Counter()
    for engine_id, count in aborted:
        num_tokens[without_prompt_number(engine_id)] += count
    found = set(map(without_marks, num_tokens))
    return json_response(
        AbortResponse(
            aborted=[
                AbortedRequest(request_id=without_marks(name), num_generated_tokens=count)
                for name, count in num_tokens.items()
            ],
            not_found=[req_id for req_id in req_ids if not any(prefix + req_id in found for prefix in ID_PREFIXES)],
        )
    )


async def parse_request(request: Request, model: type[T]) -> tuple[ApiServer, T]:
    """Return the server and the body of a request, which is parsed in a thread if it is large."""
    server = server_of(request)
    server.check_available()
    raw_body = await read_body(request, server.config)
    if len(raw_body) < LARGE_BODY_BYTES:
        return server, parse_body(raw_body, model, server.config)
    client = client_of(request.scope)
    return server, await run_in_thread(client.id, client.weight, parse_body, raw_body, model, server.config)


def _tokenize(server: ApiServer, body: TokenizeRequest) -> Response:
    server.check_model(body.model)
    tokenizer, max_model_len = server.tokenizer, server.limits.max_model_len
    max_length = max(MAX_LONG_TEXT_LENGTH, max_text_length(tokenizer, max_model_len))
    prompt = _prompt(server, body, max_length)
    is_text = body.prompt is not None
    field = "prompt" if is_text else "messages"
    check_text(field, prompt, tokenizer, max_length)
    add_special = body.add_special_tokens if body.add_special_tokens is not None else is_text
    tokens = tokenizer.encode(prompt, add_special, field)
    return json_response(
        TokenizeResponse(
            count=len(tokens),
            max_model_len=max_model_len,
            tokens=tokens,
            token_strs=[tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None,
        )
    )


def _prompt(server: ApiServer, body: TokenizeRequest, max_length: int) -> str:
    """Return the given text, or the conversation as it would be sent to the model."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("prompt", "expected a text, or messages; one of both")
    given: dict[str, Any] = {name: value for name in TEMPLATE_FIELDS if (value := getattr(body, name)) is not None}
    if body.prompt is None:
        chat, rename = without_custom_tools(ChatCompletionRequest(messages=body.messages, **given))
        with renamed_errors(rename):
            return str(render_prompt(server, chat, max_length))
    if given:
        raise InvalidRequestError(next(iter(given)), "belongs to messages, not to a prompt")
    return body.prompt


def _detokenize(server: ApiServer, body: DetokenizeRequest) -> Response:
    server.check_model(body.model)
    if body.tokens is None:
        raise InvalidRequestError("tokens", "is missing")
    max_tokens = TRUNCATED_FACTOR * server.limits.max_model_len
    if len(body.tokens) > max_tokens:
        raise InvalidRequestError("tokens", f"expected at most {max_tokens} token ids, got {len(body.tokens)}")
    check_token_ids("tokens", body.tokens, server.limits.vocab_size)
    try:
        text = server.tokenizer.decode(body.tokens, skip_special_tokens=False)
    except RustPanicError as error:
        reason = f"{error.__cause__!s:.300}"
        raise InvalidRequestError("tokens", f"the tokenizer of this model cannot decode them: {reason}") from error
    return json_response(DetokenizeResponse(prompt=text))


ENDPOINTS = (
    Endpoint(
        "/tokenize",
        tokenize,
        methods=("POST",),
        request=TokenizeRequest,
        response=TokenizeResponse,
        errors=BODY_ERRORS,
        tag="Tokens",
    ),
    Endpoint(
        "/detokenize",
        detokenize,
        methods=("POST",),
        request=DetokenizeRequest,
        response=DetokenizeResponse,
        errors=BODY_ERRORS,
        tag="Tokens",
    ),
    Endpoint(
        "/v1/abort_requests",
        abort_requests,
        methods=("POST",),
        request=AbortRequest,
        response=AbortResponse,
        errors=BODY_ERRORS,
        tag="Administration",
    ),
)
