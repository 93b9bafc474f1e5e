# SPDX-License-Identifier: Apache-2.0
"""Serves one checked request, as one response or as a stream, and aborts it when its client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.types import Message, Receive, Scope, Send

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.entrypoints.openai.clients import Client
from fastdeploy.entrypoints.openai.errors import deadline_exceeded, error_response, record_refusal, to_api_error
from fastdeploy.entrypoints.openai.generation import ChoiceUpdate, ChunkAggregator, Generation, GenerationGroup, Usage
from fastdeploy.entrypoints.openai.limiter import TokenBucket
from fastdeploy.entrypoints.openai.logprobs import output_tokens
from fastdeploy.entrypoints.openai.protocol import GenerationFields, StreamOptions
from fastdeploy.entrypoints.openai.responses import ChoiceFields, ResponseHead
from fastdeploy.entrypoints.openai.server import ApiServer

MAX_REQUEST_ID_LENGTH = 128
MAX_HEADER_ID_LENGTH = 96  # of X-Request-Id, to which a random suffix is appended
DONE = b"data: [DONE]\n\n"


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


class ServingBase(ABC):
    """A checked request and the format of its response.

    Attributes:
        response_type: struct of the whole response.
        object_name, chunk_object_name: `object` of the whole response and of the chunks of a stream.
        response_id: the response's `id`.
        requests: the prompts for the engine.
        bucket: counts the output tokens of a client with a limit of tokens per minute; None without one.
        usage: token counts so far.
    """

    response_type: type[Any]
    object_name: str
    chunk_object_name: str

    def __init__(self, server: ApiServer, body: GenerationFields, response_id: str) -> None:
        self.server = server
        self.body = body
        self.response_id = response_id
        self.requests: Sequence[GenerationRequest] = ()
        self.bucket: TokenBucket | None = None
        self.usage = Usage()
        self._created = int(time.time())

    @abstractmethod
    def choice(self, update: ChoiceUpdate) -> ChoiceFields:
        """Return the choice of a whole response."""

    @abstractmethod
    def chunk_choices(self, update: ChoiceUpdate) -> Iterator[ChoiceFields]:
        """Yield what is new for the client, one choice per chunk."""

    async def run_to_completion(self) -> bytes:
        """Run until all choices have ended; return the response as JSON."""
        group = self._group()
        updates = await group.run_to_completion()

        def encode(updates: Iterable[ChoiceUpdate]) -> bytes:
            choices = [self.choice(update) for update in updates]
            head = self._head(self.object_name)
            return msgspec.json.encode(self.response_type(**head, choices=choices, usage=group.usage.report()))

        return await _encode(encode, updates)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events, except for the final `[DONE]`; text before an error comes before it is raised."""
        group = self._group()
        options = self.body.stream_options or StreamOptions()
        aggregator = ChunkAggregator(self.body.max_streaming_response_tokens or 1)
        prefix = self._chunk_prefix()

        def encode(updates: Iterable[ChoiceUpdate]) -> bytes:
            events = []
            for update in updates:
                usage = _usage_suffix(group) if options.continuous_usage_stats else b""
                for choice in self.chunk_choices(update):
                    events.append(prefix + msgspec.json.encode(choice) + b"]" + usage + b"}\n\n")
            return b"".join(events)

        async with contextlib.aclosing(group.updates()) as stream:
            try:
                async for updates in stream:
                    if chunks := await _encode(encode, aggregator.push(updates)):
                        yield chunks
            except Exception:
                if chunks := encode(aggregator.flush()):
                    yield chunks
                raise
        if options.include_usage:
            yield prefix + b"]" + _usage_suffix(group) + b"}\n\n"

    def add_optional_fields(self, choice: ChoiceFields, update: ChoiceUpdate) -> None:
        """Set the fields of a choice that both endpoints have and only some requests ask for."""
        delta, body = update.delta, self.body
        choice.seed = delta.seed
        if body.return_token_ids:
            decode = partial(self.server.tokenizer.decode, skip_special_tokens=False)
            if update.is_first:
                choice.prompt_token_ids = self.requests[update.prompt_index].prompt_token_ids
                choice.prompt_tokens = decode(choice.prompt_token_ids)
            choice.completion_token_ids = delta.token_ids
            choice.completion_tokens = decode(delta.token_ids)
            if body.collect_metrics:
                choice.tokens = output_tokens(self.server.tokenizer, delta)
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
            if body.collect_metrics:
                choice.speculate_metrics = delta.speculate_metrics
                choice.metrics = delta.metrics

    def _group(self) -> GenerationGroup:
        server = self.server
        generations = [
            Generation(server.scheduler, server.tokenizer, server.recorder, request, prompt_index)
            for prompt_index, request in enumerate(self.requests)
        ]
        return GenerationGroup(generations, self.usage, self.bucket)

    def _head(self, object_name: str) -> dict[str, Any]:
        """Return the fields of `ResponseHead`."""
        note = self.server.speculation_note()
        return {
            "id": self.response_id,
            "object": object_name,
            "created": self._created,
            "model": self.server.model_name,
            "system_fingerprint": self.server.system_fingerprint,
            "speculation": UNSET if note is None else note,
        }

    def _chunk_prefix(self) -> bytes:
        """Return the beginning of all chunks, up to their choices: it is encoded once, not per token."""
        head = msgspec.json.encode(ResponseHead(**self._head(self.chunk_object_name)))
        return b"data: " + head.removesuffix(b"}") + b',"choices":['


