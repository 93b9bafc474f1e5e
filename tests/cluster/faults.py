# SPDX-License-Identifier: Apache-2.0
"""Carries out the events of a slice, and says which answers may then be errors."""

from __future__ import annotations

import asyncio
import signal
import time

from tests.cluster import processes
from tests.cluster.clients import Answer
from tests.cluster.cluster import Cluster, Node
from tests.cluster.plan import DEAD_FOR_GOOD, ON_REDIS, Event, Plan

END_S = 75.0  # a node whose engine has died serves its streams for at most 30 s
WATCH_S = 0.05
LEAST_LOSSES = 3  # --scheduler-max-attempts


class Faults:
    """The events of one slice on a cluster.

    Attributes:
        num_events: those that found something to kill, stop or wake.
        problems: exit statuses that are wrong.
        is_over: all requests have ended; set by the caller.
    """

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        self.num_events = 0
        self.is_over = False
        self.problems: list[str] = []
        self._cluster, self._plan = cluster, plan
        self._lost_connections: list[tuple[int, float]] = []  # node, and when API processes of it were killed
        self._lost_engines: set[int] = set()
        self._ended: set[int] = set()
        self._ending: set[int] = set()  # another event starts them again
        self._harmed: set[int] = set()
        self._lost_redis = False
        self._redis_lock = asyncio.Lock()

    async def run(self) -> None:
        """Carry out all events at their times; return when the last one is over and `is_over` is set."""
        await asyncio.gather(*map(self._happen, self._plan.events), *map(self._watch, self._plan.faults))

    def may_break(self, answer: Answer) -> bool:
        """Return whether the connection of this client may break: an API process of its node was killed meanwhile.

        A server that ends resets the connections that it has not yet accepted.
        """
        if answer.status == 0 and answer.node in self._ended:
            return True
        return any(node == answer.node and when_s >= answer.began_s for node, when_s in self._lost_connections)

    def may_fail(self, answer: Answer) -> bool:
        """Return whether this error is what it should be."""
        assert answer.error is not None
        if answer.error["code"] == "attempts_failed":
            return self.num_events >= LEAST_LOSSES
        alone = self._lost_redis or len(self._harmed - {answer.node}) > 0
        return answer.error["code"] == "service_unavailable" and answer.node in self._lost_engines and alone

    async def _happen(self, event: Event) -> None:
        await asyncio.sleep(event.at_s)
        if event.node < 0:
            await self._happen_to_redis(event)
            return
        node = self._cluster.nodes[event.node]
        if event.action == "restart" and event.node in self._ending:
            return  # a second SIGTERM would end it at once
        if not node.url or not node.pids("all" if event.process == "all" else event.process):
            return  # an earlier event has ended it
        self.num_events += 1
        self._harmed.add(event.node)
        await {"kill": self._kill, "stop": self._stop, "restart": self._restart}[event.action](node, event)

    async def _happen_to_redis(self, event: Event) -> None:
        assert self._cluster.redis is not None and event.action in (*ON_REDIS, DEAD_FOR_GOOD)
        redis = self._cluster.redis
        if redis.is_dead:
            return
        self.num_events += 1
        self._lost_redis = True
        async with self._redis_lock:
            match event.action:
                case "redis_kill":
                    redis.server.kill()
                    await asyncio.sleep(event.length_s)
                    await asyncio.to_thread(redis.server.start)
                case "redis_stop":
                    redis.server.pause()
                    await asyncio.sleep(event.length_s)
                    redis.server.resume()
                case "flush":
                    await asyncio.to_thread(redis.server.execute, "FLUSHALL")
                case "failover":
                    await asyncio.to_thread(redis.fail_over, event.length_s)
                case _:
                    redis.close()

    async def _kill(self, node: Node, event: Event) -> None:
        if event.process == "engine":
            self._lost_engines.add(event.node)
        is_whole = event.process == "all" or node.pids(event.process) == [node.server.process.pid]
        if event.process in ("all", "api"):
            self._lost_connections.append((event.node, time.monotonic()))
        node.kill(event.process)
        if (is_whole or event.process == "engine") and event.node not in self._ending:
            self._ending.add(event.node)
            status = await asyncio.to_thread(node.server.wait_end, END_S)
            self._check(event, status, -signal.SIGKILL if is_whole else 1)
            self._ended.add(event.node)
            await asyncio.sleep(event.length_s)
            node.start()
            self._ending.discard(event.node)

    async def _stop(self, node: Node, event: Event) -> None:
        node.stop(event.process)
        await asyncio.sleep(event.length_s)
        self.num_events += 1
        node.wake()

    async def _restart(self, node: Node, event: Event) -> None:
        self._ended.add(event.node)
        self._ending.add(event.node)
        was_lost = event.node in self._lost_engines
        node.server.terminate()
        status = await asyncio.to_thread(node.server.wait_end, END_S)
        can_be_lost = event.node in self._lost_engines  # before, or while it ended
        self._check(event, status, 1 if was_lost else 0, *([1] if can_be_lost else []))
        node.start()
        self._ending.discard(event.node)

    def _check(self, event: Event, status: int, *expected: int) -> None:
        if status not in (*expected, -signal.SIGKILL):  # another event may have killed it
            self.problems.append(f"{event}: exit status {status}, expected {expected[0]}")

    async def _watch(self, index: int) -> None:
        """Note what a fault point has done, and wake what it has stopped."""
        node = self._cluster.nodes[index]
        server, first = node.server, {pid: processes.kind(pid) for pid in node.pids("all")}
        while not self.is_over and node.server is server:
            for pid in [pid for pid in first if not processes.is_alive(pid)]:
                self._note_death(index, first.pop(pid), pid == server.process.pid)
            if any(processes.state(pid) == "T" for pid in first) and ":stop" in self._plan.faults[index]:
                self.num_events += 2
                self._harmed.add(index)
                await asyncio.sleep(1.0)
                node.wake()
            await asyncio.sleep(WATCH_S)

    def _note_death(self, index: int, kind: str, is_server: bool) -> None:
        self.num_events += 1
        self._harmed.add(index)
        if kind == "engine":
            self._lost_engines.add(index)
            self._ended.add(index)
        if kind == "worker" or is_server:
            self._lost_connections.append((index, time.monotonic()))
