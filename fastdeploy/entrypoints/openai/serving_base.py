# SPDX-License-Identifier: Apache-2.0
"""One accepted request: run to the end or streamed, with everything undone when its client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.request import GenerationRequest
from fastdeploy.entrypoints.openai.errors import error_response, to_api_error
from fastdeploy.entrypoints.openai.generation import ChoiceUpdate, ChunkAggregator, Generation, GenerationGroup
from fastdeploy.entrypoints.openai.logprobs import describe_tokens
from fastdeploy.entrypoints.openai.protocol import GenerationFields, StreamOptions
from fastdeploy.entrypoints.openai.server import ApiServer

MAX_REQUEST_ID_LENGTH = 128
DONE = b"data: [DONE]\n\n"


def make_request_id(requested: str | None) -> str:
    """Return the client's own request id, or a fresh one.

    Raises:
        InvalidRequestError: it is empty, too long, or no printable ASCII.
    """
    if requested is None:
        return uuid.uuid4().hex
    if not 1 <= len(requested) <= MAX_REQUEST_ID_LENGTH or not requested.isascii() or not requested.isprintable():
        raise InvalidRequestError("request_id", f"expected 1 to {MAX_REQUEST_ID_LENGTH} printable ASCII characters")
    return requested


class ServingBase(ABC):
    """A checked request and the shape of its answer."""

    object_name = ""
    chunk_object_name = ""

    def __init__(self, server: ApiServer, body: GenerationFields, answer_id: str) -> None:
        self.server = server
        self.body = body
        self.answer_id = answer_id
        self._created = int(time.time())
        self.requests: Sequence[GenerationRequest] = ()

    @abstractmethod
    def choice(self, update: ChoiceUpdate) -> dict[str, Any]:
        """Return the choice of a whole answer."""

    @abstractmethod
    def chunk_choices(self, update: ChoiceUpdate) -> Iterator[dict[str, Any]]:
        """Yield the choices of the chunks that `update` makes, one chunk each."""

    async def run_to_completion(self) -> bytes:
        """Run to the end and return the JSON answer."""
        group = self._group()
        updates = await group.run_to_completion()
        answer = self._frame(self.object_name)
        answer["choices"] = [self.choice(update) for update in updates]
        answer["usage"] = group.usage.as_dict()
        return msgspec.json.encode(answer)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events, the last one excepted."""
        group = self._group()
        options = self.body.stream_options or StreamOptions()
        aggregator = ChunkAggregator(self.body.max_streaming_response_tokens or 1)
        head = self._chunk_head()
        async with contextlib.aclosing(group.updates()) as stream:
            async for updates in stream:
                lines = []
                for update in aggregator.push(updates):
                    usage = _usage(group) if options.continuous_usage_stats else b""
                    for choice in self.chunk_choices(update):
                        lines.append(head + msgspec.json.encode(choice) + b"]" + usage + b"}\n\n")
                if lines:
                    yield b"".join(lines)
        if options.include_usage:
            yield head + b"]" + _usage(group) + b"}\n\n"

    def extensions(self, update: ChoiceUpdate, names: tuple[str, str]) -> dict[str, Any]:
        """Return the fields that both endpoints add to a choice.

        Args:
            names: the fields' names for the prompt's and the choice's token ids.
        """
        delta = update.delta
        made: dict[str, Any] = {}
        if self.body.return_token_ids:
            decode = partial(self.server.tokenizer.decode, skip_special_tokens=False)
            if update.is_first:
                prompt = self.requests[update.prompt_index].prompt_token_ids
                made.update({names[0]: prompt, "prompt_tokens": decode(prompt)})
            made.update({names[1]: delta.token_ids, "completion_tokens": decode(delta.token_ids)})
            if self.body.collect_metrics:
                made["tokens"] = describe_tokens(self.server.tokenizer, delta)
        if delta.finish_reason is not None:
            made["stop_reason"] = delta.stop_reason
            if self.body.collect_metrics:
                made["speculate_metrics"] = asdict(delta.speculate_metrics) if delta.speculate_metrics else None
                made["metrics"] = asdict(delta.metrics) if delta.metrics else None
        return {"seed": delta.seed, **made}

    def _group(self) -> GenerationGroup:
        server = self.server
        return GenerationGroup(
            [
                Generation(server.client, server.tokenizer, server.recorder, request, at)
                for at, request in enumerate(self.requests)
            ]
        )

    def _frame(self, object_name: str) -> dict[str, Any]:
        frame: dict[str, Any] = {
            "id": self.answer_id,
            "object": object_name,
            "created": self._created,
            "model": self.server.model_name,
            "system_fingerprint": self.server.system_fingerprint,
        }
        note = self.server.lossy_note()
        if note is not None:
            frame["speculation"] = note
        return frame

    def _chunk_head(self) -> bytes:
        """Return the beginning that all chunks share, up to their choices: encoded once, not per token."""
        frame = msgspec.json.encode(self._frame(self.chunk_object_name))
        return b"data: " + frame.removesuffix(b"}") + b',"choices":['


class GenerationResponse:
    """Runs a request as an ASGI response. A client that disconnects cancels it, and with it the engine's work."""

    def __init__(self, serving: ServingBase, client_id: str | None = None) -> None:
        """Answer with the `X-Request-Id` that the client sent, else with the answer's own id."""
        self._serving = serving
        self._id = client_id or serving.answer_id
        self._headers = [(b"x-request-id", self._id.encode())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; return early when the client has left."""
        work = asyncio.create_task(self._run(scope, receive, send))
        leaving = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, leaving):
                task.cancel()
            await asyncio.gather(work, leaving, return_exceptions=True)
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._serving.server.limiter.enter():
                if self._serving.body.stream:
                    await self._stream(send)
                else:
                    body = await self._serving.run_to_completion()
                    await send(self._start(200, b"application/json", len(body)))
                    await send({"type": "http.response.body", "body": body})
        except Exception as error:
            if isinstance(error, OSError):  # the connection is gone
                return
            await error_response(to_api_error(error, self._serving.answer_id), self._id)(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        """Send events. An error before the first one is an ordinary error answer; later it is an event of its own."""
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
            event = _event(to_api_error(error, self._serving.answer_id).body())
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": DONE})

    def _start(self, status: int, media_type: bytes, length: int | None = None) -> Message:
        headers = [(b"content-type", media_type), *self._headers]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        else:
            headers.append((b"cache-control", b"no-cache"))
        return {"type": "http.response.start", "status": status, "headers": headers}


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _usage(group: GenerationGroup) -> bytes:
    return b',"usage":' + msgspec.json.encode(group.usage.as_dict())


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
