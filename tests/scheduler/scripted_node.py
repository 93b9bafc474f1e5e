# SPDX-License-Identifier: Apache-2.0
"""Nodes and engines of tests of the owner's I/O, which do what the test says, and an owner among them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self

from fastdeploy.config.cluster_config import ClusterConfig
from fastdeploy.core.errors import EngineDeadError
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.outputs import RequestMetrics, TokenDelta
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.stats import EngineStats
from fastdeploy.ipc import messages as engine_messages
from fastdeploy.ipc.streams import DeltaStream
from fastdeploy.metrics.cluster_metrics import ClusterMetrics
from fastdeploy.scheduler import request_states as states
from fastdeploy.scheduler.keys import Keys
from fastdeploy.scheduler.messages import Host, NodeLoad, NodeRecord, ToOwner, decode_to_node
from fastdeploy.scheduler.owned_request import OwnedRequest
from fastdeploy.scheduler.owner import ClusterScheduler
from fastdeploy.scheduler.owner_link import OwnerLink
from fastdeploy.scheduler.request_states import Role, Stage, Ticket
from fastdeploy.scheduler.store import Store
from tests.cluster.redis_server import RedisServer

GROUP = "g"
BLOCK_SIZE = 16
DESCRIPTION = {
    "cluster": {"group": GROUP},
    "kv_cache": {"block_size": BLOCK_SIZE},
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
}


def cluster_config(redis: RedisServer, **fields: Any) -> ClusterConfig:
    """Return the configuration of the node `own`, with short periods."""
    defaults: dict[str, Any] = {
        "scheduler_name": "global",
        "scheduler_url": f"unix://{redis.socket}",
        "node_id": "own",
        "scheduler_sync_period": 100,
        "scheduler_expire_period": 1000,
    }
    return ClusterConfig(**{**defaults, **fields})


def request(request_id: str = "r", num_prompt: int = 3, **fields: Any) -> GenerationRequest:
    """Return a request; what is no field of it is a sampling parameter."""
    own = {name: fields.pop(name) for name in ("cache_salt", "timeout_s") if name in fields}
    return GenerationRequest(request_id, list(range(10, 10 + num_prompt)), SamplingParams(**fields), **own)


class FakeConnection:
    """A connection to an engine that emits what the test says.

    Attributes:
        runs: the requests that it got, by their ids; they leave at their end.
        aborted: ids of the aborted ones.
        room: whether requests are accepted.
    """

    def __init__(self) -> None:
        self.ready: engine_messages.Ready | None = None
        self.stats = EngineStats(num_blocks=100, num_free_blocks=100)
        self.dead_error: EngineDeadError | None = None
        self.is_stalled = False
        self.runs: dict[str, tuple[GenerationRequest, DeltaStream]] = {}
        self.aborted: list[str] = []
        self._died = asyncio.Event()

    async def start(self, on_progress: Any = None) -> None:
        self.ready = engine_messages.Ready(400, 512, [1], DESCRIPTION)

    async def wait_until_dead(self) -> None:
        await self._died.wait()

    def mark_dead(self, reason: str) -> None:
        self.dead_error = EngineDeadError(reason)
        for _, stream in self.runs.values():
            stream.fail(self.dead_error)
        self._died.set()

    def run(self, request: GenerationRequest, stream: DeltaStream) -> None:
        if self.dead_error is not None:
            raise self.dead_error
        engine_messages.encode(engine_messages.AddRequest(request))
        self.runs[request.request_id] = request, stream

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return True

    async def next_run(self) -> GenerationRequest:
        """Return the oldest request, once there is one."""
        await until(lambda: bool(self.runs), "a request for this node's engine")
        return next(iter(self.runs.values()))[0]

    def emit(self, request: GenerationRequest, first_index: int, *token_ids: int, finish: str | None = None) -> None:
        """Emit tokens of choice 0, plain ones as the engine does."""
        _, stream = self.runs[request.request_id]
        if finish is None:
            stream.put_tokens(0, list(token_ids), [], 0, first_index)
        else:
            del self.runs[request.request_id]
            metrics = RequestMetrics(queue_s=0.0, finish_s=1.0, num_cached_tokens=2)
            delta = TokenDelta("", 0, list(token_ids), finish_reason=finish, metrics=metrics, first_index=first_index)
            stream.put(delta)


class ScriptedNode:
    """A node of the cluster without an engine: it claims and answers as the test says."""

    def __init__(self, config: ClusterConfig, name: str, role: Role = Role.MIXED, incarnation: int = 1) -> None:
        self.name, self.role, self.incarnation = name, role, incarnation
        self.load = NodeLoad()
        self.keys = Keys(config.scheduler_topic, GROUP)
        self.store = Store(config, self.keys)
        self._expire_s = config.scheduler_expire_period / 1000
        self._stages = list(Stage) if config.is_split else [Stage.DECODE]
        self._num_sent = 0
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.join()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()
        await self.store.close()

    async def join(self) -> None:
        """Create inbox and queues, and beat from now on."""
        await self.store.create_inbox(self.keys.node_inbox(self.name))
        await self.store.create_queues(self.name)
        await self.beat()
        self._beating = asyncio.create_task(self._beat_forever())

    async def beat(self) -> None:
        host = Host("boot", "net", 0)
        record = NodeRecord(1, self.incarnation, self.role, GROUP, host, load=self.load)
        await self.store.beat_node(self.name, record, self._expire_s, [self.keys.node_inbox(self.name)])

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(self._expire_s / 4)
            with contextlib.suppress(Exception):
                await self.beat()

    async def die(self) -> None:
        """Beat no more; its key expires."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)

    async def read(self, *stages: Stage) -> Ticket:
        """Take the next ticket out of a queue, without telling its owner."""
        async with asyncio.timeout(20):
            while True:
                found = await self.store.read_tickets(stages or self._stages, self.name, f"{self.name}.1", 1.0)
                if found:
                    (entry, self.ticket), *_ = found
                    self.entry = entry
                    return self.ticket

    async def claim(self, *stages: Stage) -> Ticket:
        """Claim the next ticket."""
        ticket = await self.read(*stages)
        await self.store.claim(ticket.owner, [states.Claimed(*self.source(ticket))], self.entry)
        return ticket

    def source(self, ticket: Ticket) -> tuple[int, int, str, int, int]:
        """Return the first fields of a message about a ticket."""
        self._num_sent += 1
        return ticket.number, ticket.leg, self.name, self.incarnation, self._num_sent

    async def send(self, ticket: Ticket, *messages: ToOwner) -> None:
        """Write to the owner of a ticket."""
        await self.store.send_to_owner(ticket.owner, messages)

    def tokens(self, ticket: Ticket, first_index: int, *token_ids: int, finish: str | None = None) -> states.Tokens:
        """Return a message with tokens of choice 0."""
        metrics = RequestMetrics(queue_s=0.0, num_cached_tokens=2) if finish else None
        delta = TokenDelta(self.name, 0, list(token_ids), finish_reason=finish, metrics=metrics)
        return states.Tokens(*self.source(ticket), first_index, delta)

    async def inbox(self) -> list[Any]:
        """Return all messages that owners have sent."""
        entries = await self.store.read_inbox(self.keys.node_inbox(self.name), b"0", 0.0)
        return [message for _, payload in entries for message in decode_to_node(payload)]


