# SPDX-License-Identifier: Apache-2.0
"""The engine process: it receives messages, adds and aborts requests, runs steps and sends what they emit."""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
import zmq

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.env import read_env
from fastdeploy.core.errors import ConfigError, FastDeployError, InvalidRequestError, QueueFullError, RequestFailedError
from fastdeploy.core.faults import arm
from fastdeploy.core.generation_request import is_requested, without_client_mark
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.process import die_with_parent, is_out_of_memory, write_stacks_on_signal
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.stats import EngineStats
from fastdeploy.ipc import messages
from fastdeploy.ipc.child import OWNER
from fastdeploy.ipc.heartbeat import start_heartbeat
from fastdeploy.ipc.outbox import Outbox
from fastdeploy.metrics.logs import set_up_engine_logging
from fastdeploy.metrics.pause_log import PauseLog

STATS_INTERVAL_S = 0.5
COMPILING_POLL_MS = 2  # interval of checks whether grammars are compiled, while the engine is idle
_READABLE, _MORE = int(zmq.POLLIN), int(zmq.SNDMORE)  # arithmetic with flags of an enumeration is slow

logger = logging.getLogger("fastdeploy.engine")


class EngineLike(Protocol):
    """What the server needs of an engine."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> list[int]: ...
    def prepare(self, request: GenerationRequest) -> Future[Any] | None: ...
    def add_request(self, request: GenerationRequest) -> list[TokenDelta]: ...
    def abort(self, request_id: str) -> list[TokenDelta]: ...
    def step(self) -> list[TokenDelta]: ...
    def has_unfinished(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def describe(self) -> dict[str, Any]: ...


@dataclass
class _InFlight:
    """A request in the engine."""

    client: bytes
    num_unfinished: int  # choices
    cache_salt: str
    num_tokens: int = 0


@dataclass(eq=False)
class _CompilingRequest:
    """A request that is added when its grammar is compiled, which it is as long as a request keeps its future."""

    client: bytes
    request: GenerationRequest
    grammar: Future[Any]


class EngineServer:
    """Serves an engine to several clients on a ROUTER socket; each client gets the deltas of its own requests."""

    def __init__(self, engine: EngineLike, socket: zmq.Socket[bytes], clients: set[bytes]) -> None:
        """Serve the `clients` that have sent `Hello`, and those that will send it later."""
        self._engine = engine
        self._socket = socket
        self._polled = [(socket, _READABLE)]
        self._clients = set(clients)
        self._in_flight: dict[str, _InFlight] = {}
        self._compiling: list[_CompilingRequest] = []
        self._disconnected: set[bytes] = set()
        self._outbox = Outbox(self._send)
        self._stats_sent_s = 0.0
        self._pause_log = PauseLog()
        self._stopping = False

    def run(self) -> None:
        """Serve until a client sends `Shutdown`; block while the engine is idle."""
        logger.info("ready for requests of %d connections", len(self._clients))
        for client in self._clients:
            self._send(client, self._ready())
        try:
            while not self._stopping:
                self._receive(block=not self._engine.has_unfinished())
                if self._compiling:
                    self._add_compiled()
                if self._engine.has_unfinished():
                    self._emit(self._engine.step())
        finally:
            self._outbox.send()

    def _receive(self, block: bool) -> None:
        """Handle all received messages; wait for one if `block` is True."""
        if block:
            self._send_stats()
            self._socket.poll(COMPILING_POLL_MS if self._compiling else None)
        while not self._stopping and zmq.zmq_poll(self._polled, 0):
            client, payload = self._socket.recv_multipart()
            if client not in self._disconnected:  # its last messages may arrive after `ClientDisconnected`
                self._handle(client, messages.decode_to_engine(payload))

    def _handle(self, client: bytes, message: messages.ToEngine) -> None:
        match message:
            case messages.AddRequest(request):
                self._prepare(client, request)
            case messages.AbortRequest(request_id):
                self._abort(request_id)
            case messages.AbortMany(call_id, request_ids, salt_prefix):
                self._abort_many(client, call_id, request_ids, salt_prefix)
            case messages.ClientDisconnected(identity):
                self._disconnect_client(identity)
            case messages.Hello():
                self._clients.add(client)
                self._send(client, self._ready())
            case messages.Shutdown():
                self._stopping = True

    def _prepare(self, client: bytes, request: GenerationRequest) -> None:
        """Add a request, now or when its grammar is compiled, so that steps do not wait for the compiler."""
        try:
            grammar = self._engine.prepare(request)
        except FastDeployError as error:
            self._reject(client, request, error)
            return
        if grammar is None or grammar.done():
            self._add(client, request)
        else:
            self._compiling.append(_CompilingRequest(client, request, grammar))

    def _add_compiled(self) -> None:
        compiling, self._compiling = self._compiling, []
        for entry in compiling:
            if entry.grammar.done():
                self._add(entry.client, entry.request)
            else:
                self._compiling.append(entry)

    def _abort(self, request_id: str) -> None:
        """End a request; one whose grammar is not compiled is added without it, so that it ends like any other."""
        aborted = [entry for entry in self._compiling if entry.request.request_id == request_id]
        for entry in aborted:
            self._compiling.remove(entry)
            params = replace(entry.request.params, guided_decoding=None)
            self._add(entry.client, replace(entry.request, params=params))
        self._emit(self._engine.abort(request_id))

    def _add(self, client: bytes, request: GenerationRequest) -> None:
        try:
            ended = self._engine.add_request(request)
        except FastDeployError as error:
            self._reject(client, request, error)
        else:
            self._in_flight[request.request_id] = _InFlight(client, len(request.open_choices), request.cache_salt)
            self._stats_sent_s = 0.0  # send stats that include it after the next step
            self._emit(ended)
            self._outbox.send()  # the prefill may take long

    def _reject(self, client: bytes, request: GenerationRequest, error: FastDeployError) -> None:
        match error:
            case InvalidRequestError():
                rejected = messages.Rejected(request.request_id, "invalid", error.field, error.message)
            case QueueFullError():
                rejected = messages.Rejected(request.request_id, "full", "", str(error))
            case RequestFailedError():
                rejected = messages.Rejected(request.request_id, "internal", "", str(error))
            case _:
                raise error
        self._send(client, rejected)

    def _abort_many(self, client: bytes, call_id: int, request_ids: list[str] | None, salt_prefix: str) -> None:
        wanted = None if request_ids is None else frozenset(request_ids)
        requests = [(request_id, entry.cache_salt, entry.num_tokens) for request_id, entry in self._in_flight.items()]
        requests += [(entry.request.request_id, entry.request.cache_salt, 0) for entry in self._compiling]
        aborted = [
            (request_id, num_tokens)
            for request_id, cache_salt, num_tokens in requests
            if cache_salt.startswith(salt_prefix) and (wanted is None or is_requested(request_id, wanted))
        ]
        for request_id, _ in aborted:
            self._abort(request_id)
        counts = [(without_client_mark(request_id), num_tokens) for request_id, num_tokens in aborted]
        self._send(client, messages.Aborted(call_id, counts))

    def _disconnect_client(self, client: bytes) -> None:
        self._compiling = [entry for entry in self._compiling if entry.client != client]
        aborted = [request_id for request_id, entry in self._in_flight.items() if entry.client == client]
        logger.warning("connection %s is closed; %d requests are aborted", client.decode(), len(aborted))
        for request_id in aborted:
            self._emit(self._engine.abort(request_id))
        self._clients.discard(client)
        self._disconnected.add(client)

    def _emit(self, deltas: list[TokenDelta]) -> None:
        is_urgent = has_end = False
        for delta in deltas:
            request = self._in_flight[delta.request_id]
            is_urgent |= request.num_tokens == 0
            request.num_tokens += len(delta.token_ids)
            self._outbox.put(request.client, delta)
            if delta.finish_reason is not None:
                has_end = True
                request.num_unfinished -= 1
                if request.num_unfinished == 0:
                    del self._in_flight[delta.request_id]
        if has_end or time.monotonic() - self._stats_sent_s > STATS_INTERVAL_S:
            self._send_stats()
        if is_urgent or has_end:
            self._outbox.send()
        else:
            self._outbox.send_when_due(len(self._in_flight))

    def _send_stats(self) -> None:
        self._stats_sent_s = time.monotonic()
        stats = self._engine.stats()
        self._pause_log.update(stats.draft_length)
        message = messages.Stats(stats)
        for client in self._clients:
            self._send(client, message)

    def _send(self, client: bytes, message: messages.ToClient) -> None:
        self._socket.send(client, _MORE)
        self._socket.send(messages.encode(message))

    def _ready(self) -> messages.Ready:
        engine = self._engine
        return messages.Ready(engine.max_model_len, engine.vocab_size, engine.eos_token_ids, engine.describe())


def main() -> int:
    """Run the process; return its exit status: 0 after a shutdown, 2 for an invalid configuration."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--factory", required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args()
    die_with_parent(args.parent)
    write_stacks_on_signal()
    start_heartbeat(args.address)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the server finishes its requests, then sends `Shutdown`
    env = read_env()
    set_up_engine_logging(env)
    arm(env.faults)
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineConfig)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.set_hwm(0)  # no limit, since a ROUTER drops messages if a queue is full
        socket.bind(args.address)
        clients = _wait_for_owner(socket)
        return _serve(config, args.factory, socket, clients)


