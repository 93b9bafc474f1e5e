# SPDX-License-Identifier: Apache-2.0
"""The agent of a node: it claims tickets from Redis, has the engine run them, and sends owners what comes of it.

`NodeStates` decides; this module does the input and output, from one event loop:

- `_sync_forever`: heartbeat, looks at the keys of others, `Tick`, report to the engine, each sync period;
- `_claim_forever`, per stage: reads a ticket while the engine has room for it;
- `_read_forever`: messages of owners;
- `StoreWriter.run`: everything that is written, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Coroutine, Sequence
from random import SystemRandom

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.stats import NodeStats
from fastdeploy.kv_cache.connectors.base import Connector
from fastdeploy.kv_cache.hashes import hash_blocks
from fastdeploy.scheduler.agent_config import AgentConfig
from fastdeploy.scheduler.agent_engine import AgentEngine
from fastdeploy.scheduler.agent_legs import Leg, load_of, make_request, num_blocks, num_context_tokens
from fastdeploy.scheduler.agent_report import make_report
from fastdeploy.scheduler.agent_rooms import Load, Rooms
from fastdeploy.scheduler.agent_store import NotePrefixes, StoreWriter, format_entry, guarded
from fastdeploy.scheduler.agent_transfers import Transfers
from fastdeploy.scheduler.held_ticket import HeldState, HeldTicket
from fastdeploy.scheduler.keys import Keys
from fastdeploy.scheduler.limits import limits_of
from fastdeploy.scheduler.liveness import next_incarnation
from fastdeploy.scheduler.membership import Membership
from fastdeploy.scheduler.messages import BadMessageError, NodeRecord, decode_to_node
from fastdeploy.scheduler.node_events import (
    Fetch,
    Fetched,
    FreeImage,
    HandOver,
    NodeAction,
    NodeEvent,
    RecordWritten,
    Register,
    RunId,
    SetRole,
    StartEngine,
    StopEngine,
    TicketRead,
)
from fastdeploy.scheduler.node_states import NodeStates
from fastdeploy.scheduler.request_states import (
    RedisLost,
    RedisReturned,
    Role,
    Stage,
    Tick,
    Ticket,
    leg_id,
)
from fastdeploy.scheduler.store import Entry, Store, StoreError

BLOCK_S = 0.5  # a read that waits for an entry ends after this time, because roles and members change
ROLE_S = 2 * BLOCK_S  # after which a change of roles no longer waits for reads
NUM_PREFIXES = 2  # of a text, that are noted

logger = logging.getLogger("fastdeploy.agent")


class Agent:
    """The agent of one node.

    Attributes:
        states: the state machine.
    """

    def __init__(
        self,
        config: AgentConfig,
        engine: AgentEngine,
        store: Store,
        keys: Keys,
        connectors: Sequence[Connector],
        record: NodeRecord,
    ) -> None:
        """Create the agent of an engine that is ready.

        Args:
            record: what stays the same in all heartbeats; the rest is filled in.
        """
        assert engine.ready is not None
        description = engine.ready.description
        self._config, self._engine, self._store, self._keys = config, engine, store, keys
        self._node, self._limits = config.cluster.node_id, limits_of(config.cluster, description)
        cluster = description["cluster"]
        self._block_size: int = cluster["block_size"]
        self._num_slots: int = cluster["num_slots"]
        self._group = record.group
        self._rooms = Rooms(config.max_num_seqs, config.max_num_batched_tokens)
        slot_bytes = cluster["bytes"] // max(1, self._num_slots)
        self._transfers = Transfers(engine, connectors, record.layouts, slot_bytes)
        now, incarnation = time.monotonic(), next_incarnation(None, SystemRandom())  # until Redis has been asked
        self.states = NodeStates(self._node, incarnation, record.role, self._num_slots, self._limits, now)
        self.states.handle(RedisLost(), now)  # until the first heartbeat
        self._membership = Membership(self._node, record, self._limits, store, keys)
        self._is_up: bool | None = None  # None: nobody has tried
        self._is_silent = False  # whether the engine is
        self._is_first_look = True
        self._num_reads = self._num_role_changes = 0  # under way
        self._asked_role = self.states.role
        self._prepared: dict[RunId, GenerationRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # of one of them
        self._changed, self._up, self._sync_now = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._writer = StoreWriter(store, keys, self._node, self._limits.expire_s, self)
        engine.on_events = self._on_engine
        if cluster.get("caches_prefixes", True):
            engine.on_ended = self._note_prefixes
        engine.on_handed_over = self._transfers.count_handed_over

    async def run(self) -> None:
        """Work until the task is cancelled.

        Raises:
            ConfigError: another live node has this node's id.
        """
        stages = list(Stage) if self._config.cluster.scheduler_name == "splitwise" else [Stage.DECODE]
        loops: list[Awaitable[None]] = [self._sync_forever(), self._read_forever(), self._writer.run()]
        tasks = [asyncio.ensure_future(loop) for loop in (*loops, *(self._claim_forever(stage) for stage in stages))]
        try:
            done, _ = await asyncio.wait({*tasks, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (*tasks, *self._tasks):
                task.cancel()
            await asyncio.gather(*tasks, *self._tasks, return_exceptions=True)

    async def leave(self) -> None:
        """Delete the membership key, because the node ends."""
        await guarded(self, self._store.delete_node(self._node))

    # The state machine.

    def handle(self, *events: NodeEvent) -> None:
        """Tell the state machine, and do what it asks for."""
        self.handle_all(events)

    def handle_all(self, events: Sequence[NodeEvent]) -> None:
        """Tell the state machine events of one time."""
        for action in self.states.handle_all(events, time.monotonic()):
            self._do(action)
        self._changed.set()

    def _on_engine(self, events: Sequence[NodeEvent]) -> None:
        """Take what the engine says."""
        for event in events:
            if isinstance(event, SetRole):
                self._asked_role = event.role
                self._start_task(self._change_role(event.role))
        self.handle_all([event for event in events if not isinstance(event, SetRole)])

    def _do(self, action: NodeAction) -> None:
        match action:
            case Fetch(ticket):
                self._start_task(self._fetch(ticket))
            case StartEngine(ticket, hands_over):
                self._start_engine(ticket, hands_over)
            case StopEngine(key, leg):
                self._engine.stop_leg(key, leg)
            case HandOver(key, leg):
                self._engine.hand_over(key, leg, self._config.drain_s)
            case FreeImage(key, leg):
                self._engine.free_image((*key, leg))
            case Register():
                self._sync_now.set()
                self._writer.put(action)
            case _:
                self._writer.put(action)

    async def _change_role(self, role: Role) -> None:
        """Take another role once no read is under way that could still claim what other nodes are to run.

        If another role has been asked for meanwhile, only that one counts.
        """
        self._num_role_changes += 1
        try:
            deadline = time.monotonic() + ROLE_S
            while self._num_reads > 0 and time.monotonic() < deadline:
                self._changed.clear()
                await _wait(self._changed, deadline - time.monotonic())
        finally:
            self._num_role_changes -= 1
        if role is not self._asked_role:
            return
        logger.info("the role is %s now", role.value)
        self._engine.keep_waiting()
        self.handle(SetRole(role))

    def _start_engine(self, ticket: Ticket, hands_over: bool) -> None:
        run: RunId = (*ticket.key, ticket.leg)
        request = self._prepared.pop(run, None)
        if request is None:
            slots = self._engine.take_slots(run, self.states.tickets[run].num_slots) if hands_over else []
            request = make_request(ticket, hands_over, slots)
        self._engine.start_leg(ticket, request)

    async def _fetch(self, ticket: Ticket) -> None:
        run: RunId = (*ticket.key, ticket.leg)
        assert ticket.image is not None
        request = await self._transfers.fetch(ticket, self._membership.records.get(ticket.image.node))
        if request is not None:
            self._prepared[run] = request
        self.handle(Fetched(ticket.key, ticket.leg))
        if self._prepared.pop(run, None) is not None:  # it was aborted meanwhile
            self._engine.cancel_prepared(leg_id(*run))

    def _start_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failure.done():
            self._failure.set_exception(error)

    # Redis: whether it is there.

    @property
    def is_redis_up(self) -> bool:
        """Return whether the last command has reached Redis."""
        return self._is_up is True

    @property
    def consumer(self) -> str:
        """Return the name under which entries of queues are pending."""
        return f"{self._node}.{self.states.incarnation}"

    def lose_redis(self, error: StoreError) -> None:
        """Take note that Redis is away."""
        if self._is_up is not False:
            logger.debug("Redis is away: %s", error)  # an owner warns
        self._is_up = False
        self._up.clear()
        self.handle(RedisLost())

    def return_to_redis(self) -> None:
        """Take note that Redis is there, and that it may have lost what was written."""
        if self._is_up is False:
            logger.debug("Redis is there again")
        self._is_up = True
        self._up.set()
        self.handle(RedisReturned())

    # The sync period.

    async def _sync_forever(self) -> None:
        looking: asyncio.Task[bool] | None = None
        while True:
            start_s = time.monotonic()
            self._sync_now.clear()
            if looking is None:
                looking = asyncio.create_task(guarded(self, self._look()))
            await asyncio.wait({looking}, timeout=self._limits.sync_s)  # a command may wait longer for its answer
            if looking.done():
                looking.result()
                looking = None
            self.handle(Tick())
            self._engine.hand_over_waiting()
            self._engine.report(self.report())
            rest_s = self._limits.sync_s - (time.monotonic() - start_s)
            await _wait(self._sync_now, max(0.0, rest_s))

    async def _look(self) -> None:
        """Write the heartbeat and look at the keys of others."""
        if self._engine.is_stalled:
            if not self._is_silent:
                logger.error("the engine does not respond: the node leaves until it does")
                await self._store.delete_node(self._node)
            self._is_silent = True
            return
        if self._is_silent:
            logger.warning("the engine responds again: the node has returned")
        self._is_silent = False
        if self._is_first_look:
            await self._check_redis()
        self._is_first_look = False
        written = RecordWritten(self.states.incarnation)
        lost_writes = await self._membership.beat(self.states, self._engine.stats)
        if lost_writes or not self._is_up:
            self.return_to_redis()
        self.handle(written)
        self.handle_all(await self._membership.look(self.states))
        self._transfers.keep_only(self._membership.records)

    async def _check_redis(self) -> None:
        """Check that Redis can be used, and that no other node has this id, and choose the incarnation.

        Raises:
            ConfigError: Redis cannot be used, or another node is alive.
            StoreError: Redis is away.
        """
        for note in await self._store.check_server():
            logger.warning(note)
        membership = self._membership
        old = await (membership.read_own() if self._config.is_replacement else membership.wait_alone())
        self.states.incarnation = next_incarnation(None if old is None else old.incarnation, SystemRandom())

    def report(self) -> NodeStats:
        """Return the agent's counters and its present state."""
        num_commands = self._store.num_commands
        return make_report(self.states, self._membership, self._transfers, self._engine, self.is_redis_up, num_commands)

    # Tickets and messages.

    async def _claim_forever(self, stage: Stage) -> None:
        while True:
            await self._up.wait()
            may_read = self._num_role_changes == 0 and stage in self.states.claimable_stages()
            if may_read and self._has_room(stage):
                await guarded(self, self._read_tickets(stage))
                continue
            self._changed.clear()
            await _wait(self._changed, self._limits.sync_s)

    async def _read_tickets(self, stage: Stage) -> None:
        self._num_reads += 1
        try:
            found = await self._store.read_tickets([stage], self._node, self.consumer, BLOCK_S)
        finally:
            self._num_reads -= 1
            self._changed.set()
        self.read(found)

    def read(self, tickets: Sequence[tuple[Entry, Ticket]]) -> None:
        """Take tickets that were read."""
        for entry, ticket in tickets:
            if not self._writer.is_claiming(format_entry(entry)):
                slots = num_blocks(num_context_tokens(ticket), self._block_size)
                self.handle(TicketRead(ticket, format_entry(entry), export_slots=slots))

    def _has_room(self, stage: Stage) -> bool:
        """Return whether the engine has room for a ticket, besides those that its counters do not include."""
        needs_slots = stage is Stage.PREFILL and self.states.role is Role.PREFILL and self._num_slots > 0
        if self._is_silent or (needs_slots and self.states.num_free_slots <= 0):
            return False
        started = Load()
        for held in self.states.tickets.values():
            if not self._is_counted(held):
                started += load_of(held.ticket, held.hands_over, self._block_size)
        return self._rooms.has_room(self._engine.stats, started)

    def _is_counted(self, held: HeldTicket) -> bool:
        if held.state in (HeldState.HANDING, HeldState.ABORTED):
            return True
        leg = self._engine.legs.get(leg_id(*held.key, held.leg))
        return leg is not None and leg.is_counted

    async def _read_forever(self) -> None:
        stream = self._keys.node_inbox(self._node)
        while True:
            await self._up.wait()
            await guarded(self, self._read_inbox(stream))

    async def _read_inbox(self, stream: str) -> None:
        """Read what there is; it is deleted, so that a cursor is not needed, which a failover could make wrong."""
        found = await self._store.read_inbox(stream, b"0", BLOCK_S)
        for _, payload in found:
            try:
                self.handle_all(decode_to_node(payload))
            except BadMessageError as error:
                self._store.bad_messages.note(stream, error)
        if found:
            await self._store.delete_entries(stream, [entry_id for entry_id, _ in found])

    def _note_prefixes(self, leg: Leg) -> None:
        """Note the longest prefixes that the cache holds of a text that has ended."""
        token_ids = [*leg.request.prompt_token_ids, *leg.output][:-1]  # of the last one, nothing is computed
        hashes = hash_blocks(self._group, leg.request.cache_salt, token_ids, self._block_size)
        if hashes:
            self._writer.put(NotePrefixes(hashes[-NUM_PREFIXES:]))


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for an event, but not longer than this."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):  # `wait_for` of Python 3.11 may swallow that the task is cancelled
            await event.wait()
