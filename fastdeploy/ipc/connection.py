# SPDX-License-Identifier: Apache-2.0
"""A connection to the engine process: sends requests, hands each its token deltas. Several processes may hold one."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Sequence

import zmq

from fastdeploy.core.errors import ConfigError, EngineDeadError, FastDeployError, InvalidRequestError, QueueFullError
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.stats import EngineStats
from fastdeploy.ipc import messages
from fastdeploy.ipc.merge import join_delta, join_tokens

MAX_UNREAD = 2**15  # tokens and alternatives that one request may pile up for a client that does not read

_POLLIN = int(zmq.POLLIN)  # arithmetic on the library's enumeration is slow

logger = logging.getLogger("fastdeploy.server")

OnProgress = Callable[[str, float], None]


class _Stream:
    """What has arrived for one request and was not read yet; holds at most one delta per choice.

    Attributes:
        num_unread: tokens and their alternatives in it.
    """

    def __init__(self, request_id: str, num_choices: int) -> None:
        self.request_id = request_id
        self.num_open = num_choices
        self.num_unread = 0
        self.is_abandoned = False
        self.deltas: dict[int, TokenDelta] = {}
        self.error: FastDeployError | None = None
        self._reader: asyncio.Future[None] | None = None  # waits for the next thing to arrive

    def put(self, delta: TokenDelta) -> None:
        self.num_open -= delta.finish_reason is not None
        self.num_unread += len(delta.token_ids) * (1 + len(delta.logprobs[0].top) if delta.logprobs else 1)
        waiting = self.deltas.setdefault(delta.index, delta)
        if waiting is not delta:
            join_delta(waiting, delta)

    def put_tokens(self, index: int, token_ids: list[int], drafted_by: list[str], seed: int) -> None:
        """Put a delta that is nothing but tokens."""
        self.num_unread += len(token_ids)
        waiting = self.deltas.get(index)
        if waiting is None:
            self.deltas[index] = TokenDelta(self.request_id, index, token_ids, drafted_by, seed=seed)
        else:
            join_tokens(waiting, token_ids, drafted_by)

    def fail(self, error: FastDeployError) -> None:
        self.error = error
        self.wake()

    async def take(self, loop: asyncio.AbstractEventLoop) -> list[TokenDelta]:
        """Wait for something, then return all of it."""
        while not self.deltas and self.error is None:
            self._reader = loop.create_future()
            await self._reader
        taken, self.deltas, self.num_unread = self.deltas, {}, 0
        return list(taken.values())

    def wake(self) -> None:
        """Let the reader take what has arrived."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class EngineConnection:
    """Speaks with an engine process that somebody else started; used from one event loop.

    Attributes:
        ready: what the engine said of itself once the model was loaded.
        stats: its latest counters.
        death: why the engine is gone, or None.
    """

    def __init__(self, address: str, identity: bytes = b"") -> None:
        """Prepare; nothing is sent before `start`.

        Args:
            address: ZeroMQ address of the engine.
            identity: name by which the engine's owner can speak of this connection; empty takes any.
        """
        self.ready: messages.Ready | None = None
        self.stats = EngineStats()
        self.death: EngineDeadError | None = None
        self._died = asyncio.Event()
        self._address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.set_hwm(0)  # a full queue would drop messages, and tokens with them
        if identity:
            self._socket.identity = identity
        self._streams: dict[str, _Stream] = {}
        self._tickets = itertools.count()
        self._answers: dict[int, asyncio.Future[list[tuple[str, int]]]] = {}
        self._started: asyncio.Future[messages.Ready] | None = None
        self._on_progress: OnProgress | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self, on_progress: OnProgress | None = None) -> None:
        """Connect and wait until the model is loaded.

        Raises:
            ConfigError: the engine refuses its configuration.
            EngineDeadError: it died while starting.
        """
        if self.death is not None:
            raise self.death
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.create_future()
        self._socket.connect(self._address)
        self._loop.add_reader(self._socket.fileno(), self._receive)
        self._send(messages.Hello())
        self.ready = await self._started

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        return len(self._streams)

    async def wait_dead(self) -> None:
        """Return when the engine has died (never after `close`)."""
        await self._died.wait()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[TokenDelta], None]:
        """Yield what the engine emitted since the last time, until every choice has ended.

        Deltas of one choice that wait are merged, and a request of which too much waits is ended, so that a reader who
        does not read costs little memory. Closing the iterator early aborts the request: iterate under
        `contextlib.aclosing`.

        Raises:
            InvalidRequestError, QueueFullError: the engine did not take the request, or nobody reads what it emits.
            EngineDeadError: the engine is dead or dies meanwhile.
        """
        if self.death is not None:
            raise self.death
        if request.request_id in self._streams:
            raise InvalidRequestError("request_id", f"{request.request_id!r} is in flight already")
        stream = self._streams[request.request_id] = _Stream(request.request_id, request.params.n)
        loop = asyncio.get_running_loop()
        finished = False
        try:
            self._send(messages.AddRequest(request))
            while True:
                deltas = await stream.take(loop)
                finished = stream.num_open == 0 or stream.error is not None
                if deltas:
                    yield deltas
                if stream.error is not None:
                    raise stream.error
                if finished:
                    return
        finally:
            if finished or stream.num_open == 0 or stream.error is not None or self.death is not None:
                del self._streams[request.request_id]
            else:  # the id stays taken until the engine has let go of it
                stream.is_abandoned = True
                self._send(messages.AbortRequest(request.request_id))

    def abort(self, request_id: str) -> bool:
        """Ask the engine to end a request; its stream ends with finish_reason abort. Return whether it is in flight."""
        if request_id not in self._streams:
            return False
        self._send(messages.AbortRequest(request_id))
        return True

    def abort_all(self) -> None:
        """Ask the engine to end every request in flight."""
        for request_id in list(self._streams):
            self.abort(request_id)

    async def abort_requests(self, request_ids: Sequence[str] | None, owner_salt: str = "") -> list[tuple[str, int]]:
        """End requests, whichever connection they came through; their streams end with finish_reason abort.

        Args:
            request_ids: an id also names the requests `ID-0`, `ID-1`, ... that several prompts of one HTTP request
                have; None ends all requests.
            owner_salt: only requests whose `cache_salt` begins with it are ended.

        Returns:
            The id of each request ended and how many tokens its choices had by then.

        Raises:
            EngineDeadError: the engine is dead or dies meanwhile.
        """
        if self.death is not None:
            raise self.death
        ticket = next(self._tickets)
        answer = self._answers[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._send(messages.AbortMany(ticket, None if request_ids is None else list(request_ids), owner_salt))
            return await answer
        finally:
            del self._answers[ticket]

    async def close(self) -> None:
        """Leave; requests in flight go on unless they were aborted."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._context.term()

    def die(self, reason: str) -> None:
        """Fail everything in flight and everything to come: the engine is gone."""
        if self.death is not None:
            return
        self.death = EngineDeadError(reason)
        self._start_ends(self.death)
        for stream in self._streams.values():
            stream.fail(self.death)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self.death)
        self._died.set()

    def _send(self, message: messages.ToEngine) -> None:
        """Send; the queue has no limit and takes it at once."""
        if self._socket.closed:
            return
        self._socket.send(messages.encode(message), zmq.NOBLOCK)
        if self._loop is not None:
            self._loop.call_soon(self._receive)  # the send may have eaten the wake-up of a message that waits

    def _receive(self) -> None:
        """Handle every message that is there: the socket's descriptor tells of the first one only."""
        try:
            while not self._socket.closed and int(self._socket.get(zmq.EVENTS)) & _POLLIN:
                self._handle(messages.decode_to_client(self._socket.recv(zmq.NOBLOCK)))
        except Exception as error:  # nobody would be told anything any more
            logger.exception("cannot read what the engine says")
            self.die(f"the engine's messages cannot be read: {error}")

    def _handle(self, message: messages.ToClient) -> None:
        match message:
            case messages.Deltas(plain, others):
                for request_id, index, token_ids, drafted_by, seed in plain:
                    if (stream := self._streams.get(request_id)) is not None and stream.error is None:
                        stream.put_tokens(index, token_ids, drafted_by, seed)
                        self._note_arrival(stream)
                for delta in others:
                    self._put(delta)
            case messages.Stats(stats):
                self.stats = stats
            case messages.Rejected(request_id, kind, field, text):
                error = QueueFullError(text) if kind == "full" else InvalidRequestError(field, text)
                if request_id in self._streams:
                    self._streams[request_id].fail(error)
                    self._forget_abandoned(request_id)
            case messages.Aborted(ticket, counts):
                if ticket in self._answers and not self._answers[ticket].done():
                    self._answers[ticket].set_result(counts)
            case messages.Progress(what, fraction):
                if self._on_progress is not None:
                    self._on_progress(what, fraction)
            case messages.Ready():
                self._start_ends(message)
            case messages.StartupFailed(field, text):
                self._start_ends(ConfigError(field, text))

    def _put(self, delta: TokenDelta) -> None:
        stream = self._streams.get(delta.request_id)
        if stream is None or stream.error is not None:
            return
        stream.put(delta)
        if stream.num_open == 0:
            stream.wake()
            self._forget_abandoned(delta.request_id)
        else:
            self._note_arrival(stream)

    def _note_arrival(self, stream: _Stream) -> None:
        """Wake the reader; end a request that nobody reads."""
        stream.wake()
        if stream.num_unread > MAX_UNREAD and not stream.is_abandoned:
            stream.fail(InvalidRequestError("stream", f"ended: the client left {stream.num_unread} tokens unread"))
            self._send(messages.AbortRequest(stream.request_id))

    def _forget_abandoned(self, request_id: str) -> None:
        if self._streams[request_id].is_abandoned:
            del self._streams[request_id]

    def _start_ends(self, result: messages.Ready | FastDeployError) -> None:
        if self._started is None or self._started.done():
            return
        if isinstance(result, FastDeployError):
            self._started.set_exception(result)
        else:
            self._started.set_result(result)
