# SPDX-License-Identifier: Apache-2.0
"""One engine for several calls of `generate` and `chat` at once, by turns in one thread or in several threads."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from fastdeploy.core.errors import DeviceFailedError, EngineDeadError, RequestFailedError, device_errors
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.request import GenerationRequest
from fastdeploy.engine.engine import Engine
from fastdeploy.entrypoints.deferred_signals import deferred_signals
from fastdeploy.metrics.offline_metrics import OfflineMetrics
from fastdeploy.metrics.reader import Metric
from fastdeploy.ops.startup import paddle_thread

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Inbox:
    """What steps have emitted for the requests of a call.

    Attributes:
        deltas: those that the call has not taken yet.
        unfinished: ids of its requests in the engine.
        error: why these have been removed from the engine, which the call raises.
    """

    deltas: list[TokenDelta] = field(default_factory=list)
    unfinished: set[str] = field(default_factory=set)
    error: Exception | None = None


class _InFlight:
    """A request in the engine: whose it is, and how far it is."""

    def __init__(self, inbox: _Inbox, request: GenerationRequest) -> None:
        self.inbox = inbox
        self.request = request
        self.num_tokens = [0] * request.params.n
        self.num_running = request.params.n


class SharedEngine:
    """Runs the steps of an engine for all calls: whoever runs a step hands out what it has emitted.

    One lock is held while requests are added, for a step, while requests are aborted and while metrics are read.
    Threads that wait for it take turns. A call that has ended only puts its requests on a list; whoever holds the lock
    next aborts them. So a call may also be ended by the garbage collector, in any thread and even within a step.

    If a step raises an exception, every call that has requests in the engine raises it. The requests are aborted then,
    and the engine is used again if `Engine.check_integrity` finds no fault.
    """

    def __init__(self, engine: Engine, metrics: OfflineMetrics) -> None:
        """Share an engine that nobody else uses; `metrics` counts its requests."""
        self._engine = engine
        self._metrics = metrics
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # held by the thread that gets the lock next
        self._in_flight: dict[str, _InFlight] = {}
        self._ended: deque[_Inbox] = deque()
        self._failure: BaseException | None = None

    def check(self, requests: Sequence[GenerationRequest]) -> None:
        """Check requests that a call is going to have, and compile their grammars.

        Raises:
            InvalidRequestError: a request cannot be served.
            QueueFullError: too many grammars are being compiled.
            EngineDeadError: a step has failed, and has left the engine in a state in which it cannot be used.
        """
        with self._locked():
            self._check_alive()
            prepared = [self._engine.prepare(request) for request in requests]
        for future in prepared:
            if future is not None:
                future.result()
        with self._locked():
            for request in requests:
                self._engine.admission.check(request)

    def call(self, requests: Sequence[GenerationRequest]) -> Call:
        """Return a call that will have these requests."""
        inbox = _Inbox()
        return Call(self, requests, inbox, partial(self._ended.append, inbox))

    def read_metrics(self) -> list[Metric]:
        """Return all metrics as they are now."""
        with self._locked():
            return self._metrics.read()

    def num_unfinished(self) -> int:
        """Return the number of requests in the engine."""
        with self._locked():
            return len(self._in_flight)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests with finish reason `abort`; unknown ids are ignored."""
        with self._locked():
            for request_id in request_ids:
                self._deliver(self._engine.abort(request_id))

    def add(self, inbox: _Inbox, requests: Sequence[GenerationRequest]) -> None:
        """Add the requests of a call; if one is refused, abort those before it."""
        with self._locked():
            self._check_alive()
            try:
                for request in requests:
                    inbox.unfinished.add(request.request_id)
                    self._in_flight[request.request_id] = _InFlight(inbox, request)
                    with device_errors():
                        deltas = self._engine.add_request(request)
                    self._metrics.started(request)
                    self._deliver(deltas)
            except BaseException as exception:
                self._remove([request.request_id for request in requests], exception)
                raise

    def advance(self, inbox: _Inbox) -> list[TokenDelta]:
        """Take what was emitted for a call; if there is nothing, run a step first."""
        with self._locked():
            if not inbox.deltas and inbox.error is None:
                self._step()
            if inbox.error is not None:
                raise inbox.error
            deltas, inbox.deltas = inbox.deltas, []
            return deltas

    def abort_ended(self) -> None:
        """Abort the requests of calls that have ended, unless another thread holds the lock, which will do it."""
        with deferred_signals():
            self._abort_if_free()

    def _abort_if_free(self) -> None:
        while self._ended and self._lock.acquire(blocking=False):
            try:
                with paddle_thread():
                    self._abort_ended()
            finally:
                self._lock.release()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, without interruption by signals, in a thread that may call Paddle."""
        with deferred_signals():
            with self._turn:
                self._lock.acquire()
            try:
                with paddle_thread():
                    self._abort_ended()
                    yield
            finally:
                self._lock.release()
                self._abort_if_free()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._dead_error()

    def _dead_error(self) -> EngineDeadError:
        error = EngineDeadError(f"the engine has failed and cannot be used again; create a new LLM ({self._failure})")
        error.__cause__ = self._failure
        return error

    def _step(self) -> None:
        """Run a step; if it raises an exception, end all requests with it."""
        try:
            if not self._engine.has_unfinished():
                raise RequestFailedError("the engine has been told to abort the requests")
            with device_errors():
                deltas = self._engine.step()
            self._deliver(deltas)
        except BaseException as exception:
            self._fail(exception if isinstance(exception, Exception) else _interruption(exception))
            self._remove(list(self._in_flight), exception)
            raise

    def _deliver(self, deltas: Sequence[TokenDelta]) -> None:
        """Give deltas to the calls whose requests they are of, and record the ends of choices."""
        for delta in deltas:
            request = self._in_flight.get(delta.request_id)
            if request is None:  # somebody else has added it to the engine
                continue
            request.inbox.deltas.append(delta)
            request.num_tokens[delta.index] += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._metrics.finished(request.request, request.num_tokens[delta.index], delta)
                request.num_running -= 1
                if request.num_running == 0:
                    self._forget(delta.request_id)

    def _abort_ended(self) -> None:
        while self._ended:
            self._remove(list(self._ended.popleft().unfinished))

    def _remove(self, request_ids: Sequence[str], exception: BaseException | None = None) -> None:
        """Abort requests, of which nobody will take anything any more.

        If that fails, or the engine holds state of other than the remaining requests after an exception, it is not used
        again, and the calls that have the remaining requests get an error.

        Args:
            exception: what the engine has raised.
        """
        for request_id in request_ids:
            self._forget(request_id)
        if self._failure is not None:
            return
        try:
            if isinstance(exception, DeviceFailedError):
                raise exception  # what the device holds may be lost
            with device_errors():
                for request_id in request_ids:
                    self._engine.abort(request_id)
            if exception is not None:
                self._engine.check_integrity()
        except BaseException as failure:
            logger.exception("the engine has failed")
            self._failure = failure
            self._fail(self._dead_error())
            self._in_flight.clear()

    def _fail(self, error: Exception) -> None:
        """Let all calls that have requests in the engine raise an error."""
        for request in self._in_flight.values():
            request.inbox.error = error

    def _forget(self, request_id: str) -> None:
        if (request := self._in_flight.pop(request_id, None)) is not None:
            request.inbox.unfinished.discard(request_id)


class Call:
    """The requests of a call of `generate` or `chat`, which are aborted at the end of a `with` block if they go on.

    Iterating, once, adds them to the engine, runs steps as needed, and yields what was emitted for them since the last
    time, which may be nothing.
    """

    def __init__(
        self, engine: SharedEngine, requests: Sequence[GenerationRequest], inbox: _Inbox, on_end: Callable[[], None]
    ) -> None:
        """Call `on_end` at the end of the block, or when the call is garbage."""
        self._engine = engine
        self._requests = requests
        self._inbox = inbox
        self._end = weakref.finalize(self, on_end)
        self._end.atexit = False

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()
        self._engine.abort_ended()

    def __iter__(self) -> Iterator[list[TokenDelta]]:
        inbox = self._inbox
        self._engine.add(inbox, self._requests)
        while inbox.unfinished or inbox.deltas or inbox.error:
            yield self._engine.advance(inbox)


def _interruption(exception: BaseException) -> RequestFailedError:
    """Return the error of the other calls if a step of one call was interrupted."""
    error = RequestFailedError("a step was interrupted")
    error.__cause__ = exception
    return error