def _serve(config: EngineConfig, factory: str, socket: zmq.Socket[bytes], clients: set[bytes]) -> int:
    def on_progress(what: str, fraction: float) -> None:
        socket.send_multipart([OWNER, messages.encode(messages.Progress(what, fraction))])

    try:
        engine = _import_factory(factory)(config, on_progress)
    except ConfigError as error:
        socket.send_multipart([OWNER, messages.encode(messages.StartupFailed(error.field, error.message))])
        return 2
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        logger.info("the engine cannot start", exc_info=error)
        reason = str(error).splitlines()[0][:300] if str(error) else "no reason is given"
        message = f"not enough for the model and this configuration: {reason}"
        socket.send_multipart([OWNER, messages.encode(messages.StartupFailed("memory", message))])
        return 2
    freeze_gc()
    EngineServer(engine, socket, clients).run()
    return 0


def freeze_gc() -> None:
    """Exclude all objects made so far from garbage collection, whose full passes would stall all streams."""
    gc.collect()
    gc.freeze()


def _wait_for_owner(socket: zmq.Socket[bytes]) -> set[bytes]:
    """Wait until the process that started this one has sent `Hello`; return all clients that have."""
    clients: set[bytes] = set()
    while OWNER not in clients:
        client, payload = socket.recv_multipart()
        if isinstance(messages.decode_to_engine(payload), messages.Hello):
            clients.add(bytes(client))
    return clients


def _import_factory(path: str) -> Callable[..., EngineLike]:
    """Return the function `module:name` that builds an engine."""
    module, _, name = path.partition(":")
    factory: Callable[..., EngineLike] = getattr(importlib.import_module(module), name)
    return factory


if __name__ == "__main__":
    sys.exit(main())
