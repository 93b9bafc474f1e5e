# SPDX-License-Identifier: Apache-2.0
"""An owner of the simulator: the real state machine over the model of Redis, as the owner's I/O will run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastdeploy.scheduler import owner_events as owner
from fastdeploy.scheduler.owned_request import LOCAL_CLAIMANT, OwnedRequest
from fastdeploy.scheduler.owner_states import OwnerStates
from fastdeploy.scheduler.request_states import (
    Looked,
    Refused,
    Stage,
    Tell,
    Tick,
    Tokens,
)
from tests.scheduler.redis_model import RedisError
from tests.scheduler.sim_engine import SimEngine, Text

if TYPE_CHECKING:
    from tests.scheduler.simulator import Simulation

from tests.scheduler.sim_process import MAX_RUNNING, TTL_S, Process


class CheckedOwner(OwnerStates):
    """Judges a node dead only if it had trouble."""

    def __init__(self, sim: Simulation, *args: Any) -> None:
        super().__init__(*args)
        self._sim = sim

    def _lose(self, owned: OwnedRequest, reason: owner.LossReason, text: str) -> None:
        if owned.claimant is not None and reason in (owner.LossReason.NODE_LOST, owner.LossReason.NODE_RESTARTED):
            process = self._sim.nodes[owned.claimant.node]
            is_other = process.states.incarnation != owned.claimant.incarnation
            may_be_gone = reason is owner.LossReason.NODE_LOST and process.had_trouble()
            self._sim.check(is_other or may_be_gone, f"{self.name}: {text} without reason")
        elif reason is owner.LossReason.FORGOTTEN:
            self._sim.check(not self._sim.is_calm, f"{self.name}: {text} without reason")
        super()._lose(owned, reason, text)

    def _run_local(self, owned: OwnedRequest) -> None:
        self._sim.num_uncounted += owned.leg > 0
        super()._run_local(owned)


class SimOwner(Process):
    """An API process with its clients.

    Attributes:
        received: per request and choice, the tokens that the client got.
        finished: per request, the choices whose last delta it got.
        ends: how each request ended.
    """

    def __init__(self, sim: Simulation, name: str, home: str, engine: SimEngine) -> None:
        self.home, self.engine = home, engine
        self.has_engine = True
        self.received: dict[int, list[list[int]]] = {}
        self.finished: dict[int, list[int]] = {}
        self.num_prompt_logprobs: dict[int, int] = {}
        self.ends: dict[int, owner.End] = {}
        self.entries: dict[tuple[int, int], list[tuple[str, tuple[int, int]]]] = {}
        self.written: set[tuple[int, int]] = set()
        self.states = CheckedOwner(sim, name, home, sim.limits, sim.splitwise, sim.now)
        super().__init__(sim, name, f"owner:{name}", f"out:{name}")
        self.run(0.0, self._begin_look)

    def submit(self, event: owner.Submit) -> None:
        self.received[event.number] = [[] for _ in range(event.request.params.n)]
        self.finished[event.number] = []
        self.num_prompt_logprobs[event.number] = 0
        self.handle(event)

    def kill(self) -> None:
        super().kill()
        self.engine.disconnect(self)

    def sync(self) -> None:
        self.run(self.sim.limits.sync_s, self.sync)
        self.handle(Tick(MAX_RUNNING - len(self.engine.runs)))

    # A look: its answer may arrive late, with what is no longer so.

    def _begin_look(self) -> None:
        self._guarded(self._read_nodes)

    def _read_nodes(self) -> None:
        began_at, records, delay = self.sim.now, self.command("find", "node:"), self.sim.draw_delay()
        if delay > 0.0:
            self.troubled_at = max(self.troubled_at, began_at + delay)  # its heartbeat is late, too
        self.run(delay, self._guarded, self._end_look, began_at, records)

    def _end_look(self, began_at: float, records: dict[str, Any]) -> None:
        lost = self.beat((), [self.stream])
        if lost or self.heartbeat.count == 1 or not self._is_up:
            self.command("create_stream", self.stream, TTL_S)
        if lost or not self._is_up:
            self.return_to_redis()
        self.handle(Looked({name: record[1] for name, record in records.items()}, began_at))
        self.run(self.sim.limits.sync_s, self._begin_look)

    def _guarded(self, step: Callable[..., None], *args: Any) -> None:
        try:
            step(*args)
        except RedisError:
            self.lose_redis()
            self.run(self.sim.limits.sync_s, self._begin_look)

    def handle(self, event: Any) -> None:
        if self.is_alive:
            for action in self.states.handle(event, self.sim.now):
                self._do(action)
            self.states.observed.clear()

    def _do(self, action: Any) -> None:
        try:
            self._write(action)
        except RedisError:
            self.run(0.0, self.lose_redis)
            if isinstance(action, owner.Enqueue):
                self.run(0.0, self.handle, owner.EnqueueFailed(action.ticket.number, action.ticket.leg))

    def _write(self, action: Any) -> None:
        match action:
            case owner.Enqueue(ticket, hint):
                queue = f"q:{ticket.stage}" + (f":{hint}" if hint else "")
                self.sim.num_uncounted += (ticket.number, ticket.leg) in self.written
                self.written.add((ticket.number, ticket.leg))
                entry = self.command("xadd", queue, ticket, TTL_S)
                self.entries.setdefault((ticket.number, ticket.leg), []).append((queue, entry))
            case owner.Dequeue(number, leg):
                for queue, entry in self.entries.pop((number, leg), []):
                    self.command("xdel", queue, entry)
            case owner.Audit(count):
                self._audit(count)
            case owner.RunLocal(ticket):
                self._run_local(ticket)
            case owner.AbortLocal(number, leg):
                self.engine.stop((self.name, number, leg))
            case Tell(name, message):
                self.command("xadd", f"in:{name}", message)
            case owner.Deliver(number, delta):
                self.sim.check(number not in self.ends, "a delta after the end")
                self.sim.check(delta.logprobs == delta.token_ids, "log-probabilities are not those of the tokens")
                self.received[number][delta.index] += delta.token_ids
                self.finished[number] += [delta.index] if delta.finish_reason else []
                self.num_prompt_logprobs[number] += delta.prompt_logprobs is not None
            case owner.End(number):
                self.sim.check(number not in self.ends, "two ends of one request")
                self.ends[number] = action

    def _audit(self, count: int) -> None:
        self.entries.clear()
        found = set()
        for queue in [key for key in self.sim.redis.all_keys() if key.startswith("q:")]:
            for entry, ticket in self.command("xrange", queue).items():
                if ticket.owner == self.name:
                    self.entries.setdefault((ticket.number, ticket.leg), []).append((queue, entry))
                    _, stage, *hint = queue.split(":")
                    found.add((ticket.number, ticket.leg, Stage(stage), "".join(hint)))
        self.run(0.0, self.handle, owner.Audited(count, frozenset(found)))

    def _run_local(self, ticket: Any) -> None:
        if not self.has_engine:
            return  # `LocalDied` is on its way
        text: Text = self.sim.texts[ticket.key]
        source = ticket.number, ticket.leg, LOCAL_CLAIMANT.node, LOCAL_CLAIMANT.incarnation, 0
        if text.is_invalid:
            self.run(0.0, self.handle, Refused(*source, "invalid", "n", "is invalid"))
            return

        def report(event: Any) -> None:
            if isinstance(event, tuple):
                self.run(0.0, self.handle, Tokens(*source, *event))

        self.engine.start(self, ticket, text, False, False, report)
