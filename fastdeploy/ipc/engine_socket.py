# SPDX-License-Identifier: Apache-2.0
"""A client's socket to the engine process, used from one event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

import zmq

from fastdeploy.ipc import messages
from fastdeploy.ipc.heartbeat import STALLED_S, heartbeat_file, silent_s

FRESH_S = 1.0  # age of a heartbeat up to which no newer one is looked for: every request asks

_POLLIN = int(zmq.POLLIN)  # arithmetic on the enumeration is slow

logger = logging.getLogger("fastdeploy.server")


class EngineSocket:
    """Sends messages to the engine and calls a function for those that it receives."""

    def __init__(
        self,
        address: str,
        identity: bytes,
        on_message: Callable[[messages.ToClient], None],
        on_error: Callable[[str], None],
    ) -> None:
        """Create the socket; nothing is sent before `connect`.

        Args:
            address: ZeroMQ address of the engine.
            identity: name of this client, for `ClientDisconnected`; empty lets ZeroMQ choose one.
            on_message: called for each message.
            on_error: called with the reason if a message cannot be read or handled.
        """
        self._address = address
        self._heartbeat_file = heartbeat_file(address)
        self._last_beat_s = -math.inf
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.set_hwm(0)  # a full queue would drop messages, and tokens with them
        if identity:
            self._socket.identity = identity
        self._on_message, self._on_error = on_message, on_error
        self._loop: asyncio.AbstractEventLoop | None = None

    def connect(self) -> None:
        """Connect, say `Hello` and begin to receive."""
        self._loop = asyncio.get_running_loop()
        self._socket.connect(self._address)
        self._loop.add_reader(self._socket.fileno(), self._receive)
        self.send(messages.Hello())

    @property
    def is_stalled(self) -> bool:
        """Return whether the engine process runs no Python code, because it is stopped or hangs in a native call."""
        now_s = time.monotonic()
        if now_s - self._last_beat_s > FRESH_S:
            self._last_beat_s = now_s - silent_s(self._heartbeat_file)
        return now_s - self._last_beat_s > STALLED_S

    def send(self, message: messages.ToEngine) -> None:
        """Send without blocking; the queue is unlimited."""
        if self._socket.closed:
            return
        self._socket.send(messages.encode(message), zmq.NOBLOCK)
        if self._loop is not None:
            self._loop.call_soon(
                self._receive
            )  # sending may clear the readiness of the descriptor for a received message

    def close(self) -> None:
        """Close the socket; requests in flight continue unless they were aborted."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._context.term()

    def _receive(self) -> None:
        """Handle all received messages; the socket's descriptor signals only the first."""
        try:
            while not self._socket.closed and int(self._socket.get(zmq.EVENTS)) & _POLLIN:
                self._on_message(messages.decode_to_client(self._socket.recv(zmq.NOBLOCK)))
        except Exception as error:  # without this, all requests would wait forever
            logger.exception("cannot read the engine's messages")
            self._on_error(f"the engine's messages cannot be read: {error}")
