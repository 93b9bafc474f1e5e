# SPDX-License-Identifier: Apache-2.0
"""Serves an engine to its clients: receives messages, adds and aborts requests, runs steps, sends what they emit."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

import zmq

from fastdeploy.core.errors import FastDeployError, InvalidRequestError, QueueFullError, RequestFailedError
from fastdeploy.core.generation_request import is_requested
from fastdeploy.core.handover import Handover
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.process import memory_bytes
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.stats import EngineStats, NodeStats
from fastdeploy.engine.peer_arenas import PeerArenas, Transfer
from fastdeploy.engine.prepared_requests import PreparedRequest, PreparedRequests, in_flight_error
from fastdeploy.ipc import messages
from fastdeploy.ipc.child import AGENT
from fastdeploy.ipc.outbox import Outbox
from fastdeploy.metrics.pause_log import PauseLog
from fastdeploy.metrics.stats_log import StatsLog

STATS_INTERVAL_S = 0.5
PENDING_POLL_MS = 2  # interval of checks whether grammars are compiled and blocks copied, while the engine is idle
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
    @property
    def transfer(self) -> Transfer | None: ...
    @property
    def is_moving(self) -> bool: ...
    def prepare(self, request: GenerationRequest) -> Future[Any] | None: ...
    def cancel(self, request_id: str) -> None: ...
    def hand_over(self, request_id: str, export_slots: Sequence[int] = ()) -> bool: ...
    def pop_handovers(self) -> list[Handover]: ...
    def add_request(self, request: GenerationRequest) -> list[TokenDelta]: ...
    def abort(self, request_id: str) -> list[TokenDelta]: ...
    def step(self) -> list[TokenDelta]: ...
    def has_unfinished(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def describe(self) -> dict[str, Any]: ...


@dataclass
class _InFlight:
    """A request in the engine, or one that it has given up and not returned yet."""

    client: bytes
    num_unfinished: int  # choices
    cache_salt: str
    num_tokens: int = 0


class EngineServer:
    """Serves an engine to several clients on a ROUTER socket; each client gets the deltas of its own requests."""

    def __init__(
        self, engine: EngineLike, socket: zmq.Socket[bytes], clients: set[bytes], stats_log: StatsLog | None = None
    ) -> None:
        """Serve the `clients` that have sent `Hello`, and those that will send it later; None logs no statistics."""
        self._engine = engine
        self._socket = socket
        self._polled = [(socket, _READABLE)]
        self._clients = set(clients)
        self._in_flight: dict[str, _InFlight] = {}
        self._prepared = PreparedRequests(engine)
        self._peers = PeerArenas(engine.transfer, self._send)
        self._is_clustered = engine.transfer is not None
        self._node: NodeStats | None = None
        self._role: messages.SetRole | None = None
        self._agents = [client for client in clients if client.startswith(AGENT)]  # the newest is the last
        self._disconnected: set[bytes] = set()
        self._outbox = Outbox(self._send)
        self._stats_sent_s = 0.0
        self._pause_log = PauseLog()
        self._stats_log = stats_log
        self._stopping = False

    def run(self) -> None:
        """Serve until a client sends `Shutdown`; block while the engine is idle."""
        logger.info("ready for requests of %d connections", len(self._clients))
        for client in self._clients:
            self._send(client, self._ready())
        try:
            while not self._stopping:
                self._receive(block=not self._engine.has_unfinished())
                if self._prepared:
                    self._take_prepared()
                if self._engine.has_unfinished():
                    self._emit(self._engine.step())
                if self._is_clustered:
                    self._poll_transfers()
        finally:
            self._outbox.send()

    def _receive(self, block: bool) -> None:
        """Handle all received messages; wait for one if `block` is True."""
        if block:
            is_pending = self._engine.is_moving or self._peers.is_opening or self._prepared.are_waiting
            if not is_pending or time.monotonic() - self._stats_sent_s > STATS_INTERVAL_S:
                self._send_stats()
            self._socket.poll(PENDING_POLL_MS if is_pending else None)
        while not self._stopping and zmq.zmq_poll(self._polled, 0):
            client, payload = self._socket.recv_multipart()
            if client not in self._disconnected:  # its last messages may arrive after `ClientDisconnected`
                self._handle(client, messages.decode_to_engine(payload))

    def _handle(self, client: bytes, message: messages.ToEngine) -> None:
        match message:
            case messages.AddRequest(request):
                self._prepare(client, request, is_added=True)
            case messages.AbortRequest(request_id) | messages.CancelPrepared(request_id):
                self._abort(request_id)
            case messages.AbortMany(call_id, request_ids, salt_prefix):
                self._abort_many(client, call_id, request_ids, salt_prefix)
            case messages.ClientDisconnected(identity):
                self._disconnect_client(identity)
            case messages.Hello():
                self._connect(client)
            case messages.Shutdown():
                self._stopping = True
            case _:
                self._handle_cluster(client, message)

    def _handle_cluster(self, client: bytes, message: messages.ToEngine) -> None:
        """Handle a message about requests and blocks that move between nodes."""
        self._is_clustered = True
        match message:
            case messages.Prepare(request):
                self._prepare(client, request, is_added=False)
            case messages.HandOver(request_id, export_slots):
                self._hand_over(client, request_id, export_slots)
            case messages.AttachArena(name, path):
                self._peers.attach(client, name, path)
            case messages.DetachArena(name):
                self._peers.detach(name)
            case messages.SetRole():
                self._role = message
                for agent in self._agents[-1:]:
                    self._send(agent, message)
            case messages.AgentReport(stats):
                self._node = stats

    def _connect(self, client: bytes) -> None:
        self._clients.add(client)
        if client.startswith(AGENT):
            self._agents.append(client)
            if self._role is not None:
                self._send(client, self._role)  # before `Ready`, so that it begins with this role
        self._send(client, self._ready())

    def _prepare(self, client: bytes, request: GenerationRequest, is_added: bool) -> None:
        """Prepare a request, and add it now or when it is prepared, so that steps wait for no compiler and no copy."""
        try:
            if request.request_id in self._in_flight:  # it may be one that the engine has given up
                raise in_flight_error(request.request_id)
            prepared = self._prepared.add(client, request, is_added)
        except FastDeployError as error:
            self._reject(client, request, error)
        else:
            if prepared is not None:
                self._end_preparation(prepared)

    def _take_prepared(self) -> None:
        for prepared in self._prepared.take_done():
            self._end_preparation(prepared)

    def _end_preparation(self, prepared: PreparedRequest) -> None:
        client, request_id, transfer = prepared.client, prepared.request.request_id, self._engine.transfer
        if prepared.is_added:
            self._add(client, prepared.request)
        else:
            num_tokens = 0 if transfer is None else transfer.num_prepared_tokens(request_id)
            self._send(client, messages.Prepared(request_id, num_tokens))

    def _abort(self, request_id: str) -> None:
        """End a request; one that is being prepared is added without its form, so that it ends like any other."""
        prepared = self._prepared.remove(request_id)
        if prepared is not None and prepared.is_added:
            self._add(prepared.client, prepared.without_form())
        self._emit(self._engine.abort(request_id))

    def _hand_over(self, client: bytes, request_id: str, export_slots: list[int]) -> None:
        """Give up a request; it keeps its blocks if the slots are no slots of the arena."""
        if (prepared := self._prepared.remove(request_id)) is not None:
            self._send(client, messages.HandedOver(request_id, prepared.handover()))
            return
        try:
            is_known = self._engine.hand_over(request_id, export_slots)
        except InvalidRequestError as error:
            logger.error("request %s is handed over without its blocks: %s", request_id, error)
            is_known = self._engine.hand_over(request_id)
        if not is_known and request_id not in self._in_flight:
            self._send(client, messages.HandedOver(request_id, None))

    def _poll_transfers(self) -> None:
        if self._engine.is_moving:
            self._send_handovers()
        if self._peers.is_opening:
            self._peers.poll()

    def _send_handovers(self) -> None:
        """Send the requests that the engine has given up, behind all of their deltas."""
        handovers = self._engine.pop_handovers()
        if handovers:
            self._outbox.send()
        for handover in handovers:
            client = self._in_flight.pop(handover.request_id).client
            self._send(client, messages.HandedOver(handover.request_id, handover))

    def _add(self, client: bytes, request: GenerationRequest) -> None:
        try:
            ended = self._engine.add_request(request)
        except FastDeployError as error:
            self._reject(client, request, error)
        else:
            self._in_flight[request.request_id] = _InFlight(client, len(request.open_choices), request.cache_salt)
            self._stats_sent_s = 0.0  # send stats that include it after the next step
            if self._stats_log is not None:
                self._stats_log.begin()
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
        requests += [(one.request.request_id, one.request.cache_salt, 0) for one in self._prepared if one.is_added]
        counts = [
            (request_id, num_tokens)
            for request_id, cache_salt, num_tokens in requests
            if cache_salt.startswith(salt_prefix) and (wanted is None or is_requested(request_id, wanted))
        ]
        for request_id, _ in counts:
            self._abort(request_id)
        self._send(client, messages.Aborted(call_id, counts))

    def _disconnect_client(self, client: bytes) -> None:
        for prepared in self._prepared:
            if prepared.client == client:
                self._prepared.remove(prepared.request.request_id)
        self._peers.disconnect(client)
        if client in self._agents:
            self._agents.remove(client)
            self._node = None  # what it said no longer holds
        aborted = [request_id for request_id, entry in self._in_flight.items() if entry.client == client]
        logger.warning("connection %s is closed; %d requests are aborted", client.decode(), len(aborted))
        for request_id in aborted:
            self._emit(self._engine.abort(request_id))
        self._clients.discard(client)
        self._disconnected.add(client)

    def _emit(self, deltas: list[TokenDelta]) -> None:
        is_urgent = has_end = False
        if self._stats_log is not None:
            self._stats_log.count(sum([len(delta.token_ids) for delta in deltas]))
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
        stats = replace(self._engine.stats(), resident_bytes=memory_bytes()[1])
        self._pause_log.update(stats.draft_length)
        if self._stats_log is not None:
            self._stats_log.update(stats)
        message = messages.Stats(stats if self._node is None else replace(stats, node=self._node))
        for client in self._clients:
            self._send(client, message)

    def _send(self, client: bytes, message: messages.ToClient) -> None:
        self._socket.send(client, _MORE)
        self._socket.send(messages.encode(message))

    def _ready(self) -> messages.Ready:
        engine = self._engine
        return messages.Ready(engine.max_model_len, engine.vocab_size, engine.eos_token_ids, engine.describe())
