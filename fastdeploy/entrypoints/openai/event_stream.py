# SPDX-License-Identifier: Apache-2.0
"""Sends server-sent events, and keeps a stream alive that has none for a while."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.types import Message, Send

from fastdeploy.entrypoints.openai.serving_base import Serving

KEEP_ALIVE_S = 15.0  # proxies and clients close connections that are silent for 30 s to 60 s
STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""Of every stream: proxies do not store it, and nginx passes each event on at once instead of filling a buffer."""


class EventStream:
    """The response of a stream, which begins with its first event.

    Attributes:
        has_started: the status has been sent, so an error can only be an event.
    """

    def __init__(self, send: Send, start: Message) -> None:
        """Prepare to send `start`, the message that begins the response, and events after it."""
        self._send = send
        self._start = start
        self._is_kept_alive = False
        self._lock = asyncio.Lock()
        self._sent_s = asyncio.get_running_loop().time()
        self.has_started = False

    async def send(self, event: bytes) -> None:
        """Send an event."""
        if not self._is_kept_alive:
            await self._send_event(event)
            return
        async with self._lock:  # against a keep-alive event at the same time
            await self._send_event(event)
        self._sent_s = asyncio.get_running_loop().time()

    async def _send_event(self, event: bytes) -> None:
        if not self.has_started:
            self.has_started = True
            await self._send(self._start)
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def close(self, last_event: bytes) -> None:
        """Send the last event and end the response."""
        await self._send({"type": "http.response.body", "body": last_event})

    @contextlib.asynccontextmanager
    async def kept_alive(self, serving: Serving) -> AsyncIterator[None]:
        """Send `serving.keep_alive_event` each time that nothing has been sent for KEEP_ALIVE_S; nothing if empty."""
        if not serving.keep_alive_event:
            yield
            return
        self._is_kept_alive = True
        task = asyncio.create_task(self._keep_alive(serving))
        try:
            yield
        finally:
            async with self._lock:  # an event that is being sent is sent to its end
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _keep_alive(self, serving: Serving) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            wait_s = self._sent_s + KEEP_ALIVE_S - clock()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            else:
                await self.send(serving.keep_alive_event)
