# SPDX-License-Identifier: Apache-2.0
"""POST /v1/messages/count_tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from fastdeploy.detokenize.preprocess import MAX_LONG_TEXT_LENGTH, check_text, max_text_length
from fastdeploy.entrypoints.openai.clients import client_of
from fastdeploy.entrypoints.openai.messages_api.errors import MESSAGES_PATH, MessagesErrorResponse
from fastdeploy.entrypoints.openai.messages_api.input import chat_input
from fastdeploy.entrypoints.openai.messages_api.protocol import CountTokensRequest
from fastdeploy.entrypoints.openai.messages_api.responses import CountTokensResponse
from fastdeploy.entrypoints.openai.openapi import BODY_ERRORS, Endpoint
from fastdeploy.entrypoints.openai.prompt import reasoning_format, render_prompt
from fastdeploy.entrypoints.openai.renaming import renamed_errors
from fastdeploy.entrypoints.openai.routes_info import json_response
from fastdeploy.entrypoints.openai.routes_tokenize import parse_request
from fastdeploy.entrypoints.openai.server import ApiServer
from fastdeploy.entrypoints.openai.threads import run_in_thread


async def count_tokens(request: Request) -> Response:
    """Return the number of tokens that a message's prompt would have."""
    server, body = await parse_request(request, CountTokensRequest)
    client = client_of(request.scope)
    return await run_in_thread(client.id, client.weight, _count, server, body)


def _count(server: ApiServer, body: CountTokensRequest) -> Response:
    server.check_model(body.model)
    tokenizer = server.tokenizer
    max_length = max(MAX_LONG_TEXT_LENGTH, max_text_length(tokenizer, server.limits.max_model_len))
    chat = chat_input(body, reasoning_format(server) is not None, server.config.ignore_unknown_fields)
    with renamed_errors(chat.client_field):
        prompt = str(render_prompt(server, chat.request, max_length))
        check_text("messages", prompt, tokenizer, max_length)
        token_ids = tokenizer.encode(prompt, False, "messages")
    return json_response(CountTokensResponse(input_tokens=len(token_ids)))


ENDPOINTS = (
    Endpoint(
        f"{MESSAGES_PATH}/count_tokens",
        count_tokens,
        methods=("POST",),
        request=CountTokensRequest,
        response=CountTokensResponse,
        errors=dict.fromkeys(BODY_ERRORS, MessagesErrorResponse),
        error=MessagesErrorResponse,
        tag="Tokens",
    ),
)
