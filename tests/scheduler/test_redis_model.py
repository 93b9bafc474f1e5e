# SPDX-License-Identifier: Apache-2.0
"""The model of Redis, over which the schedules of the property test run, answers like a real Redis.

Random commands go through the store to a real server, and to the model as the simulator uses it.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.scheduler.messages import decode_to_owner
from fastdeploy.scheduler.request_states import Claimed, Stage
from fastdeploy.scheduler.store import Entry, GroupMissingError, Store
from tests.cluster.redis_server import RedisServer
from tests.scheduler.redis_model import FIRST, NoGroupError, RedisModel
from tests.scheduler.redis_stores import DECODE, INBOX, KEYS, OWNER, config, opened, ticket

NODES = ("n1", "n2")
SHARED = KEYS.queue(Stage.DECODE)
QUEUES = {"": SHARED} | {node: KEYS.queue(Stage.DECODE, node) for node in NODES}
TTL_S, IDLE_S = 900.0, 60.0
MISSING = "missing"


class RealSide:
    """Commands to a real server; tickets and messages have numbers, by which both sides name them."""

    def __init__(self, server: RedisServer, store: Store) -> None:
        self._server, self._store = server, store
        self._entries: dict[int, Entry] = {}
        self._messages: dict[int, bytes] = {}

    async def create_queues(self, node: str) -> None:
        await self._store.create_queues(node)

    async def create_inbox(self) -> None:
        await self._store.create_inbox(INBOX)

    async def enqueue(self, number: int, hint: str) -> None:
        self._entries[number] = await self._store.enqueue(ticket(number), hint)

    async def dequeue(self, number: int) -> None:
        await self._store.dequeue([self._entries[number]])

    async def claim(self, number: int, message: int) -> bool:
        return await self._store.claim(OWNER, [Claimed(message, 1, "n1", 1, 1)], self._entries[number])

    async def drop(self, number: int) -> None:
        await self._store.drop(self._entries[number])

    async def send(self, message: int) -> bool:
        return await self._store.send_to_owner(OWNER, [Claimed(message, 1, "n1", 1, 1)])

    async def read_inbox(self, after: int | None) -> list[int]:
        cursor = b"0" if after is None else self._messages.get(after, b"0")
        found = []
        for entry_id, payload in await self._store.read_inbox(INBOX, cursor, 0):
            (message,) = decode_to_owner(payload)
            assert isinstance(message, Claimed)
            self._messages[message.number] = entry_id
            found.append(message.number)
        return found

    async def delete_message(self, message: int) -> None:
        if message in self._messages:
            await self._store.delete_entries(INBOX, [self._messages[message]])

    async def read_tickets(self, node: str, consumer: str) -> list[int] | str:
        try:
            return [one.number for _, one in await self._store.read_tickets(DECODE, node, consumer, 0)]
        except GroupMissingError:
            return MISSING

    async def read_pending(self, node: str, consumer: str, idle_s: float) -> list[int] | str:
        try:
            return sorted(one.number for _, one in await self._store.read_pending(node, consumer, idle_s))
        except GroupMissingError:
            return MISSING

    async def find(self) -> list[tuple[int, str]]:
        return sorted((one.number, hint) for _, one, hint in await self._store.find_tickets(OWNER))

    async def num_queued(self) -> int:
        return (await self._store.queue_lengths())[Stage.DECODE]

    async def beat(self, count: int) -> tuple[int | None, bool, str]:
        beat = await self._store.beat_owner(OWNER, count, TTL_S)
        return (None if beat.old_value is None else int(beat.old_value)), beat.has_streams, beat.server

    async def owners(self) -> bool:
        return OWNER in await self._store.read_owners()

    async def delete(self, key: str) -> None:
        self._server.execute("DEL", key)

    async def flush_all(self) -> None:
        self._server.execute("FLUSHALL")

    async def restart(self) -> None:
        self._server.restart()
        await self._store.close()


class ModelSide:
    """The same commands to the model."""

    def __init__(self, keeps_data: bool) -> None:
        self.now = 0.0
        self._model = RedisModel(lambda: self.now)
        self._keeps_data = keeps_data
        self._entries: dict[int, tuple[str, tuple[int, int]]] = {}
        self._messages: dict[int, tuple[int, int]] = {}

    async def create_queues(self, node: str) -> None:
        for hint in (node, ""):
            self._model.create_stream(QUEUES[hint], TTL_S, group=True)

    async def create_inbox(self) -> None:
        self._model.create_stream(INBOX, TTL_S)

    async def enqueue(self, number: int, hint: str) -> None:
        entry = self._model.xadd(QUEUES[hint], number, TTL_S)
        assert entry is not None
        self._entries[number] = QUEUES[hint], entry

    async def dequeue(self, number: int) -> None:
        self._model.xdel(*self._entries[number])

    async def claim(self, number: int, message: int) -> bool:
        return self._model.ack_and_delete(*self._entries[number], INBOX, message)

    async def drop(self, number: int) -> None:
        self._model.ack_and_delete(*self._entries[number])

    async def send(self, message: int) -> bool:
        return self._model.xadd(INBOX, message) is not None

    async def read_inbox(self, after: int | None) -> list[int]:
        cursor = FIRST if after is None else self._messages.get(after, FIRST)
        found = self._model.xread(INBOX, cursor)
        self._messages |= {message: entry for entry, message in found.items()}
        return list(found.values())

    async def delete_message(self, message: int) -> None:
        if message in self._messages:
            self._model.xdel(INBOX, self._messages[message])

    def _has_groups(self, node: str) -> bool:
        return all(self._model.stream(QUEUES[hint]).group is not None for hint in (node, ""))

    async def read_tickets(self, node: str, consumer: str) -> list[int] | str:
        if not self._has_groups(node):
            for hint in (node, ""):
                if self._model.stream(QUEUES[hint]).group is None:
                    with pytest.raises(NoGroupError):
                        self._model.read_group(QUEUES[hint], consumer)
            return MISSING
        found = [self._model.read_group(QUEUES[hint], consumer) for hint in (node, "")]
        return [one[1] for one in found if one is not None]

    async def read_pending(self, node: str, consumer: str, idle_s: float) -> list[int] | str:
        if not self._has_groups(node):
            return MISSING
        found = [self._model.read_pending(QUEUES[hint], consumer, idle_s) for hint in (node, "")]
        return sorted(number for one in found for _, number in one)

    async def find(self) -> list[tuple[int, str]]:
        return sorted((number, hint) for hint, queue in QUEUES.items() for number in self._model.xrange(queue).values())

    async def num_queued(self) -> int:
        return len(self._model.xrange(SHARED))

    async def beat(self, count: int) -> tuple[int | None, bool, str]:
        old = self._model.set_get(KEYS.owner(OWNER), count, TTL_S)
        return old, self._model.expire(INBOX, TTL_S), self._model.server()

    async def owners(self) -> bool:
        return bool(self._model.find(KEYS.owner(OWNER)))

    async def delete(self, key: str) -> None:
        self._model.delete(key)

    async def flush_all(self) -> None:
        self._model.flush_all()

    async def restart(self) -> None:
        self._model.restart(self._model.snapshot() if self._keeps_data else ({}, {}, {}))


class Commands:
    """Random commands, most of which refer to tickets and messages that there are."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._num_tickets = self._num_messages = self._count = 0

    def next(self) -> tuple[str, tuple[Any, ...]]:
        weights = {
            "create_queues": 12,
            "create_inbox": 3,
            "enqueue": 20,
            "dequeue": 5,
            "claim": 10,
            "drop": 4,
            "send": 8,
            "read_inbox": 8,
            "delete_message": 4,
            "read_tickets": 20,
            "read_pending": 12,
            "find": 4,
            "num_queued": 3,
            "beat": 6,
            "owners": 2,
            "delete": 1,
            "flush_all": 1,
            "restart": 1,
        }
        name = self._random.choices(list(weights), list(weights.values()))[0]
        if name in ("dequeue", "claim", "drop") and self._num_tickets == 0:
            name = "enqueue"
        return name, getattr(self, f"_{name}", tuple)()

    def _create_queues(self) -> tuple[Any, ...]:
        return (self._random.choice(NODES),)

    def _enqueue(self) -> tuple[Any, ...]:
        self._num_tickets += 1
        return self._num_tickets, self._random.choice(("", "", *NODES))

    def _dequeue(self) -> tuple[Any, ...]:
        return (self._random.randint(max(1, self._num_tickets - 8), self._num_tickets),)

    _drop = _dequeue

    def _claim(self) -> tuple[Any, ...]:
        return *self._dequeue(), *self._send()

    def _send(self) -> tuple[Any, ...]:
        self._num_messages += 1
        return (self._num_messages,)

    def _delete_message(self) -> tuple[Any, ...]:
        return (self._random.randint(0, self._num_messages),)

    def _read_inbox(self) -> tuple[Any, ...]:
        return (self._random.choice((None, self._random.randint(0, self._num_messages))),)

    def _read_tickets(self) -> tuple[Any, ...]:
        node = self._random.choice(NODES)
        return node, f"{node}.{self._random.randint(1, 2)}"

    def _read_pending(self) -> tuple[Any, ...]:
        return *self._read_tickets(), self._random.choice((0.0, IDLE_S))

    def _beat(self) -> tuple[Any, ...]:
        self._count += 1
        return (self._count,)

    def _delete(self) -> tuple[Any, ...]:
        return (self._random.choice((*QUEUES.values(), INBOX, KEYS.owner(OWNER))),)


