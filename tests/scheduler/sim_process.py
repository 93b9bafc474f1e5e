# SPDX-License-Identifier: Apache-2.0
"""A process of the simulator, which can be stopped, killed and cut off from Redis."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fastdeploy.scheduler.liveness import Heartbeat
from fastdeploy.scheduler.request_states import (
    RedisLost,
    RedisReturned,
)
from tests.scheduler.redis_model import FIRST, RedisError

if TYPE_CHECKING:
    from tests.scheduler.simulator import Simulation

TTL_S = 900.0
MAX_RUNNING = 4


class Killed(Exception):
    """The process dies between two commands."""


class Process:
    """What agents and owners share: a loop that can be stopped or killed, faulty commands, a heartbeat.

    Attributes:
        stopped_until: nothing runs before this time.
        cut_off_until: no command reaches Redis before this time.
        troubled_at: when it was last killed, stopped, or cut off.
    """

    def __init__(self, sim: Simulation, name: str, key: str, stream: str) -> None:
        self.sim, self.name, self.key, self.stream = sim, name, key, stream
        self.is_alive = True
        self.stopped_until = 0.0
        self.cut_off_until = 0.0
        self.troubled_at = -1e9
        self.dies_at: tuple[str, bool] | None = None  # a command, and whether after it instead of before
        self._deferred: list[Callable[[], None]] = []
        self._is_up = True
        self._retry_at = 0.0
        self._cursor = FIRST
        self.heartbeat = Heartbeat()
        self._will_poll = False
        self.run(0.0, self.sync)

    def run(self, delay: float, function: Callable[..., None], *args: Any) -> None:
        """Call a function later, unless the process has died; a stopped one calls it when it is woken."""
        self.sim.at(delay, lambda: self._call(partial(function, *args)))

    def _call(self, function: Callable[[], None]) -> None:
        if self.stopped_until > self.sim.now:
            if not self._deferred:
                self.sim.at_time(self.stopped_until, self._wake)
            self._deferred.append(function)
        elif self.is_alive:
            try:
                function()
            except Killed:
                self.kill()

    def _wake(self) -> None:
        """Make the calls that were due while the process was stopped, in their order."""
        functions, self._deferred = self._deferred, []
        for function in functions:
            self._call(function)

    def kill(self) -> None:
        self.is_alive = False
        self.troubled_at = self.sim.now

    def had_trouble(self) -> bool:
        """Return whether others may rightly judge it dead."""
        since = max(self.troubled_at, self.stopped_until)
        return not self.is_alive or since > self.sim.now - 3 * self.sim.limits.expire_s

    def command(self, name: str, *args: Any) -> Any:
        """Run a command of the model with the faults of a network; raise RedisError."""
        sim = self.sim
        if self._retry_at > sim.now:
            raise RedisError  # it does not try yet
        if self.dies_at == (name, False):
            raise Killed
        if self.cut_off_until > sim.now:
            self.troubled_at = sim.now
            raise RedisError
        function = getattr(sim.redis, name)
        if self.dies_at == (name, True):
            function(*args)
            raise Killed
        if name in ("xadd", "ack_and_delete") and sim.random.random() < sim.repeat_rate:
            function(*args)
            if sim.random.random() < 0.4:  # the first try arrives last
                sim.at(sim.random.random() * 4, lambda: sim.attempt(function, *args))
                if sim.random.random() < 0.5:
                    self.troubled_at = sim.now
                    raise RedisError
        return function(*args)

    def beat(self, value: tuple[Any, ...], streams: list[str]) -> bool:
        """Renew the key and the streams that this process reads; return whether Redis has lost writes."""
        old = self.command("set_get", self.key, (self.heartbeat.next_count(), *value), self.sim.limits.expire_s)
        has_streams = all([self.command("expire", stream, TTL_S) for stream in streams])
        return self.heartbeat.lost_writes(old[0] if old else None, self.command("server"), has_streams)

    def handle(self, event: Any) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        raise NotImplementedError

    def lose_redis(self) -> None:
        """Try again after the back-off."""
        self._is_up = False
        if self._retry_at <= self.sim.now:
            self._retry_at = self.sim.now + self.sim.random.choice([0.0, 0.5, 1.5])
        self.handle(RedisLost())

    def return_to_redis(self) -> None:
        self._is_up = True
        self._retry_at = 0.0
        self._cursor = FIRST  # a promoted replica may have written entries with lower ids
        self.notify()
        self.handle(RedisReturned())

    def notify(self) -> None:
        """Read soon what was written."""
        if not self._will_poll:
            self._will_poll = True
            self.run(self.sim.random.random() * 0.03, self._poll)

    def _poll(self) -> None:
        self._will_poll = False
        try:
            for entry, message in self.command("xread", self.stream, self._cursor).items():
                self._cursor = entry
                self.command("xdel", self.stream, entry)
                for one in message if isinstance(message, tuple) else (message,):
                    self.handle(one)
        except RedisError:
            self.lose_redis()
