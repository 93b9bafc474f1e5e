# SPDX-License-Identifier: Apache-2.0
"""Owners and agents live, and serve others, while somebody fills their inboxes and queues with broken entries."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.scheduler.messages import AbortCall
from fastdeploy.scheduler.request_states import Stage
from tests.cluster.redis_server import RedisServer
from tests.scheduler.agent_nodes import KEYS, cluster
from tests.scheduler.message_fuzzing import mutated, records, tickets, to_node, to_owner
from tests.scheduler.scripted_node import Client, ScriptedNode, cluster_config, owner, request, until

COUNT = 400


def fill(redis: RedisServer, stream: str, values: Sequence[Any], seed: int, count: int = COUNT) -> None:
    """Write broken messages to a stream, and entries without the field of messages."""
    with redis.client() as client, client.pipeline(transaction=False) as pipe:
        for data in mutated(list(values), count, seed):
            pipe.xadd(stream, {b"m": data}, nomkstream=True)
        pipe.xadd(stream, {b"other": b"1"}, nomkstream=True)
        assert None not in pipe.execute()


def test_an_owner_serves_its_clients(redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    config = cluster_config(redis)
    values = [one for one in to_owner() if not any(isinstance(message, AbortCall) for message in one)]

    async def run() -> None:
        async with ScriptedNode(config, "n") as node, owner(config) as (scheduler, _):
            inbox = node.keys.owner_inbox(scheduler.name)
            client = Client(scheduler, request(max_tokens=3))
            ticket = await node.claim()
            await node.send(ticket, node.tokens(ticket, 0, 5, 6))
            await until(lambda: client.tokens == [5, 6], "the first tokens")
            fill(redis, inbox, values, seed=1)
            await node.send(ticket, node.tokens(ticket, 2, 7, finish="length"))
            assert await client.end() == [5, 6, 7]
            again = Client(scheduler, request("another", max_tokens=1))
            ticket = await node.claim()
            await node.send(ticket, node.tokens(ticket, 0, 9, finish="length"))
            assert await again.end() == [9]
            await until(lambda: redis.execute("XLEN", inbox) == 0, "what was read is deleted")

    asyncio.run(run())
    (line,) = [one.getMessage() for one in caplog.records if "cannot be decoded" in one.getMessage()]
    assert ":out:" in line


def test_an_agent_serves_other_owners(tmp_path: Path, redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with cluster(tmp_path, redis) as made:
            node, other = await made.node("n"), await made.owner()
            fill(redis, KEYS.node_inbox("n"), to_node(), seed=2)
            for stage in Stage:
                fill(redis, KEYS.queue(stage), tickets(), seed=3, count=COUNT // 4)
                fill(redis, KEYS.queue(stage, "n"), tickets(), seed=4, count=COUNT // 4)
            redis.execute("SADD", KEYS.nodes, b"\xff", "no such node")
            redis.execute("SADD", KEYS.owners, b"\xff", "no such owner")
            for number, data in enumerate(mutated(records(), COUNT, seed=5)):
                redis.execute("SADD", KEYS.nodes, f"x{number}")
                redis.execute("SET", KEYS.node(f"x{number}"), data, "EX", 5)
            await other.enqueue(1, Stage.DECODE)
            await other.wait_ended(1)
            await until(lambda: redis.execute("XLEN", KEYS.node_inbox("n")) == 0, "what was read is deleted")
            await until(made.is_empty, "the queues are empty")
            await until(lambda: node.num_tickets == 0, "what no owner waits for has ended")
            assert node.error is None

    asyncio.run(run())
    lines = [one.getMessage() for one in caplog.records if "cannot be decoded" in one.getMessage()]
    assert len(lines) == len(set(lines)) <= 1 + 2 * len(Stage)
    assert not [one for one in caplog.records if one.exc_info]
