# SPDX-License-Identifier: Apache-2.0
"""Runs one checked request as a response of the HTTP application, and aborts it when its client disconnects."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import Message, Receive, Scope, Send

from fastdeploy.entrypoints.openai.clients import Client
from fastdeploy.entrypoints.openai.errors import deadline_exceeded, error_response, record_refusal, to_api_error
from fastdeploy.entrypoints.openai.event_stream import STREAM_HEADERS, EventStream
from fastdeploy.entrypoints.openai.load_report import REPORT_HEADER, load_report
from fastdeploy.entrypoints.openai.serving_base import Serving


class GenerationResponse:
    """Runs a request as an ASGI response. If the client disconnects, the request is aborted on the engine."""

    def __init__(
        self, serving: Serving, client: Client, deadline_s: float | None = None, header_id: str | None = None
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
        self._headers = [(name, self._id.encode()) for name in serving.id_headers]

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
            start = self._start(200, b"application/json", len(body))
            if report := load_report(scope, self._serving.server.scheduler.stats):
                start["headers"].append((REPORT_HEADER.encode(), report.encode()))
            await send(start)
            await send({"type": "http.response.body", "body": body})

    async def _stream(self, scope: Scope, send: Send) -> None:
        """Send events. An error before the first one is an ordinary error response; later it is an event."""
        serving = self._serving
        stream = EventStream(send, self._start(200, b"text/event-stream; charset=utf-8"))
        try:
            async with stream.kept_alive(serving), contextlib.aclosing(serving.events()) as events:
                async for event in events:
                    await stream.send(event)
        except Exception as error:
            if not stream.has_started or isinstance(error, OSError):
                raise
            api_error = to_api_error(error, serving.response_id)
            record_refusal(scope, api_error)
            await stream.send(serving.error_event(api_error))
        await stream.close(serving.last_event)

    def _start(self, status: int, media_type: bytes, length: int | None = None) -> Message:
        headers = [(b"content-type", media_type), *self._headers]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        else:
            headers.extend(STREAM_HEADERS)
        return {"type": "http.response.start", "status": status, "headers": headers}


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
