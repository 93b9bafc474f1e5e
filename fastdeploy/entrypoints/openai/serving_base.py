# SPDX-License-Identifier: Apache-2.0
"""What every endpoint that generates has: the prompts for the engine and the format of its answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import ClassVar

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.entrypoints.openai.errors import ApiError
from fastdeploy.entrypoints.openai.generation import ChoiceUpdate, Generation, GenerationGroup, Usage
from fastdeploy.entrypoints.openai.limiter import TokenBucket
from fastdeploy.entrypoints.openai.protocol import RequestFields
from fastdeploy.entrypoints.openai.request_metrics import per_request_metrics
from fastdeploy.entrypoints.openai.responses import PerRequestMetrics
from fastdeploy.entrypoints.openai.server import ApiServer

MAX_REQUEST_ID_LENGTH = 128
MAX_ENTRIES_IN_LOOP = 4096  # log-probabilities that are encoded without a thread


def make_request_id(requested: str | None) -> str:
    """Return the client's own request id, or a fresh one.

    Raises:
        InvalidRequestError: the id is empty, too long, or not printable ASCII.
    """
    if requested is None:
        return uuid.uuid4().hex
    if not 1 <= len(requested) <= MAX_REQUEST_ID_LENGTH or not requested.isascii() or not requested.isprintable():
        raise InvalidRequestError("request_id", f"expected 1 to {MAX_REQUEST_ID_LENGTH} printable ASCII characters")
    return requested


class Serving(ABC):
    """A checked request and the format of its answer.

    Attributes:
        last_event: what a stream ends with, also after an error; may be empty.
        keep_alive_event: what is sent while a stream has no event for a while; empty for nothing.
        id_headers: headers of the response that have the request's id.
        response_id: the response's `id`.
        requests: the prompts for the engine.
        bucket: counts the output tokens of a client with a limit of tokens per minute; None without one.
        usage: token counts so far.
    """

    last_event = b"data: [DONE]\n\n"
    keep_alive_event = b""
    id_headers: ClassVar[tuple[bytes, ...]] = (b"x-request-id",)

    def __init__(self, server: ApiServer, body: RequestFields, response_id: str) -> None:
        self.server = server
        self.body = body
        self.response_id = response_id
        self.requests: Sequence[GenerationRequest] = ()
        self.bucket: TokenBucket | None = None
        self.usage = Usage()
        self.created_s = int(time.time())

    @abstractmethod
    async def run_to_completion(self) -> bytes:
        """Run until all choices have ended; return the response as JSON."""

    @abstractmethod
    def events(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events, except for `last_event`; text before an error comes before it is raised."""

    def error_event(self, error: ApiError) -> bytes:
        """Return the event that tells of an error after a stream has begun."""
        return b"data: " + error.encode() + b"\n\n"

    def group(self) -> GenerationGroup:
        """Return the generations of the prompts, which `updates` runs."""
        server = self.server
        generations = [
            Generation(server.scheduler, server.tokenizer, server.recorder, request, prompt_index)
            for prompt_index, request in enumerate(self.requests)
        ]
        return GenerationGroup(generations, self.usage, self.bucket)

    def metrics(self, last: TokenDelta) -> PerRequestMetrics | None:
        """Return the metrics of a request with one choice, whose end is `last`; None without a flag for them."""
        if len(self.requests) > 1 or self.requests[0].params.n > 1:
            return None
        return per_request_metrics(self.server, last, self.usage.completion_tokens)


async def encode_updates(encode: Callable[[list[ChoiceUpdate]], bytes], updates: list[ChoiceUpdate]) -> bytes:
    """Call `encode`; in a thread if there are so many log-probabilities, as of a prompt, that it may take seconds."""
    if any(update.prompt_logprobs is not None or _is_wide(update) for update in updates):
        return await asyncio.to_thread(encode, updates)
    return encode(updates)


def _is_wide(update: ChoiceUpdate) -> bool:
    logprobs = update.delta.logprobs
    return bool(logprobs and len(logprobs) * len(logprobs[0].top) > MAX_ENTRIES_IN_LOOP)
