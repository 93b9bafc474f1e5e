# SPDX-License-Identifier: Apache-2.0
"""A node of the simulator: the real state machine over the model of Redis, as the agent's I/O will run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastdeploy.scheduler import node_events as node
from fastdeploy.scheduler.held_ticket import HeldState
from fastdeploy.scheduler.liveness import next_incarnation
from fastdeploy.scheduler.node_states import NodeStates
from fastdeploy.scheduler.owned_request import Claimant
from fastdeploy.scheduler.request_states import (
    Looked,
    Member,
    Role,
    Stage,
    Tell,
    Tick,
)
from tests.scheduler.redis_model import NoGroupError, RedisError
from tests.scheduler.sim_engine import Computed, HandedOver, RunId, SimEngine

if TYPE_CHECKING:
    from tests.scheduler.simulator import Simulation

from tests.scheduler.sim_process import MAX_RUNNING, TTL_S, Process


class CheckedNode(NodeStates):
    """Judges an owner dead only if it had trouble; `refuses` is whether it has just given a leg back."""

    def __init__(self, sim: Simulation, *args: Any) -> None:
        super().__init__(*args)
        self._sim = sim
        self.refuses = False

    def handle(self, event: Any, now: float) -> Any:
        self.refuses = False
        return super().handle(event, now)

    def _refuse(self, *args: Any) -> None:
        self.refuses = True
        super()._refuse(*args)

    def _lose_owner(self, owner: str) -> None:
        process = self._sim.owners[owner]
        self._sim.check(process.had_trouble(), f"{self.name} judges owner {owner} dead without reason")
        super()._lose_owner(owner)


class SimNode(Process):
    """An agent with its engine."""

    def __init__(self, sim: Simulation, name: str, role: Role, engine: SimEngine, num_slots: int) -> None:
        self.engine, self.role, self.num_slots = engine, role, num_slots
        self.busy_until = 0.0
        first = next_incarnation(None, sim.random)
        self.states = CheckedNode(sim, name, first, role, num_slots, sim.limits, sim.now)
        self.images: set[RunId] = set()
        self.fetched: set[RunId] = set()
        self.incarnation = self.states.incarnation
        super().__init__(sim, name, f"node:{name}", f"in:{name}")
        self.run(0.0, self._register)

    def kill(self) -> None:
        super().kill()
        self.engine.disconnect(self)

    def sync(self) -> None:
        self.run(self.sim.limits.sync_s, self.sync)
        try:
            if self.heartbeat.count == 0:
                self._choose_incarnation()
            incarnation = self.states.incarnation
            record = Member(self.states.incarnation, self.states.role), self.sim.local_owners(self.name)
            lost = self.beat(record, [self.stream, *self._queues()])
            if lost or not self._is_up:
                self.return_to_redis()
            self.handle(node.RecordWritten(incarnation))
            records = self.command("find", "node:")
            self.handle(Looked({name: record[1] for name, record in records.items()}, self.sim.now))
            listed = {one for record in records.values() for one in record[2]} | self.states.owners
            self.handle(node.OwnersLooked(frozenset(listed & self.command("find", "owner:").keys())))
            self._poll_queues()
        except RedisError:
            self.lose_redis()
        self.handle(Tick())

    def _choose_incarnation(self) -> None:
        old = self.command("find", self.key)
        self.incarnation = next_incarnation(old[""][1].incarnation if old else None, self.sim.random)
        self.states.incarnation = self.incarnation

    def _queues(self) -> list[str]:
        return [f"q:{stage}{hint}" for stage in Stage for hint in ("", f":{self.name}")]

    def _register(self) -> None:
        try:
            self.command("create_stream", self.stream, TTL_S)
            for queue in self._queues():
                self.command("create_stream", queue, TTL_S, True)
        except RedisError:
            self.lose_redis()

    def notify_queue(self) -> None:
        self.run(self.sim.random.random() * 0.03, self._poll_queues)

    def _poll_queues(self) -> None:
        try:
            for stage in self.states.claimable_stages():
                for queue in (f"q:{stage}:{self.name}", f"q:{stage}"):
                    self._read(queue, stage)
        except RedisError:
            self.lose_redis()

    def _read(self, queue: str, stage: Stage) -> None:
        if self.busy_until > self.sim.now or self._num_running() >= MAX_RUNNING:
            return
        try:
            found = self.command("read_group", queue, self.consumer)
        except NoGroupError:
            self.return_to_redis()
            return
        if found is not None:
            self._on_entry(queue, *found)
            self.notify_queue()

    def _num_running(self) -> int:
        return sum(held.state is not HeldState.HANDING for held in self.states.tickets.values())

    @property
    def consumer(self) -> str:
        return f"{self.name}.{self.states.incarnation}"

    def _on_entry(self, queue: str, entry: tuple[int, int], ticket: Any) -> None:
        slots = 1 + len(ticket.request.prompt_token_ids) // 8
        self.handle(node.TicketRead(ticket, f"{queue} {entry[0]} {entry[1]}", slots, slots % 2))

    def handle(self, event: Any) -> None:
        if not self.is_alive:
            return
        actions = self.states.handle(event, self.sim.now)
        if self.states.incarnation != self.incarnation:
            self.incarnation = self.states.incarnation
            has_reason = self.stopped_until > self.sim.now - 2 * self.sim.limits.sync_s
            self.sim.check(has_reason, f"{self.name} took a new incarnation without reason")
        for action in actions:
            self._do(action)

    def _do(self, action: Any) -> None:
        match action:
            case node.Claim(name, message, entry):
                self._claim(name, message, entry)
            case node.Drop(entry):
                self._try("ack_and_delete", *_split(entry))
            case node.Send(name, messages):
                written = self._try("xadd", f"out:{name}", messages)
                result = "failed" if isinstance(written, RedisError) else "no_reader" if written is None else "written"
                self.run(0.0, self.handle, node.Sent(name, result))
            case Tell(name, message):
                self._try("xadd", f"in:{name}", message)
            case node.Fetch(ticket):
                self.run(self.sim.random.random() * 1.5, self._fetched, ticket)
            case node.StartEngine(ticket, hands_over):
                self._start(ticket, hands_over, (*ticket.key, ticket.leg) in self.fetched)
            case node.StopEngine(key, leg):
                self._check_stop(key, leg)
                self.engine.stop((*key, leg))
            case node.HandOver(key, leg):
                self.engine.hand_over((*key, leg))
            case node.FreeImage(key, leg):
                self.images.discard((*key, leg))
            case node.ReadPending():
                self._read_pending()
            case node.Register():
                self._register()

    def _check_stop(self, key: tuple[str, int], leg: int) -> None:
        """Check that the owner no longer waits for this leg, or that somebody had trouble."""
        process = self.sim.owners[key[0]]
        owned = process.states.requests.get(key[1])
        claimant = None if owned is None else owned.claimant
        waits = owned is not None and owned.leg == leg and claimant == Claimant(self.name, self.states.incarnation)
        has_reason = not waits or self.had_trouble() or process.had_trouble() or self.states.refuses
        self.sim.check(has_reason, f"{self.name} aborts what {process.name} waits for")

    def _try(self, name: str, *args: Any) -> Any:
        """Run a command; return its error."""
        try:
            return self.command(name, *args)
        except RedisError as error:
            self.run(0.0, self.lose_redis)
            return error

    def _claim(self, name: str, message: Any, entry: str) -> None:
        result = self._try("ack_and_delete", *_split(entry), f"out:{name}", message)
        if isinstance(message, node.Claimed) and not isinstance(result, RedisError):
            self.run(0.0, self.handle, node.ClaimWritten((name, message.number), message.leg))

    def _read_pending(self) -> None:
        for queue in self._queues():
            try:
                for found in self.command("read_pending", queue, self.consumer, self.sim.limits.expire_s):
                    self._on_entry(queue, *found)
            except NoGroupError:
                self.return_to_redis()
                return
            except RedisError:
                self.lose_redis()
                return

    def _fetched(self, ticket: Any) -> None:
        peer = self.sim.nodes.get(ticket.image.node)
        made = (*ticket.key, ticket.image.leg)
        if peer is not None and peer.states.incarnation == ticket.image.incarnation and made in peer.images:
            self.fetched.add((*ticket.key, ticket.leg))
            self.sim.num_pulled += 1
        elif ticket.number not in self.sim.cancelled:
            self.sim.num_recomputed += 1
        self.handle(node.Fetched(ticket.key, ticket.leg))

    def _start(self, ticket: Any, hands_over: bool, cached: bool) -> None:
        text = self.sim.texts[ticket.key]
        if text.is_invalid:
            self.run(0.0, self.handle, node.EngineRejected(ticket.key, ticket.leg, "invalid", "n", "is invalid"))
        elif len(self.engine.runs) >= 2 * MAX_RUNNING:
            self.run(0.0, self.handle, node.EngineRejected(ticket.key, ticket.leg, "room", "", "full"))
        else:
            report = lambda event: self.run(0.0, self._on_engine, ticket, event)  # noqa: E731
            self.engine.start(self, ticket, text, hands_over, cached, report)

    def _on_engine(self, ticket: Any, event: Any) -> None:
        match event:
            case Computed(count):
                self.handle(node.EngineProgress(ticket.key, ticket.leg, count))
            case HandedOver():
                self._hand_over(ticket)
            case (first, delta):
                self.handle(node.EngineTokens(ticket.key, ticket.leg, first, delta))

    def _hand_over(self, ticket: Any) -> None:
        """Keep an image, if there are slots: a draining node has not reserved any."""
        held = self.states.tickets.get((*ticket.key, ticket.leg))
        num_slots = min(1 + len(ticket.request.prompt_token_ids) // 8, self.num_slots)
        if held is None or num_slots > self.states.num_free_slots + held.num_slots:
            self.handle(node.EngineHandedOver(ticket.key, ticket.leg, None))
            return
        self.images.add((*ticket.key, ticket.leg))
        self.handle(node.EngineHandedOver(ticket.key, ticket.leg, b"image", num_slots))

    def drain(self, seconds: float) -> None:
        """Hand over what runs, and take tickets again after a while."""
        self.handle(node.SetRole(Role.DRAINING))
        self.run(seconds, lambda: self.handle(node.SetRole(self.role)))


def _split(entry: str) -> tuple[str, tuple[int, int]]:
    queue, milliseconds, count = entry.split()
    return queue, (int(milliseconds), int(count))