async def compare(server: RedisServer, seed: int, count: int, keeps_data: bool) -> set[str]:
    """Run the same commands on both sides; return which answers there were."""
    async with opened(config(server.address)) as store:
        real, model, commands = RealSide(server, store), ModelSide(keeps_data), Commands(seed)
        servers: list[tuple[str, str]] = []
        seen = set()
        for step in range(count):
            model.now += 0.01
            name, args = commands.next()
            answers = [await getattr(side, name)(*args) for side in (real, model)]
            if name == "beat":
                servers.append((answers[0][2], answers[1][2]))
                answers = [answer[:2] for answer in answers]
                changes = [[one[side] for one in servers[-2:]] for side in (0, 1)]
                assert len(set(changes[0])) == len(set(changes[1])), (seed, step)
            assert answers[0] == answers[1], (seed, step, name, args)
            seen.add(f"{name} {'some' if answers[0] and answers[0] != MISSING else answers[0]}")
    return seen


@pytest.mark.parametrize("appendonly", ["no", "yes"])
def test_the_model_answers_like_redis(tmp_path: Path, appendonly: str) -> None:
    """With the default `appendfsync everysec`, a kill may lose what was written while the disk was busy."""
    seen: set[str] = set()
    with RedisServer(tmp_path, appendonly=appendonly, appendfsync="always") as server:
        for seed in range(8):
            server.execute("FLUSHALL")
            seen |= asyncio.run(compare(server, seed, 300, keeps_data=appendonly == "yes"))
    expected = {
        *("read_tickets some", "read_tickets missing", "read_tickets []"),
        *("read_pending some", "read_pending missing", "read_pending []"),
        *("claim some", "claim False", "send some", "send False", "read_inbox some", "read_inbox []"),
        *("find some", "find []", "owners some", "owners False", "restart None", "flush_all None"),
    }
    assert expected <= seen