class GenerationResponse:
    """Runs a request as an ASGI response. If the client disconnects, the request is aborted on the engine."""

    def __init__(
        self, serving: ServingBase, client: Client, deadline_s: float | None = None, header_id: str | None = None
    ) -> None:
        """Prepare to run a request of `client`.

        Args:
            deadline_s: time of the event loop at which the request is ended; None never.
            header_id: the client's `X-Request-Id`; None responds with the response's id.
        """
        self._serving = serving
        self._client = client
        self._deadline_s = deadline_s
        self._id = header_id or serving.response_id
        self._headers = [(b"x-request-id", self._id.encode())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; return early if the client disconnects."""
        work = asyncio.create_task(self._run(scope, receive, send))
        disconnect = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({work, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, disconnect):
                task.cancel()
            await asyncio.gather(work, disconnect, return_exceptions=True)
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        serving, server = self._serving, self._serving.server
        num_sequences = sum(request.params.n for request in serving.requests)
        try:
            async with server.limiter.enter(self._client, num_sequences, self._deadline_s):
                server.take_prompt_tokens(self._client, sum(len(r.prompt_token_ids) for r in serving.requests))
                serving.bucket = server.token_bucket(self._client)
                self._set_timeouts()
                try:
                    await self._respond(scope, send)
                finally:
                    usage = serving.usage
                    server.metrics.clients.count(self._client.name, usage.prompt_tokens, usage.completion_tokens)
        except Exception as error:
            if isinstance(error, OSError):  # the connection is closed
                return
            await error_response(to_api_error(error, self._serving.response_id), self._id)(scope, receive, send)

    def _set_timeouts(self) -> None:
        """Give the engine the time that is left; raise ApiError 504 if there is none."""
        if self._deadline_s is None:
            return
        left_s = self._deadline_s - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise deadline_exceeded()
        for request in self._serving.requests:
            request.timeout_s = left_s

    async def _respond(self, scope: Scope, send: Send) -> None:
        if self._serving.body.stream:
            await self._stream(scope, send)
        else:
            body = await self._serving.run_to_completion()
            await send(self._start(200, b"application/json", len(body)))
            await send({"type": "http.response.body", "body": body})

    async def _stream(self, scope: Scope, send: Send) -> None:
        """Send events. An error before the first one is an ordinary error response; later it is an event."""
        has_started = False
        try:
            async with contextlib.aclosing(self._serving.events()) as events:
                async for event in events:
                    if not has_started:
                        await send(self._start(200, b"text/event-stream; charset=utf-8"))
                        has_started = True
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            if not has_started or isinstance(error, OSError):
                raise
            api_error = to_api_error(error, self._serving.response_id)
            record_refusal(scope, api_error)
            event = b"data: " + api_error.encode() + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": DONE})

    def _start(self, status: int, media_type: bytes, length: int | None = None) -> Message:
        headers = [(b"content-type", media_type), *self._headers]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        else:
            headers.append((b"cache-control", b"no-cache"))
        return {"type": "http.response.start", "status": status, "headers": headers}


async def _encode(encode: Callable[[list[ChoiceUpdate]], bytes], updates: list[ChoiceUpdate]) -> bytes:
    """Call `encode`; in a thread if there are log-probabilities of a prompt, which may take seconds."""
    if any(update.prompt_logprobs is not None for update in updates):
        return await asyncio.to_thread(encode, updates)
    return encode(updates)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _usage_suffix(group: GenerationGroup) -> bytes:
    return b',"usage":' + msgspec.json.encode(group.usage.report())
