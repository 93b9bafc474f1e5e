# SPDX-License-Identifier: Apache-2.0
"""The owner's half of a cluster: an API process whose requests run on any node of its group."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from fastdeploy.config.cluster_config import ClusterConfig
from fastdeploy.core.errors import EngineDeadError, FastDeployError, InvalidRequestError, ShuttingDownError
from fastdeploy.core.generation_request import GenerationRequest, is_requested, without_marks
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.seeds import choice_seed, request_seed
from fastdeploy.core.stats import EngineStats
from fastdeploy.ipc import messages
from fastdeploy.ipc.connection import EngineConnection, OnProgress
from fastdeploy.ipc.streams import MAX_UNREAD, unread_error
from fastdeploy.metrics.cluster_metrics import ClusterMetrics
from fastdeploy.scheduler.abort_calls import AbortCalls
from fastdeploy.scheduler.client_request import ClientRequest, error_of
from fastdeploy.scheduler.keys import Keys
from fastdeploy.scheduler.limits import block_size_of, group_of, limits_of
from fastdeploy.scheduler.local_legs import LocalLegs
from fastdeploy.scheduler.members import Members
from fastdeploy.scheduler.messages import AbortAnswer, AbortCall, ToOwner
from fastdeploy.scheduler.owner_events import (
    AbortLocal,
    Cancelled,
    Deliver,
    End,
    LegClaimed,
    LocalDied,
    OwnerAction,
    OwnerEvent,
    RunLocal,
    Submit,
)
from fastdeploy.scheduler.owner_link import OwnerLink, restarted
from fastdeploy.scheduler.owner_states import OwnerStates
from fastdeploy.scheduler.placement import Hint, Placement, local_room
from fastdeploy.scheduler.request_states import Limits, Tick
from fastdeploy.scheduler.store import Store, StoreError
from fastdeploy.scheduler.wait_for_redis import wait_for_redis

logger = logging.getLogger("fastdeploy.cluster")


class ClusterScheduler:
    """A `RequestScheduler` whose requests run on any node; used from one event loop.

    It translates between the state machine (`OwnerStates`), Redis (`OwnerLink`), this node's engine (`LocalLegs`) and
    the clients (`ClientRequest`).
    """

    def __init__(
        self,
        config: ClusterConfig,
        connection: EngineConnection,
        worker: int,
        server_seed: int | None,
        metrics: ClusterMetrics | None = None,
    ) -> None:
        """Create the owner of an API process; nothing is sent before `start`.

        Args:
            config: with the name of this node.
            connection: to this node's engine.
            worker: number of the API process.
            server_seed: determines the seeds of requests without one; None draws them at random.
            metrics: counts what happens to the requests.
        """
        self.name = f"{config.node_id}.{worker}.{secrets.token_hex(4)}"
        self._config, self._connection, self._metrics = config, connection, metrics
        self._worker = worker
        self._server_seed = None if server_seed is None else choice_seed(server_seed, worker)
        self._num_arrivals = 0
        self._clients: dict[int, ClientRequest] = {}
        self._numbers: dict[str, int] = {}  # by the client's request id, until its reader has left
        self._end_error: FastDeployError | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._limits = Limits()
        self._states: OwnerStates | None = None  # these and the limits are made when the engine has described itself
        self._link: OwnerLink | None = None
        self._calls: AbortCalls | None = None
        self._placement: Placement | None = None
        self._legs = LocalLegs(connection, self._handle)

    # What API code needs of this node's engine.

    @property
    def ready(self) -> messages.Ready | None:
        """Return limits and description of this node's engine, once the model is loaded."""
        return self._connection.ready if self._link is not None else None

    @property
    def stats(self) -> EngineStats:
        """Return the latest counters of this node's engine."""
        return self._connection.stats

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Return why this node's engine has ended; None while it runs."""
        return self._connection.dead_error

    @property
    def is_stalled(self) -> bool:
        """Return whether this node's engine is stopped or hangs."""
        return self._connection.is_stalled

    @property
    def num_requests(self) -> int:
        """Return the number of requests in flight of this process."""
        return len(self._numbers)

    async def wait_until_dead(self) -> None:
        """Wait until this node's engine has ended unexpectedly."""
        await self._connection.wait_until_dead()

    def mark_dead(self, reason: str) -> None:
        """Take note that this node's engine has ended."""
        self._connection.mark_dead(reason)

    def set_role(self, role: str) -> None:
        """Ask this node's agent to take a role, which `stats.node.role` then shows."""
        self._connection.set_role(role)

    # Start and end.

    async def start(self, on_progress: OnProgress | None = None) -> None:
        """Wait until the model is loaded, and for Redis; without Redis, requests are served by this node alone.

        Raises:
            ConfigError: the engine refused its configuration, or Redis cannot be used as it is configured.
            EngineDeadError: the engine ended during start-up.
        """
        redis = asyncio.create_task(wait_for_redis(self._config))
        try:
            await self._connection.start(on_progress)
            away = await redis
        finally:
            redis.cancel()
        self._set_up()
        assert self._link is not None
        if away is not None:
            self._link.lose(away)
        await self._link.start()
        self._tasks.append(asyncio.create_task(restarted(self._tick_forever)))
        self._tasks.append(asyncio.create_task(self._watch_engine()))

    def _set_up(self) -> None:
        """Make the parts that depend on the engine's description of itself."""
        config, ready = self._config, self._connection.ready
        assert ready is not None
        group, limits = group_of(ready.description), limits_of(config, ready.description)
        self._limits = limits
        keys = Keys(config.scheduler_topic, group)
        store, members = Store(config, keys), Members(config.node_id)
        self._states = OwnerStates(self.name, config.node_id, limits, config.is_split, time.monotonic())
        self._placement = Placement(store, members, group, block_size_of(ready.description))
        inbox, is_quiet = keys.owner_inbox(self.name), self._worker > 0
        self._link = OwnerLink(store, self.name, inbox, members, limits, self._handle, self._receive, is_quiet=is_quiet)
        self._calls = AbortCalls(self.name, store, self._link, self._abort_own)

    async def close(self) -> None:
        """Abort all requests, delete this owner's keys in Redis, and disconnect from it; the engine runs on."""
        self.end_requests(ShuttingDownError("the server has shut down"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._link is not None:
            await self._link.close()

    # Requests.

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[TokenDelta], None]:
        """Yield the deltas of a request until every choice is finished; see `EngineConnection.generate`.

        Raises:
            InvalidRequestError: an engine refused the request, or its client does not read.
            QueueFullError: too many requests are waiting, or this one has waited too long.
            AttemptsFailedError: every try was lost, or too many were.
            NoProgressError: nothing has happened for too long.
            RequestTimeoutError: the request has not ended in its time.
            EngineDeadError: the engine of this node has ended.
            ShuttingDownError: the server cannot wait for the request any longer.
        """
        client = self._admit(request)
        loop = asyncio.get_running_loop()
        try:
            self._submit(client, await self._find_hint(client.request))
            while True:
                deltas = await client.get(loop)
                is_over = client.num_open == 0 or client.error is not None
                if deltas:
                    yield deltas
                if client.error is not None:
                    raise client.error
                if is_over:
                    return
        finally:
            del self._numbers[request.request_id]
            self._cancel(client)

    def _admit(self, request: GenerationRequest) -> ClientRequest:
        """Number a request and draw its seed."""
        if (error := self.dead_error or self._end_error) is not None:
            raise error
        if request.request_id in self._numbers:
            raise InvalidRequestError("request_id", f"{without_marks(request.request_id)!r} is in flight already")
        number, self._num_arrivals = self._num_arrivals, self._num_arrivals + 1
        if request.params.seed is None:
            params = replace(request.params, seed=request_seed(self._server_seed, number))
            request = replace(request, params=params)
        arrived_at = time.monotonic() if request.arrived_s is None else request.arrived_s
        request = replace(request, arrived_s=None)  # the clocks of other machines differ
        client = ClientRequest(number, request, self._config.node_id, arrived_at)
        self._clients[number] = client
        self._numbers[request.request_id] = number
        return client

    async def _find_hint(self, request: GenerationRequest) -> Hint:
        assert self._link is not None and self._placement is not None
        if not self._link.is_up:
            return Hint()
        try:
            return await self._placement.find_hint(request)
        except StoreError as error:
            self._link.lose(error)
            return Hint()

    def _submit(self, client: ClientRequest, hint: Hint) -> None:
        """Give a request to the state machine, unless it has ended while its hint was looked up."""
        assert self._states is not None
        if client.number not in self._clients:
            return
        actions = self._states.handle(Submit(client.number, client.request, *hint), time.monotonic())
        client.owned = self._states.requests.get(client.number)
        self._do(actions)

    def _cancel(self, client: ClientRequest) -> None:
        """Forget a request, and end what still runs of it."""
        if self._clients.pop(client.number, None) is not None:
            self._count_end(client)
            self._handle(Cancelled(client.number))

    def end_requests(self, error: FastDeployError) -> None:
        """Fail all current and future requests of this process with `error`."""
        self._end_error = error
        for client in list(self._clients.values()):
            client.fail(error)
            self._cancel(client)

    async def abort_requests(self, request_ids: Sequence[str] | None, salt_prefix: str = "") -> list[tuple[str, int]]:
        """Abort requests of any owner of the topic; see `EngineConnection.abort_requests`.

        While Redis is away, only those of this process are aborted.

        Raises:
            EngineDeadError: the engine of this node has ended.
        """
        if self.dead_error is not None:
            raise self.dead_error
        assert self._calls is not None
        return await self._calls.abort(request_ids, salt_prefix)

    def _abort_own(self, request_ids: Sequence[str] | None, salt_prefix: str) -> list[tuple[str, int]]:
        wanted = None if request_ids is None else frozenset(request_ids)
        aborted = []
        for client in list(self._clients.values()):
            request = client.request
            is_wanted = wanted is None or is_requested(request.request_id, wanted)
            if is_wanted and request.cache_salt.startswith(salt_prefix):
                aborted.append((request.request_id, client.abort(time.monotonic())))
                self._cancel(client)
        return aborted

    # Events and actions of the state machine.

    def _handle(self, event: OwnerEvent) -> None:
        assert self._states is not None
        self._do(self._states.handle(event, time.monotonic()))

    def _do(self, actions: list[OwnerAction]) -> None:
        for action in actions:
            match action:
                case Deliver(number, delta):
                    self._deliver(number, delta)
                case End():
                    self._end(action)
                case RunLocal(ticket):
                    self._legs.run(ticket)
                case AbortLocal(number, leg):
                    self._legs.abort(self.name, number, leg)
                case _:
                    assert self._link is not None
                    self._link.write(action)
        self._observe()

    def _deliver(self, number: int, delta: TokenDelta) -> None:
        client = self._clients.get(number)
        if client is None or client.error is not None:
            return
        client.deliver(delta, time.monotonic())
        if client.num_unread > MAX_UNREAD:
            client.fail(unread_error(client))
            asyncio.get_running_loop().call_soon(self._cancel, client)

    def _end(self, end: End) -> None:
        assert self._link is not None
        self._link.write(end)
        client = self._clients.pop(end.number, None)
        if client is None:
            return
        self._count_end(client)
        if (error := error_of(end)) is not None:
            client.fail(error)

    def _count_end(self, client: ClientRequest) -> None:
        if self._metrics is not None and client.owned is not None:
            self._metrics.ended(client.owned.path)

    def _observe(self) -> None:
        """Count what the state machine has noted."""
        assert self._states is not None
        observed, metrics = self._states.observed, self._metrics
        if metrics is not None:
            for one in observed:
                if isinstance(one, LegClaimed):
                    metrics.claimed(one.stage, one.waited_s)
                else:
                    metrics.lost(one.reason)
        observed.clear()

    def _receive(self, message: ToOwner) -> None:
        assert self._calls is not None
        match message:
            case AbortCall():
                self._calls.on_call(message)
            case AbortAnswer():
                self._calls.on_answer(message)
            case _:
                self._handle(message)

    # Time.

    async def _tick_forever(self) -> None:
        """Let time pass for the state machine, whether Redis answers or not."""
        assert self._states is not None and self._link is not None and self.ready is not None
        while True:
            await asyncio.sleep(self._limits.sync_s)
            self._handle(Tick(local_room(self.stats, self.ready.description, len(self._legs))))
            if self._metrics is not None:
                self._metrics.sent(self._link.take_num_commands())
            if self.dead_error is not None and self._states.is_alone:
                self.end_requests(self.dead_error)  # nobody is left to go on with them

    async def _watch_engine(self) -> None:
        await self._connection.wait_until_dead()
        self._handle(LocalDied())