def test_ids_stay_above_the_last_one_when_the_clock_is_set_back(tmp_path: Path) -> None:
    """A promoted replica may have a slower clock."""
    with RedisServer(tmp_path) as server:
        future = int(server.execute("TIME")[0]) * 1000 + 3_600_000
        server.execute("XADD", "stream", f"{future}-0", "m", "")
        assert server.execute("XADD", "stream", "*", "m", "") == f"{future}-1".encode()
    model = RedisModel(lambda: 1.0)
    model.clock_offset = 3600.0
    model.xadd("stream", 0, TTL_S)
    model.clock_offset = 0.0
    assert model.xadd("stream", 0, TTL_S) == (3_601_000, 1)


def test_a_full_server_refuses_what_adds_data_and_permits_what_deletes_it(tmp_path: Path) -> None:
    """Both sides refuse: heartbeats, tickets, messages, claims and new streams."""

    async def scenario(store: Store) -> None:
        await store.create_queues("n1")
        entry = await store.enqueue(ticket(1))
        server.execute("CONFIG", "SET", "maxmemory", 1)
        await store.read_tickets(DECODE, "n1", "n1.1", 0)
        await store.read_pending("n1", "n1.1", IDLE_S)
        await store.dequeue([entry])
        await store.drop(entry)
        assert await store.find_tickets(OWNER) == []

    with RedisServer(tmp_path) as server:
        asyncio.run(_with_store(server, scenario))


async def _with_store(server: RedisServer, scenario: Any) -> None:
    async with opened(config(server.address)) as store:
        await scenario(store)
