# SPDX-License-Identifier: Apache-2.0
"""How the requests of an owner run, with a real Redis, an engine and nodes that do what the test says."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from fastdeploy.core.errors import (
    ConfigError,
)
from fastdeploy.core.seeds import request_seed
from fastdeploy.metrics.cluster_metrics import ClusterMetrics
from fastdeploy.scheduler import wait_for_redis
from fastdeploy.scheduler.messages import encode
from fastdeploy.scheduler.owned_request import OwnedState
from fastdeploy.scheduler.request_states import Abort, Handed, Holding, Image, Resend, Role, Stage
from tests.cluster.redis_server import RedisServer
from tests.scheduler.scripted_node import Client, ScriptedNode, cluster_config, owner, request, until, until_async


def test_without_other_nodes_a_request_runs_on_this_node_s_engine(redis: RedisServer) -> None:
    async def run() -> None:
        async with owner(cluster_config(redis)) as (scheduler, engine):
            client = Client(scheduler, request(max_tokens=3))
            leg = await engine.next_run()
            assert leg.request_id == f"{scheduler.name}/0/1"
            engine.emit(leg, 0, 5, 6)
            engine.emit(leg, 2, 7, finish="length")
            assert await client.end() == [5, 6, 7]
            assert {delta.request_id for delta in client.deltas} == {"r"}
            metrics = client.deltas[-1].metrics
            assert metrics is not None
            assert (metrics.path, metrics.node, metrics.num_attempts, metrics.num_cached_tokens) == (
                "local",
                "own",
                1,
                2,
            )
            assert scheduler.num_requests == 0

    asyncio.run(run())


def test_another_node_runs_a_request(redis: RedisServer) -> None:
    config = cluster_config(redis)

    async def run() -> None:
        async with ScriptedNode(config, "n") as node, owner(config) as (scheduler, engine):
            client = Client(scheduler, request(max_tokens=3))
            ticket = await node.claim()
            assert (ticket.owner, ticket.leg, ticket.request.prompt_token_ids) == (scheduler.name, 1, [10, 11, 12])
            await node.send(ticket, node.tokens(ticket, 0, 5, 6))
            await until(lambda: client.tokens == [5, 6], "the first tokens")
            await node.send(ticket, node.tokens(ticket, 2, 7, finish="length"))
            assert await client.end() == [5, 6, 7]
            metrics = client.deltas[-1].metrics
            assert metrics is not None and (metrics.path, metrics.node) == ("redis", "n")
            assert engine.runs == {}

    asyncio.run(run())


def test_a_stream_goes_on_elsewhere_when_its_node_dies(redis: RedisServer) -> None:
    config = cluster_config(redis)

    async def run() -> None:
        async with ScriptedNode(config, "a") as first, owner(config) as (scheduler, _):
            client = Client(scheduler, request(max_tokens=3))
            ticket = await first.claim()
            await first.send(ticket, first.tokens(ticket, 0, 5, 6))
            await until(lambda: client.tokens == [5, 6], "the first tokens")
            async with ScriptedNode(config, "b") as second:
                await first.die()
                other = await second.claim()
                assert (other.leg, other.resumed, other.request.params.seed) == (2, [[5, 6]], request_seed(7, 0))
                await first.send(ticket, first.tokens(ticket, 2, 8))  # it was not dead after all
                await second.send(other, second.tokens(other, 2, 7, finish="length"))
                assert await client.end() == [5, 6, 7]
                metrics = client.deltas[-1].metrics
                assert metrics is not None and (metrics.num_attempts, metrics.node) == (2, "b")
                await until_async(first.inbox, [Abort(scheduler.name, 0, 1)])

    asyncio.run(run())


def test_a_stream_goes_on_at_its_owner_when_no_node_is_left(redis: RedisServer) -> None:
    config = cluster_config(redis)

    async def run() -> None:
        async with ScriptedNode(config, "n") as node, owner(config) as (scheduler, engine):
            client = Client(scheduler, request(max_tokens=2))
            ticket = await node.claim()
            await node.send(ticket, node.tokens(ticket, 0, 5))
            await until(lambda: client.tokens == [5], "the first token")
            await node.die()
            leg = await engine.next_run()
            assert leg.resumed == [[5]]
            engine.emit(leg, 1, 6, finish="length")
            assert await client.end() == [5, 6]
            metrics = client.deltas[-1].metrics
            assert metrics is not None and (metrics.path, metrics.node) == ("taken_over", "own")

    asyncio.run(run())


def test_an_image_goes_from_node_to_node_and_cached_tokens_are_those_of_the_first(redis: RedisServer) -> None:
    config = cluster_config(redis, scheduler_name="splitwise", splitwise_min_prompt=0)

    async def run() -> None:
        async with (
            ScriptedNode(config, "p", Role.PREFILL) as prefill,
            ScriptedNode(config, "d", Role.DECODE) as decode,
            owner(config) as (scheduler, _),
        ):
            client = Client(scheduler, request(max_tokens=2))
            ticket = await prefill.claim(Stage.PREFILL)
            image = Image("p", 1, 1, b"where")
            handed = Handed(*prefill.source(ticket), image, num_cached_tokens=1)
            await prefill.send(ticket, prefill.tokens(ticket, 0, 5), handed)
            other = await decode.claim(Stage.DECODE)
            assert (other.leg, other.image, other.resumed) == (2, image, [[5]])
            await decode.send(other, decode.tokens(other, 1, 6, finish="length"))
            assert await client.end() == [5, 6]
            metrics = client.deltas[-1].metrics
            assert metrics is not None and (metrics.num_cached_tokens, metrics.num_attempts) == (1, 1)

    asyncio.run(run())


def test_a_gap_is_asked_for(redis: RedisServer) -> None:
    config = cluster_config(redis)

    async def run() -> None:
        async with ScriptedNode(config, "n") as node, owner(config) as (scheduler, _):
            client = Client(scheduler, request(max_tokens=3))
            ticket = await node.claim()
            await node.send(ticket, node.tokens(ticket, 1, 6))
            await until_async(node.inbox, [Resend(scheduler.name, 0, 1, 0, 0)])
            await node.send(ticket, node.tokens(ticket, 0, 5, 6), node.tokens(ticket, 2, 7, finish="length"))
            assert await client.end() == [5, 6, 7]

    asyncio.run(run())


def test_waits_losses_ends_and_commands_are_counted(redis: RedisServer) -> None:
    config = cluster_config(redis)
    registry = CollectorRegistry()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"fastdeploy:cluster_{name}", labels)

    async def run() -> None:
        async with ScriptedNode(config, "n") as node, owner(config, 0, ClusterMetrics(registry)) as (scheduler, engine):
            client = Client(scheduler, request("a", max_tokens=1))
            ticket = await node.claim()
            await node.send(ticket, Holding("n", 1, node.source(ticket)[-1], []))
            ticket = await node.claim()
            await node.send(ticket, node.tokens(ticket, 0, 5, finish="length"))
            await client.end()
            left = Client(scheduler, request("b"))
            await node.claim()
            await until(lambda: scheduler.owned(1).state is OwnedState.RUNNING, "the claim")
            await left.leave()
            await node.die()
            await until(lambda: scheduler.is_alone, "the node is gone")
            local = Client(scheduler, request("c"))
            engine.emit(await engine.next_run(), 0, 5, finish="length")
            await local.end()
            await until(lambda: (value("redis_commands_total") or 0) > 20, "commands are counted")

    asyncio.run(run())
    assert [value("requests_total", path=path) for path in ("redis", "local", "taken_over")] == [2, 1, 0]
    assert [value("attempts_total", reason=reason) for reason in ("forgotten", "node_lost")] == [1, 0]
    assert value("queue_wait_seconds_count", stage="decode") == 3


def test_seeds_are_those_that_one_engine_draws_for_worker_0_and_others_for_worker_1(redis: RedisServer) -> None:
    config = cluster_config(redis)

    async def seeds(worker: int) -> list[int | None]:
        drawn = []
        async with owner(config, worker=worker) as (scheduler, engine):
            for number, seed in enumerate([None, 3, None]):
                client = Client(scheduler, request(str(number), seed=seed))
                leg = await engine.next_run()
                drawn.append(leg.params.seed)
                engine.emit(leg, 0, 5, finish="length")
                await client.end()
        return drawn

    expected = [request_seed(7, 0), 3, request_seed(7, 2)]
    assert asyncio.run(seeds(0)) == expected
    others = asyncio.run(seeds(1))
    assert others[1] == 3 and not {others[0], others[2]} & {*expected}


# Redis goes away and comes back.


def test_without_redis_new_requests_run_here_and_streams_wait_for_its_return(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisServer(tmp_path) as redis:
        config = cluster_config(redis)

        async def run() -> None:
            async with ScriptedNode(config, "n") as node, owner(config) as (scheduler, engine):
                client = Client(scheduler, request("old", max_tokens=3))
                ticket = await node.claim()
                await node.send(ticket, node.tokens(ticket, 0, 5))
                await until(lambda: client.tokens == [5], "the first token")
                await asyncio.to_thread(redis.kill)
                new = Client(scheduler, request("new", max_tokens=1))
                leg = await engine.next_run()
                engine.emit(leg, 0, 9, finish="length")
                assert await new.end() == [9]
                await asyncio.to_thread(redis.start)
                await node.join()
                await until(lambda: scheduler.link.is_up, "Redis has returned")
                await node.send(ticket, node.tokens(ticket, 1, 6, 7, finish="length"))
                assert await client.end() == [5, 6, 7]
                assert engine.runs == {}

        asyncio.run(run())
        lines = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert [line[:14] for line in lines] == ["Redis is away:", "Redis is back "]


def test_streams_that_stand_still_without_redis_are_taken_over(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis:
        config = cluster_config(redis, scheduler_patience=0.2)

        async def run() -> None:
            async with ScriptedNode(config, "n") as node, owner(config) as (scheduler, engine):
                client = Client(scheduler, request(max_tokens=2))
                ticket = await node.claim()
                await node.send(ticket, node.tokens(ticket, 0, 5))
                await until(lambda: client.tokens == [5], "the first token")
                await asyncio.to_thread(redis.kill)
                leg = await engine.next_run()
                assert leg.resumed == [[5]]
                engine.emit(leg, 1, 6, finish="length")
                assert await client.end() == [5, 6]

        asyncio.run(run())


def test_a_silent_redis_counts_as_away(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis:
        config = cluster_config(redis)

        async def run() -> None:
            async with ScriptedNode(config, "n"), owner(config) as (scheduler, engine):
                redis.pause()
                client = Client(scheduler, request(max_tokens=1))
                leg = await engine.next_run()
                engine.emit(leg, 0, 5, finish="length")
                assert await client.end() == [5]
                redis.resume()
                await until(lambda: scheduler.link.is_up, "Redis has returned")

        asyncio.run(run())


def test_a_redis_that_answers_heartbeats_only_is_tried_less_and_less(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    config = cluster_config(redis)

    def returns() -> list[float]:
        lines = [record.message for record in caplog.records if record.message.startswith("Redis is back")]
        return [float(line.split()[-2]) for line in lines]

    async def run() -> None:
        async with ScriptedNode(config, "n"), owner(config) as (scheduler, engine):
            redis.execute("ACL", "SETUSER", "default", "-xadd")
            while len(returns()) < 3:
                client = Client(scheduler, request(max_tokens=1))
                engine.emit(await engine.next_run(), 0, 5, finish="length")
                assert await client.end() == [5]
                await asyncio.sleep(0.01)

    try:
        asyncio.run(run())
    finally:
        redis.execute("ACL", "SETUSER", "default", "+xadd")
    assert [found >= least for found, least in zip(returns(), (0.1, 0.2, 0.4))] == [True] * 3


def test_a_ticket_that_redis_has_lost_is_written_again(redis: RedisServer) -> None:
    config = cluster_config(redis)

    async def run() -> None:
        async with ScriptedNode(config, "n") as node, owner(config) as (scheduler, _):
            client = Client(scheduler, request(max_tokens=1))
            await until(lambda: scheduler.link.num_tickets == 1, "the ticket is written")
            redis.execute("FLUSHALL")
            await node.join()
            ticket = await node.claim()
            assert ticket.leg == 1
            await node.send(ticket, node.tokens(ticket, 0, 5, finish="length"))
            assert await client.end() == [5]

    asyncio.run(run())


def test_messages_that_were_read_are_deleted(redis: RedisServer) -> None:
    config = cluster_config(redis)

    async def run() -> None:
        async with ScriptedNode(config, "n") as node, owner(config) as (scheduler, _):
            client = Client(scheduler, request(max_tokens=1))
            ticket = await node.claim()
            await node.send(ticket, node.tokens(ticket, 0, 5, finish="length"))
            await client.end()
            inbox = node.keys.owner_inbox(scheduler.name)
            await until(lambda: redis.execute("XLEN", inbox) == 0, "the inbox is empty")

    asyncio.run(run())


def test_a_redis_whose_clock_is_slower_is_read_from_the_beginning(redis: RedisServer) -> None:
    """A replica that takes over may give its entries ids below those that were read."""
    config = cluster_config(redis)

    async def run() -> None:
        async with ScriptedNode(config, "n") as node, owner(config) as (scheduler, _):
            client = Client(scheduler, request(max_tokens=2))
            ticket = await node.claim()
            await node.send(ticket, node.tokens(ticket, 0, 5))
            await until(lambda: client.tokens == [5], "the first token")
            inbox = node.keys.owner_inbox(scheduler.name)
            redis.execute("FLUSHALL")
            await until(lambda: redis.execute("EXISTS", inbox), "the inbox is there again")
            redis.execute("DEL", inbox)
            payload = encode([node.tokens(ticket, 1, 6, finish="length")])
            redis.execute("XADD", inbox, "1-1", "m", payload)
            assert await client.end() == [5, 6]

    asyncio.run(run())


def test_an_owner_that_stood_still_takes_its_requests_back(redis: RedisServer) -> None:
    config = cluster_config(redis)

    async def run() -> None:
        async with ScriptedNode(config, "n") as node, owner(config) as (scheduler, _):
            client = Client(scheduler, request(max_tokens=1))
            ticket = await node.claim()
            await until(lambda: scheduler.owned(0).state is OwnedState.RUNNING, "the claim")
            time.sleep(1.2)  # as if the process was stopped for longer than the expire period
            redis.execute("DEL", node.keys.owner_inbox(scheduler.name))  # nodes have dropped its requests
            other = await node.claim()
            assert (other.leg, other.num_attempts) == (2, 0)
            await node.send(other, node.tokens(other, 0, 5, finish="length"))
            assert await client.end() == [5]
            assert Abort(scheduler.name, 0, ticket.leg) in await node.inbox()

    asyncio.run(run())


def test_an_owner_starts_without_redis_and_a_wrong_password_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_for_redis, "START_S", 0.3)
    with RedisServer(tmp_path, requirepass="secret") as redis:
        config = cluster_config(redis)

        async def run() -> None:
            with pytest.raises(ConfigError, match="scheduler-password"):
                async with owner(config):
                    pass
            redis.kill()
            async with owner(config) as (scheduler, engine):
                client = Client(scheduler, request(max_tokens=1))
                engine.emit(await engine.next_run(), 0, 5, finish="length")
                assert (await client.end(), scheduler.link.is_up) == ([5], False)

        asyncio.run(run())
