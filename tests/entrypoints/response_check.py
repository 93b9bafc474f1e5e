# SPDX-License-Identifier: Apache-2.0
"""Decodes responses with the structs that document them; fields that a struct does not have are errors."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import httpx
import msgspec
import openai

from fastdeploy.entrypoints.openai.app import ENDPOINTS
from fastdeploy.entrypoints.openai.messages_api.errors import MESSAGES_PATH, MessagesErrorResponse
from fastdeploy.entrypoints.openai.openapi import Endpoint, models_of
from fastdeploy.entrypoints.openai.responses import ErrorResponse

DONE = "[DONE]"
LAST_EVENTS = (
    *("message_stop", "error"),
    *("response.completed", "response.incomplete", "response.failed"),
)


def find_endpoint(path: str) -> Endpoint | None:
    """Return the endpoint of a path, None if there is none."""
    for endpoint in ENDPOINTS:
        prefix, has_parameter, _ = endpoint.path.partition("{")
        if path == endpoint.path or (has_parameter and path.startswith(prefix) and path != prefix):
            return endpoint
    return None


def check_response(path: str, status: int, media_type: str, text: str) -> None:
    """Check the body of a response.

    Raises:
        msgspec.ValidationError: the body does not match its struct.
        AssertionError: a stream does not end with `[DONE]`.
    """
    endpoint = find_endpoint(path)
    if endpoint is None or status not in (200, *endpoint.errors):
        error = MessagesErrorResponse if path.startswith(MESSAGES_PATH) else ErrorResponse
        model: Any = error if status >= 400 else None
    else:
        model = endpoint.response if status == 200 else endpoint.errors[status]
    if media_type.startswith("text/event-stream"):
        assert endpoint is not None
        (check_named_events if endpoint.names_events else check_stream)(text, endpoint.event)
    elif media_type.startswith("application/json") and model is not None:
        decode_as(text, model)


def decode_as(text: str, model: Any) -> None:
    """Decode a text as a struct, or as one of several that no key tells apart.

    Raises:
        msgspec.ValidationError: the text matches none of them.
    """
    *others, last = models_of(model)
    for other in others:
        with contextlib.suppress(msgspec.ValidationError):
            msgspec.json.decode(text, type=other)
            return
    msgspec.json.decode(text, type=last)


def check_stream(text: str, model: Any) -> None:
    """Check the events of a stream; one of them may be an error."""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == DONE, "the stream ends with [DONE]"
    for event in events[:-1]:
        decode_as(event, ErrorResponse if event.startswith('{"error"') else model)


def named_events(text: str) -> list[tuple[str, str]]:
    """Return the names and data of the events of a stream, without its comments."""
    *events, rest = text.split("\n\n")
    assert rest == "", "the stream ends with an event"
    pairs = [event.split("\n") for event in events if not event.startswith(":")]
    return [(name.removeprefix("event: "), data.removeprefix("data: ")) for name, data in pairs]


def check_named_events(text: str, model: Any) -> None:
    """Check the events of a stream whose events have names; the last one of them may be an error."""
    events = named_events(text)
    for name, data in events:
        assert name == json.loads(data)["type"]
        msgspec.json.decode(data, type=MessagesErrorResponse if name == "error" else model)
    assert events[-1][0] in LAST_EVENTS, "the stream ends with its last event, or with an error"


def check_httpx_response(response: httpx.Response) -> None:
    """Read a response to its end and check it; an event hook for clients."""
    response.read()
    check_response(response.url.path, response.status_code, response.headers.get("content-type", ""), response.text)


def checked_client(url: str, **options: Any) -> openai.OpenAI:
    """Return the official client; every response that it gets is checked, streams as well."""
    http_client = httpx.Client(event_hooks={"response": [check_httpx_response]}, timeout=120)
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, http_client=http_client, **options)