class Owner(ClusterScheduler):
    """An owner that shows its parts."""

    @property
    def link(self) -> OwnerLink:
        assert self._link is not None
        return self._link

    @property
    def is_alone(self) -> bool:
        assert self._states is not None
        return self._states.is_alone

    def owned(self, number: int) -> OwnedRequest:
        assert self._states is not None
        return self._states.requests[number]


class Client:
    """The reader of a request.

    Attributes:
        deltas: what it got.
        error: how it ended, if not with a last delta.
    """

    def __init__(self, scheduler: ClusterScheduler, request: GenerationRequest) -> None:
        self.deltas: list[TokenDelta] = []
        self.error: Exception | None = None
        self.task = asyncio.create_task(self._read(scheduler, request))

    async def _read(self, scheduler: ClusterScheduler, request: GenerationRequest) -> None:
        try:
            async with contextlib.aclosing(scheduler.generate(request)) as stream:
                async for deltas in stream:
                    self.deltas += deltas
        except Exception as error:
            self.error = error

    @property
    def tokens(self) -> list[int]:
        """Return all tokens of choice 0."""
        return [token_id for delta in self.deltas if delta.index == 0 for token_id in delta.token_ids]

    async def end(self) -> list[int]:
        """Wait for the end; return the tokens, or raise the error."""
        async with asyncio.timeout(20):
            await self.task
        if self.error is not None:
            raise self.error
        return self.tokens

    async def leave(self) -> None:
        """Close the connection."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@contextlib.asynccontextmanager
async def owner(
    config: ClusterConfig, worker: int = 0, metrics: ClusterMetrics | None = None
) -> AsyncIterator[tuple[Owner, FakeConnection]]:
    """Run an owner on the node `own`, with the seed 7."""
    connection = FakeConnection()
    scheduler = Owner(config, connection, worker, 7, metrics)  # type: ignore[arg-type]
    try:
        await scheduler.start()
        yield scheduler, connection
    finally:
        await scheduler.close()


async def until(condition: Any, what: str) -> None:
    """Wait up to 20 seconds for a condition."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never came true: {what}")


async def until_async(function: Callable[[], Awaitable[Any]], expected: Any) -> None:
    """Wait up to 20 seconds until a function returns this."""
    for _ in range(2000):
        if (found := await function()) == expected:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"expected {expected}, got {found}")
