# SPDX-License-Identifier: Apache-2.0
"""Several nodes and owners over the model of Redis, with faults drawn from a seed; see `test_request_states.py`."""

from __future__ import annotations

import contextlib
import heapq
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.scheduler.owner_events import Cancelled, LocalDied, Submit
from fastdeploy.scheduler.request_states import Limits, Role
from tests.scheduler.redis_model import RedisError, RedisModel
from tests.scheduler.sim_engine import SimEngine, Text
from tests.scheduler.sim_node import SimNode
from tests.scheduler.sim_owner import SimOwner
from tests.scheduler.sim_process import Process

FAULTS_UNTIL = 12.0
ENDS_WITHIN = 60.0  # after the faults
STEP_S = 0.15
MAX_DELAY_S = 1.4  # of the answer to a look: no heartbeat is so late that its key expires
AGENT_RESTART_S = 0.2
NUM_RESTARTS = 12
SETTLES_WITHIN = 12.0  # leases, `Holding` and aborts
LIMITS = Limits(sync_s=0.5, expire_s=2.0, holding_s=2.5, lease_s=4.0, patience_s=4.0, step_tokens=16, min_prompt=4)


class Violation(AssertionError):
    """What the property forbids."""


class Simulation:
    """One schedule: everything follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.limits = LIMITS
        self.splitwise = self.random.random() < 0.5
        self.repeat_rate = self.random.choice([0.0, 0.0, 0.05, 0.3])
        self.delay_rate = self.random.choice([0.0, 0.1, 0.5])
        self.redis = RedisModel(lambda: self.now)
        self.redis.on_write = self._on_write
        self.texts: dict[tuple[str, int], Text] = {}
        self.origins: dict[int, tuple[int, int, int, int]] = {}
        self.nodes: dict[str, SimNode] = {}
        self.owners: dict[str, SimOwner] = {}
        self.submitted: list[tuple[SimOwner, int, float]] = []
        self.cancelled: set[int] = set()
        self.num_pulled = self.num_recomputed = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self.engines: dict[str, SimEngine] = {}
        self.is_calm = self.random.random() < 0.15
        if self.is_calm:
            self.repeat_rate = self.delay_rate = 0.0
        self.lost_node = ""
        self.evicted: set[str] = set()
        self.num_uncounted = 0
        self.poisoned_legs: set[int] = set()
        self.dead_from = float("inf")

    # The world.

    def _populate(self) -> None:
        roles = [Role.PREFILL, Role.DECODE, Role.MIXED] if self.splitwise else [Role.MIXED]
        for index in range(self.random.choice([2, 3, 3, 4])):
            role = roles[index] if index < 2 and self.splitwise else self.random.choice(roles)
            name = f"n{index}"
            self.engines[name] = SimEngine(self.random, self.origins)
            self._start_node(name, role, self.random.randint(2, 8))
        for _ in range(2):
            self._start_owner(self.random.choice([*self.nodes]))
        self.at(STEP_S, self._step_engines)

    def _start_node(self, name: str, role: Role, num_slots: int) -> None:
        if name not in self.nodes or not self.nodes[name].is_alive:
            self.nodes[name] = SimNode(self, name, role, self.engines[name], num_slots)

    def _start_owner(self, home: str) -> None:
        name = f"o{len(self.owners)}"
        self.owners[name] = SimOwner(self, name, home, self.engines[home])

    def _step_engines(self) -> None:
        self.at(STEP_S, self._step_engines)
        for name, engine in self.engines.items():
            if poison := engine.find_poison():
                owned = self.owners[poison.owner].states.requests.get(poison.number)
                if owned is not None and owned.leg == poison.leg:  # else it is a ticket of the past
                    self.poisoned_legs.add(poison.leg)
                self._kill_engine(name)
            else:
                engine.step()

    def _restart_node(self, name: str) -> None:
        node = self.nodes[name]
        if name != self.lost_node:
            self._start_node(name, node.role, node.num_slots)

    def _kill_node(self, name: str, restart_s: float) -> None:
        self.nodes[name].kill()
        self.at(restart_s, lambda: self._restart_node(name))

    def _kill_engine(self, name: str) -> None:
        """The agent deletes the key first; owners of this node lose their engine for good."""
        node = self.nodes[name]
        if node.is_alive:
            self.attempt(self.redis.delete, node.key)
        self._kill_node(name, 1 + 4 * self.random.random())
        self.engines[name] = SimEngine(self.random, self.origins)
        for owner in self.owners.values():
            if owner.home == name and owner.is_alive and owner.has_engine:
                owner.has_engine = False
                owner.run(0.0, owner.handle, LocalDied())

    def _submit(self, with_poison: bool) -> None:
        owners = [owner for owner in self.owners.values() if owner.is_alive and owner.has_engine]
        if not owners:
            return
        owner, number = self.random.choice(owners), len(self.submitted)
        draw = self.random
        long = draw.random() < 0.5
        lengths = tuple(draw.randint(20, 70) if long else draw.randint(1, 5) for _ in range(draw.choice([1, 1, 2])))
        params = SamplingParams(n=len(lengths), prompt_logprobs=draw.choice([None, None, 0]))
        is_exact, is_invalid = draw.random() < 0.3, draw.random() < 0.03 and not with_poison
        text = Text(number, lengths, is_exact, with_poison, is_invalid, params.prompt_logprobs is not None)
        self.texts[owner.name, number] = text
        prompt = [1] * draw.randint(2, 24)
        request = GenerationRequest(str(number), prompt, params, priority=draw.choice([0, 0, 1]))
        self.submitted.append((owner, number, self.now))
        hint = draw.choice([*self.nodes]) if draw.random() < 0.3 else ""
        owner.run(0.0, owner.submit, Submit(number, request, hint, draw.choice([0, 0, len(prompt)])))
        if draw.random() < 0.1:
            self.cancelled.add(number)
            owner.run(draw.random() * 4, owner.handle, Cancelled(number))

    # Faults.

    def _plan_faults(self) -> None:
        if self.is_calm:
            busy_until = self.random.choice([0.0, 2.5 * self.limits.lease_s])
            for node in self.nodes.values():
                node.busy_until = busy_until if node.role is not Role.PREFILL else 0.0
            return
        if self.random.random() < 0.2:  # one death and nothing else, so that nothing else repairs what it leaves
            self.repeat_rate = 0.0
            self.lost_node = self.random.choice([*self.nodes])
            command = self.random.choice(["read_group", "ack_and_delete", "xadd"])
            self._die_at(self.nodes[self.lost_node], command, 0.5 + 6 * self.random.random())
            return
        if self.random.random() < 0.1:  # agents restart again and again, all looks are late, and the clock steps
            self.delay_rate = 1.0
            for index in range(NUM_RESTARTS):
                self.at(FAULTS_UNTIL * 0.9 * (index + self.random.random()) / NUM_RESTARTS, self._fault_agent)
            self.at(FAULTS_UNTIL * 0.9 * self.random.random(), self._fault_clock)
            return
        processes = [self._fault_kill, self._fault_drain, self._fault_stop, self._fault_cut_off, self._fault_engine]
        processes.append(self._fault_agent)
        redis = [self._fault_away, self._fault_failover, self.redis.flush_all, self._fault_evict, self._fault_full]
        redis.append(self._fault_clock)
        kinds = [*processes, *redis]
        kinds = self.random.sample(kinds, self.random.choice([1, 2, 3, len(kinds)]))  # what is rare alone is not hidden
        for _ in range(self.random.choice([1, 2, 3, 4, 6, 9])):
            self.at(self.random.random() * FAULTS_UNTIL * 0.9, self.random.choice(kinds))
        if self.random.random() < 0.05:
            self.dead_from = self.random.random() * FAULTS_UNTIL
            self.at(self.dead_from, lambda: setattr(self.redis, "is_away", True))

    def _victim(self) -> Process:
        kind = self.nodes if self.random.random() < 0.7 else self.owners
        return self.random.choice([one for one in kind.values() if one.is_alive] or [*self.nodes.values()])

    def _die_at(self, victim: Process, command: str, delay: float) -> None:
        """Kill a process before or after its next command of this name, or soon if there is none."""
        point = command, self.random.random() < 0.5
        victim.run(delay, lambda: setattr(victim, "dies_at", point))
        victim.run(delay + 3.0, victim.kill)

    def _fault_kill(self) -> None:
        victim = self._victim()
        commands = ["read_group", *["ack_and_delete"] * 3] if isinstance(victim, SimNode) else ["xdel", "set_get"]
        self._die_at(victim, self.random.choice([*commands, "xadd"]), 0.0)
        if isinstance(victim, SimNode):
            if not self.lost_node and self.random.random() < 0.5:
                self.lost_node = victim.name  # it never returns
                return
            self.at(4 + 4 * self.random.random(), lambda: self._restart_node(victim.name))
        elif self.random.random() < 0.7:
            self.at(2.0, lambda: self._start_owner(victim.home))  # type: ignore[attr-defined]

    def _fault_agent(self) -> None:
        """An agent dies and is started again at once, while its old record stands in Redis."""
        if living := [name for name, node in self.nodes.items() if node.is_alive]:
            self._kill_node(self.random.choice(living), AGENT_RESTART_S)

    def _fault_stop(self) -> None:
        victim = self._victim()
        victim.troubled_at = self.now
        self.num_uncounted += 1  # a woken owner cannot know which legs were lost
        victim.stopped_until = max(victim.stopped_until, self.now + self.random.choice([0.7, 1.5, 2.5, 5.0]))

    def _fault_cut_off(self) -> None:
        victim = self._victim()
        victim.cut_off_until = self.now + self.random.choice([0.7, 1.5, 2.5, 5.0])

    def _fault_drain(self) -> None:
        node = self.random.choice([*self.nodes.values()])
        node.run(0.0, node.drain, 6 * self.random.random())

    def _fault_engine(self) -> None:
        self._kill_engine(self.random.choice([*self.nodes]))

    def _fault_away(self) -> None:
        """Redis dies and returns with all, with nothing, or without the last writes."""
        snapshot = self.redis.snapshot()
        length = self.random.choice([0.0, 0.3, 1.5, 3.0, 6.0])
        until, mode = min(self.now + length, FAULTS_UNTIL), self.random.choice(["all", "nothing", "old"])
        self.at(self.random.random(), lambda: self._take_away(until, mode, snapshot))

    def _take_away(self, until: float, mode: str, snapshot: Any) -> None:
        self.redis.is_away = True

        def give_back() -> None:
            self.redis.is_away = self.now >= self.dead_from
            data = {"all": self.redis.snapshot(), "nothing": ({}, {}, {}), "old": snapshot}
            self.redis.restart(data[mode])

        self.at(max(0.0, until - self.now), give_back)

    def _fault_failover(self) -> None:
        """A replica takes over at once; it lacks the last writes and has another clock."""
        snapshot = self.redis.snapshot()

        def promote() -> None:
            self.redis.restart(snapshot)
            self.redis.clock_offset = self.random.choice([0.0, -5.0, 0.5])

        self.at(self.random.choice([0.05, 0.4, 2.0]), promote)

    def _fault_clock(self) -> None:
        """The wall clock steps: all keys expire at once, or those of dead processes stay for longer."""
        step_s = self.random.choice([-5.0, 5.0])
        self.redis.clock_offset += step_s
        if step_s > 0.0:
            for process in (*self.nodes.values(), *self.owners.values()):
                process.troubled_at = self.now

    def _fault_evict(self) -> None:
        if keys := sorted(self.redis.all_keys()):
            key = self.random.choice(keys)
            self.redis.evict(key)
            for process in (*self.nodes.values(), *self.owners.values()):
                if process.key == key and key in self.evicted:  # twice may be in two looks
                    process.troubled_at = self.now
            self.evicted.add(key)

    def _fault_full(self) -> None:
        self.redis.is_full = True
        until = min(self.random.random() * 5, FAULTS_UNTIL - self.now)
        self.at(max(0.0, until), lambda: setattr(self.redis, "is_full", False))

    # The schedule and its verdict.

    def play(self) -> None:
        """Run the schedule; raise Violation if it shows a mistake."""
        self._populate()
        self._plan_faults()
        num_requests = self.random.randint(4, 9)
        has_poison = not self.is_calm and self.random.random() < 0.1
        for index in range(num_requests):
            self.at(0.1 + self.random.random() * FAULTS_UNTIL * 0.8, partial(self._submit, has_poison and index == 0))
        self.advance(FAULTS_UNTIL)
        self.repeat_rate = 0.0
        self.advance(FAULTS_UNTIL + ENDS_WITHIN, self._all_ended)
        self._check_answers()
        self.advance(self.now + SETTLES_WITHIN)
        self._check_nothing_left()

    def _all_ended(self) -> bool:
        return all(number in owner.ends for owner, number, _ in self.submitted if self._must_answer(owner))

    def _must_answer(self, owner: SimOwner) -> bool:
        """Return whether its clients are connected and there is an engine that it can reach."""
        return owner.is_alive and (owner.has_engine or not self.redis.is_away)

    def _check_answers(self) -> None:
        for owner, number, _ in self.submitted:
            if self._must_answer(owner):
                self.check(number in owner.ends, f"request {number} of {owner.name} never ends")
                self._check_answer(owner, number)
        max_poisoned = LIMITS.max_attempts + self.num_uncounted
        self.check(len(self.poisoned_legs) <= max_poisoned, "a prompt killed more engines than it has attempts")
        if self.is_calm:
            self.check(self.num_recomputed == 0, "an image was lost without a fault")
            num_runs = sum(engine.num_runs for engine in self.engines.values())
            self.check(num_runs <= 2 * len(self.submitted), "more legs than needed")

    def _check_answer(self, owner: SimOwner, number: int) -> None:
        text, end, received = self.texts[owner.name, number], owner.ends[number], owner.received[number]
        for choice, tokens in enumerate(received):
            for index, token in enumerate(tokens):
                computed_from = text.seed, choice, index, tokens[index - 1] if index else 0
                is_right = self.origins.get(token) == computed_from
                self.check(is_right, f"request {number}, choice {choice}: token {index} does not follow from the text")
            self.check(len(tokens) <= text.lengths[choice], f"request {number}, choice {choice} is too long")
            is_right = not text.is_exact or tokens == text.answer(choice)[: len(tokens)]
            self.check(is_right, f"request {number}, choice {choice} is wrong")
        self.check(len(set(owner.finished[number])) == len(owner.finished[number]), f"request {number} ends twice")
        self._check_end(owner, number)
        if end.kind:
            return
        if number not in self.cancelled:
            self.check([*map(len, received)] == [*text.lengths], f"request {number} is incomplete: {received}")
            finished = sorted(owner.finished[number])
            self.check(finished == [*range(len(received))], f"request {number} has an open choice")
            is_right = owner.num_prompt_logprobs[number] == text.wants_prompt_logprobs
            self.check(is_right, f"request {number} got its prompt's log-probabilities twice or never")

    def _check_end(self, owner: SimOwner, number: int) -> None:
        text, end = self.texts[owner.name, number], owner.ends[number]
        if text.is_poison and number not in self.cancelled:
            self.check(end.kind == "attempts", f"the poisoned request ended with {end}")
        match end.kind:
            case "":
                pass
            case "invalid":
                self.check(text.is_invalid, f"request {number} was refused: {end}")
            case "attempts":
                self.check(len(end.losses) >= LIMITS.max_attempts and not self.is_calm, f"request {number}: {end}")
            case _:
                self.check(False, f"request {number} ended with {end}")

    def _check_nothing_left(self) -> None:
        for name, engine in self.engines.items():
            self.check(not engine.runs, f"the engine of {name} still runs {[*engine.runs]}")
        for owner in self.owners.values():
            self.check(not self._must_answer(owner) or not owner.states.requests, f"{owner.name} still has requests")
        if self.redis.is_away:
            return
        for name, node in self.nodes.items():
            if not node.is_alive:
                continue
            self.check(not node.states.tickets, f"{name} still has tickets {[*node.states.tickets]}")
            self.check(node.states.num_free_slots == node.num_slots, f"{name} still has slots in use")
            self.check(not node.images, f"{name} still has images {node.images}")
        for key in self.redis.all_keys():
            if key.startswith("q:") and not key.endswith(f":{self.lost_node}"):
                stream = self.redis.stream(key)
                self.check(not stream.entries, f"{key} still has entries")
                self.check(stream.group is None or not stream.group.pending, f"{key} still has pending entries")
        self.check(not self.redis.keys_without_ttl(), f"keys without a time to live: {self.redis.keys_without_ttl()}")

    def _on_write(self, key: str) -> None:
        kind, _, name = key.partition(":")
        if kind == "in" and name in self.nodes:
            self.nodes[name].notify()
        elif kind == "out":
            self.owners[name].notify()
        elif kind == "q":
            _, _, hint = name.partition(":")
            for node in self.nodes.values():
                if not hint or hint == node.name:
                    node.notify_queue()

    # The clock.

    def draw_delay(self) -> float:
        """Return how long the answer to a look is under way."""
        return self.random.random() ** 0.5 * MAX_DELAY_S if self.random.random() < self.delay_rate else 0.0

    def at(self, delay: float, function: Callable[[], None]) -> None:
        self.at_time(self.now + delay, function)

    def at_time(self, time: float, function: Callable[[], None]) -> None:
        """Call a function at a time, after those that were to be called then before."""
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, function))

    def advance(self, until: float, done: Callable[[], bool] = lambda: False) -> None:
        while self._events and self._events[0][0] <= until and not done():
            self.now, _, function = heapq.heappop(self._events)
            function()
        if not done():
            self.now = until

    def attempt(self, function: Callable[..., Any], *args: Any) -> None:
        with contextlib.suppress(RedisError):
            function(*args)

    def check(self, condition: bool, message: str) -> None:
        if not condition:
            raise Violation(f"{self.now:.2f} s: {message}")

    def local_owners(self, node: str) -> set[str]:
        return {owner.name for owner in self.owners.values() if owner.home == node and owner.is_alive}
