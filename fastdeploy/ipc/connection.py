# SPDX-License-Identifier: Apache-2.0
"""A connection to the engine process, which sends requests and receives their deltas.

Several processes may be connected to one engine.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence

from fastdeploy.core.errors import (
    ConfigError,
    DeviceFailedError,
    EngineDeadError,
    FastDeployError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    RequestTimeoutError,
)
from fastdeploy.core.generation_request import GenerationRequest, without_marks
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.stats import EngineStats
from fastdeploy.ipc import messages
from fastdeploy.ipc.engine_socket import EngineSocket
from fastdeploy.ipc.streams import MAX_UNREAD, DeltaStream, unread_error

TIMEOUT_GRACE_S = 1.0  # after which a request is ended here if the engine has not ended it in its time

OnProgress = Callable[[str, float], None]


class EngineConnection:
    """A client of a running engine process, used from one event loop.

    Attributes:
        ready: the engine's limits and description, once the model is loaded.
        stats: its latest counters.
        dead_error: why the engine process has ended; None while it runs.
    """

    def __init__(self, address: str, identity: bytes = b"") -> None:
        """Create the connection; nothing is sent before `start`.

        Args:
            address: ZeroMQ address of the engine.
            identity: name of this connection, for `disconnect_client`; empty lets ZeroMQ choose one.
        """
        self.ready: messages.Ready | None = None
        self.stats = EngineStats()
        self.dead_error: EngineDeadError | None = None
        self._end_error: FastDeployError | None = None  # of all requests, once `end_requests` was called
        self._died = asyncio.Event()
        self._address = address
        self._socket = EngineSocket(address, identity, self._handle, self.mark_dead)
        self._send = self._socket.send
        self._streams: dict[str, DeltaStream] = {}
        self._call_ids = itertools.count()
        self._pending_calls: dict[int, asyncio.Future[list[tuple[str, int]]]] = {}
        self._started: asyncio.Future[messages.Ready] | None = None
        self._on_progress: OnProgress | None = None

    async def start(self, on_progress: OnProgress | None = None) -> None:
        """Connect and wait until the model is loaded.

        Raises:
            ConfigError: the engine refused its configuration.
            DeviceFailedError: the device cannot be used.
            EngineDeadError: the process ended during start-up.
        """
        self._on_progress = on_progress
        self.ready = await self._connect()

    def _connect(self) -> asyncio.Future[messages.Ready]:
        """Connect, unless it is done; return what ends when the model is loaded."""
        if self._started is None:
            self._started = asyncio.get_running_loop().create_future()
            self._started.add_done_callback(_retrieve)
            if self.dead_error is not None:
                self._started.set_exception(self.dead_error)
            else:
                self._socket.connect()
        return self._started

    @property
    def num_requests(self) -> int:
        """Return the number of requests in flight."""
        return len(self._streams)

    @property
    def is_stalled(self) -> bool:
        """Return whether the engine process runs no Python code, because it is stopped or hangs in a native call."""
        return self._socket.is_stalled

    async def wait_until_dead(self) -> None:
        """Wait until the engine process has ended unexpectedly."""
        await self._died.wait()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[TokenDelta], None]:
        """Yield the deltas of a request as they arrive, until every choice is finished.

        Unread deltas of one choice are merged. A request with too many unread tokens is aborted, so that a client that
        does not read costs little memory. Closing the iterator early aborts the request, so iterate inside
        `contextlib.aclosing`.

        Raises:
            InvalidRequestError: the engine refused the request, or its client does not read.
            QueueFullError: the engine's queue is full.
            RequestFailedError: the engine failed to start the request, through a fault of its own.
            RequestTimeoutError: the engine has not ended the request in its time.
            EngineDeadError: the engine process has ended.
            ShuttingDownError: the server cannot wait for the request any longer.
        """
        if (error := self.dead_error or self._end_error) is not None:
            raise error
        if request.request_id in self._streams:
            raise InvalidRequestError("request_id", f"{without_marks(request.request_id)!r} is in flight already")
        stream = self._streams[request.request_id] = DeltaStream(request.request_id, len(request.open_choices))
        loop = asyncio.get_running_loop()
        finished = False
        timer = None
        if request.timeout_s is not None:
            timer = loop.call_later(request.timeout_s + TIMEOUT_GRACE_S, self._expire, stream)
        try:
            self._send(messages.AddRequest(request))
            while True:
                deltas = await stream.get(loop)
                finished = stream.num_open == 0 or stream.error is not None
                if deltas:
                    yield deltas
                if stream.error is not None:
                    raise stream.error
                if finished:
                    return
        finally:
            if timer is not None:
                timer.cancel()
            if finished or stream.num_open == 0 or stream.error is not None or self.dead_error is not None:
                del self._streams[request.request_id]
            else:  # the id stays in use until the engine has aborted the request
                stream.drops_itself = True
                self._send(messages.AbortRequest(request.request_id))

    def run(self, request: GenerationRequest, stream: DeltaStream) -> None:
        """Add a request whose deltas and error are put into `stream` as they arrive.

        Raises:
            EngineDeadError: the engine process has ended.
        """
        if self.dead_error is not None:
            raise self.dead_error
        self._send(messages.AddRequest(request))
        stream.drops_itself = True
        self._streams[request.request_id] = stream

    def abort(self, request_id: str) -> bool:
        """Abort a request; its stream ends with finish_reason abort. Return whether it was in flight."""
        if request_id not in self._streams:
            return False
        self._send(messages.AbortRequest(request_id))
        return True

    def end_requests(self, error: FastDeployError) -> None:
        """Fail all current and future requests of this connection with `error`, and abort them on the engine."""
        self._end_error = error
        for stream in self._streams.values():
            if not stream.drops_itself and stream.error is None:
                stream.fail(error)
                self._send(messages.AbortRequest(stream.request_id))

    async def abort_requests(self, request_ids: Sequence[str] | None, salt_prefix: str = "") -> list[tuple[str, int]]:
        """Abort requests of any connection; their streams end with finish_reason abort.

        Args:
            request_ids: ids as clients know them, each for all prompts of an HTTP request; None aborts all requests.
            salt_prefix: only requests whose `cache_salt` begins with it are aborted.

        Returns:
            The id of each aborted request, with its marks, and the number of tokens that its choices had.

        Raises:
            EngineDeadError: the engine process has ended.
        """
        if self.dead_error is not None:
            raise self.dead_error
        call_id = next(self._call_ids)
        result = self._pending_calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(messages.AbortMany(call_id, None if request_ids is None else list(request_ids), salt_prefix))
            return await result
        finally:
            del self._pending_calls[call_id]

    def set_role(self, role: str) -> None:
        """Ask the agent of this node to take a role, through the engine; `stats.node.role` shows it."""
        self._send(messages.SetRole(role))

    async def close(self) -> None:
        """Close the connection; requests in flight continue unless they were aborted."""
        self._socket.close()

    def mark_dead(self, reason: str) -> None:
        """Fail all current and future requests, because the engine process has ended."""
        if self.dead_error is not None:
            return
        self.dead_error = EngineDeadError(reason)
        self._finish_start(self.dead_error)
        for stream in self._streams.values():
            stream.fail(self.dead_error)
        for result in self._pending_calls.values():
            if not result.done():
                result.set_exception(self.dead_error)
        self._died.set()

    def _handle(self, message: messages.ToClient) -> None:
        match message:
            case messages.Deltas(plain, others):
                for request_id, index, token_ids, draft_sources, seed, first_index in plain:
                    if (stream := self._streams.get(request_id)) is not None and stream.error is None:
                        stream.put_tokens(index, token_ids, draft_sources, seed, first_index)
                        self._note_arrival(stream)
                for delta in others:
                    self._put(delta)
            case messages.Stats(stats):
                self.stats = stats
            case messages.Rejected(request_id, kind, field, text):
                if request_id in self._streams:
                    self._streams[request_id].fail(_rejection(kind, field, text))
                    self._drop_abandoned(request_id)
            case messages.Aborted(call_id, counts):
                if call_id in self._pending_calls and not self._pending_calls[call_id].done():
                    self._pending_calls[call_id].set_result(counts)
            case messages.Progress(what, fraction):
                if self._on_progress is not None:
                    self._on_progress(what, fraction)
            case messages.Ready():
                self._finish_start(message)
            case messages.StartupFailed(field, text, is_configuration):
                error = ConfigError(field, text) if is_configuration else DeviceFailedError(f"{field}: {text}")
                self._finish_start(error)

    def _put(self, delta: TokenDelta) -> None:
        request_id = delta.request_id  # a stream that passes the delta on may change it
        stream = self._streams.get(request_id)
        if stream is None or stream.error is not None:
            return
        stream.put(delta)
        if stream.num_open == 0:
            stream.wake()
            self._drop_abandoned(request_id)
        else:
            self._note_arrival(stream)

    def _note_arrival(self, stream: DeltaStream) -> None:
        """Wake the reader; abort a request with too many unread tokens."""
        stream.wake()
        if stream.num_unread > MAX_UNREAD and not stream.drops_itself:
            stream.fail(unread_error(stream))
            self._send(messages.AbortRequest(stream.request_id))

    def _expire(self, stream: DeltaStream) -> None:
        """Fail a request whose time is over, and abort it."""
        if stream.error is None and stream.num_open:
            stream.fail(RequestTimeoutError("the request's time is over"))
            self._send(messages.AbortRequest(stream.request_id))

    def _drop_abandoned(self, request_id: str) -> None:
        if self._streams[request_id].drops_itself:
            del self._streams[request_id]

    def _finish_start(self, result: messages.Ready | FastDeployError) -> None:
        if self._started is None or self._started.done():
            return
        if isinstance(result, FastDeployError):
            self._started.set_exception(result)
        else:
            self._started.set_result(result)


def _retrieve(started: asyncio.Future[messages.Ready]) -> None:
    """Mark the error of a start as known, for which nobody waits if the process that started the engine ends first."""
    if not started.cancelled():
        started.exception()


def _rejection(kind: str, field: str, text: str) -> FastDeployError:
    if kind == "full":
        return QueueFullError(text)
    return RequestFailedError(text) if kind == "internal" else InvalidRequestError(field, text)
