# SPDX-License-Identifier: Apache-2.0
"""How the requests of an owner end, other than with their last token."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fastdeploy.core.errors import (
    AttemptsFailedError,
    EngineDeadError,
    FastDeployError,
    InvalidRequestError,
    NoProgressError,
    QueueFullError,
    QueueTimeoutError,
    RequestFailedError,
    RequestTimeoutError,
    ShuttingDownError,
)
from fastdeploy.core.outputs import ErrorInfo
from fastdeploy.core.seeds import request_seed
from fastdeploy.entrypoints.openai.errors import to_api_error
from fastdeploy.scheduler import owner as owner_module
from fastdeploy.scheduler.messages import AbortAnswer, AbortCall, decode_to_owner
from fastdeploy.scheduler.owned_request import OwnedState
from fastdeploy.scheduler.request_states import Abort, Holding, Refused, Stage
from tests.cluster.redis_server import RedisServer
from tests.scheduler.scripted_node import Client, ScriptedNode, cluster_config, owner, request, until, until_async


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"scheduler_max_waiting_time": 0.2}, QueueTimeoutError, "waited longer than 0.2 s"),
        ({"scheduler_ttl": 1}, NoProgressError, "no progress for 1 s"),
    ],
)
def test_a_request_that_nobody_claims_ends_with_a_typed_error(
    redis: RedisServer, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = cluster_config(redis, **fields)

    async def run() -> None:
        async with ScriptedNode(config, "n") as node, owner(config) as (scheduler, _):
            client = Client(scheduler, request())
            with pytest.raises(error, match=message):
                await client.end()
            await until_async(lambda: node.store.queue_lengths(), {Stage.DECODE: 0})

    asyncio.run(run())


def test_a_request_is_refused_if_too_many_wait(redis: RedisServer) -> None:
    config = cluster_config(redis, scheduler_max_size=1)

    async def run() -> None:
        async with ScriptedNode(config, "n"), owner(config) as (scheduler, _):
            accepted = [Client(scheduler, request(str(number))) for number in range(3)]  # two of them stand in Redis
            with pytest.raises(QueueFullError, match="1 requests are waiting already"):
                await Client(scheduler, request("3")).end()
            for client in accepted:
                await client.leave()

    asyncio.run(run())


def test_a_deadline_ends_a_request_wherever_it_runs(redis: RedisServer) -> None:
    config = cluster_config(redis)

    async def run() -> None:
        async with ScriptedNode(config, "n") as node, owner(config) as (scheduler, _):
            client = Client(scheduler, request(timeout_s=0.3))
            ticket = await node.claim()
            assert ticket.timeout_s is not None
            assert ticket.timeout_s < 0.3 + 1e-6  # a difference of two floats
            with pytest.raises(RequestTimeoutError):
                await client.end()
            await until_async(node.inbox, [Abort(scheduler.name, 0, 1)])

    asyncio.run(run())


def test_lost_attempts_are_named_in_the_error(redis: RedisServer) -> None:
    config = cluster_config(redis, scheduler_max_attempts=2)

    async def run() -> None:
        async with ScriptedNode(config, "n") as node, owner(config) as (scheduler, _):
            client = Client(scheduler, request())
            for _ in range(2):
                ticket = await node.claim()
                await node.send(ticket, Holding("n", 1, node.source(ticket)[-1], []))
            expected = "every attempt failed: node n no longer has it; node n no longer has it"
            with pytest.raises(AttemptsFailedError, match=expected):
                await client.end()

    asyncio.run(run())


def test_a_refusal_is_an_error_only_if_it_is_final(redis: RedisServer) -> None:
    config = cluster_config(redis)

    async def run() -> None:
        async with ScriptedNode(config, "n") as node, owner(config) as (scheduler, _):
            client = Client(scheduler, request())
            ticket = await node.claim()
            await node.send(ticket, Refused(*node.source(ticket), "room"))
            other = await node.claim()
            await node.send(other, Refused(*node.source(other), "invalid", "stop", "is wrong"))
            with pytest.raises(InvalidRequestError, match="stop: is wrong"):
                await client.end()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        (QueueFullError("64 requests are waiting"), QueueFullError),
        (InvalidRequestError("stop", "is wrong"), InvalidRequestError),
    ],
)
def test_what_this_node_s_engine_refuses_is_an_error(
    redis: RedisServer, refusal: FastDeployError, error: type[Exception]
) -> None:
    async def run() -> None:
        async with owner(cluster_config(redis)) as (scheduler, engine):
            client = Client(scheduler, request())
            leg = await engine.next_run()
            engine.runs[leg.request_id][1].fail(refusal)
            with pytest.raises(error, match=str(refusal)):
                await client.end()

    asyncio.run(run())


def test_a_fault_of_this_node_s_engine_ends_every_choice(redis: RedisServer) -> None:
    async def run() -> None:
        async with owner(cluster_config(redis)) as (scheduler, engine):
            client = Client(scheduler, request(n=2))
            leg = await engine.next_run()
            engine.runs[leg.request_id][1].fail(RequestFailedError("internal error"))
            await client.end()
            ends = [(delta.index, delta.finish_reason, delta.error) for delta in client.deltas]
            error = ErrorInfo("internal_error", "internal error")
            assert ends == [(0, "error", error), (1, "error", error)]

    asyncio.run(run())


def test_a_request_that_cannot_be_written_fails_alone(redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    config = cluster_config(redis)

    async def run() -> None:
        async with ScriptedNode(config, "n") as node, owner(config) as (scheduler, engine):
            bad = Client(scheduler, request("bad", cache_salt="\ud800"))
            good = Client(scheduler, request("good", max_tokens=1))
            ticket = await node.claim()
            await node.send(ticket, node.tokens(ticket, 0, 5, finish="length"))
            assert await good.end() == [5]
            await bad.end()
            assert bad.deltas[-1].error == ErrorInfo("internal_error", "internal error")
            assert engine.runs == {}

    asyncio.run(run())
    assert "the ticket of request bad cannot be written" in caplog.text


def test_a_client_that_does_not_read_loses_its_request(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_module, "MAX_UNREAD", 4)

    async def run() -> None:
        async with owner(cluster_config(redis)) as (scheduler, engine):
            client = Client(scheduler, request())
            leg = await engine.next_run()
            for index in range(5):
                engine.emit(leg, index, 5)
            with pytest.raises(InvalidRequestError, match="the client left 5 tokens unread"):
                await client.end()
            assert engine.aborted == [leg.request_id]

    asyncio.run(run())


def test_an_id_in_flight_is_refused(redis: RedisServer) -> None:
    async def run() -> None:
        async with owner(cluster_config(redis)) as (scheduler, engine):
            first = Client(scheduler, request("r"))
            await engine.next_run()
            with pytest.raises(InvalidRequestError, match="request_id: 'r' is in flight already"):
                await Client(scheduler, request("r")).end()
            await first.leave()
            await until(lambda: len(engine.aborted) == 1, "the first is aborted")
            second = Client(scheduler, request("r"))
            await until(lambda: len(engine.runs) == 2, "its id can be used again")
            await second.leave()

    asyncio.run(run())


def test_a_broken_message_is_ignored(redis: RedisServer) -> None:
    config = cluster_config(redis)

    async def run() -> None:
        async with ScriptedNode(config, "n") as node, owner(config) as (scheduler, _):
            client = Client(scheduler, request(max_tokens=1))
            ticket = await node.claim()
            inbox = node.keys.owner_inbox(scheduler.name)
            for payload in (b"", b"\x01", b"\x02\x90", b"\x01\xc1", b"\x01\x91\x91\xa7Unknown"):
                redis.execute("XADD", inbox, "*", "m", payload)
            broken = node.tokens(ticket, 0, 5)
            broken.delta.index = 3
            await node.send(ticket, broken, node.tokens(ticket, 0, 5, finish="length"))
            assert await client.end() == [5]

    asyncio.run(run())


def test_the_errors_of_a_cluster_have_a_status_and_a_code() -> None:
    errors = [QueueTimeoutError("x"), AttemptsFailedError("x"), NoProgressError("x")]
    found = [to_api_error(error, "r") for error in errors]
    assert [(one.status, one.code, one.headers) for one in found] == [
        (429, "server_overloaded", {"Retry-After": "1"}),
        (503, "attempts_failed", {}),
        (504, "no_progress", {}),
    ]


# The end of requests, of the engine and of the owner.


def test_a_client_that_leaves_takes_its_ticket_and_its_leg_with_it(redis: RedisServer) -> None:
    config = cluster_config(redis)

    async def run() -> None:
        async with ScriptedNode(config, "n") as node, owner(config) as (scheduler, _):
            running = Client(scheduler, request("a"))
            await node.claim()
            waiting = Client(scheduler, request("b"))
            await until(lambda: scheduler.link.num_tickets == 2, "both tickets were written")
            await until(lambda: scheduler.owned(0).state is OwnedState.RUNNING, "the claim")
            await running.leave()
            await waiting.leave()
            await until_async(node.inbox, [Abort(scheduler.name, 0, 1)])
            await until_async(lambda: node.store.queue_lengths(), {Stage.DECODE: 0})
            assert (scheduler.num_requests, scheduler.link.num_tickets) == (0, 0)

    asyncio.run(run())


def test_requests_of_all_owners_are_aborted_by_id_and_salt(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    config = cluster_config(redis)

    async def run() -> None:
        async with owner(config) as (first, engine), owner(config) as (second, _):
            mine = Client(first, request("c§0¶cmpl-1", cache_salt="key1"))
            engine.emit(await engine.next_run(), 0, 5, 6)
            await until(lambda: mine.tokens == [5, 6], "two tokens")
            others = [Client(second, request(f"c§{n}¶cmpl-1", cache_salt=f"key{n}")) for n in (1, 2)]
            others.append(Client(second, request("c§cmpl-1-1", cache_salt="key1")))
            await until(lambda: second.num_requests == 3, "all requests")
            answers = await first.abort_requests(["cmpl-1"], "key1")
            assert sorted(answers) == [("c§0¶cmpl-1", 2), ("c§1¶cmpl-1", 0)]
            assert [await mine.end(), await others[0].end()] == [[5, 6], []]
            last = mine.deltas[-1]
            assert (last.finish_reason, last.first_index, last.seed) == ("abort", 2, request_seed(7, 0))
            assert "no answer" not in caplog.text
            await ScriptedNode(config, "n").store.beat_owner("silent", 1, 5.0)
            await ScriptedNode(config, "n").store.create_inbox("{default}:out:silent")
            assert await first.abort_requests(None) == [("c§2¶cmpl-1", 0), ("c§cmpl-1-1", 0)]
            assert "no answer of silent within 1 s" in caplog.text
            await others[1].end()
            await others[2].end()

    asyncio.run(run())


def test_a_call_that_arrives_twice_aborts_once(redis: RedisServer) -> None:
    """Redis may deliver it again after a restart, when other requests are in flight."""
    config = cluster_config(redis)

    async def run() -> None:
        async with ScriptedNode(config, "n") as node, owner(config) as (scheduler, _):
            await node.store.create_inbox(node.keys.owner_inbox("asker"))
            call = AbortCall("asker", 1, None, "")
            first = Client(scheduler, request("a"))
            await node.claim()
            await node.store.send_to_owner(scheduler.name, [call])
            await first.end()
            second = Client(scheduler, request("b", max_tokens=1))
            ticket = await node.claim()
            await node.store.send_to_owner(scheduler.name, [call])
            await node.send(ticket, node.tokens(ticket, 0, 5, finish="length"))
            assert await second.end() == [5]
            answers = await node.store.read_inbox(node.keys.owner_inbox("asker"), b"0", 5.0)
            assert [decode_to_owner(payload) for _, payload in answers] == [
                [AbortAnswer(1, scheduler.name, [("a", 0)])],
                [AbortAnswer(1, scheduler.name, [("a", 0)])],
            ]

    asyncio.run(run())


def test_an_abort_ends_only_the_choices_that_have_not_ended(redis: RedisServer) -> None:
    config = cluster_config(redis)

    async def run() -> None:
        async with ScriptedNode(config, "n") as node, owner(config) as (scheduler, _):
            client = Client(scheduler, request("r", n=2))
            ticket = await node.claim()
            await node.send(ticket, node.tokens(ticket, 0, 5, finish="stop"))
            await until(lambda: client.tokens == [5], "the end of choice 0")
            assert await scheduler.abort_requests(["r"]) == [("r", 1)]
            await client.end()
            assert [(delta.index, delta.finish_reason) for delta in client.deltas] == [(0, "stop"), (1, "abort")]

    asyncio.run(run())


def test_streams_of_other_nodes_go_on_after_the_engine_of_this_one_has_died(redis: RedisServer) -> None:
    config = cluster_config(redis)

    async def run() -> None:
        async with owner(config) as (scheduler, engine):
            here = Client(scheduler, request("here"))
            await engine.next_run()
            async with ScriptedNode(config, "n") as node:
                await until(lambda: not scheduler.is_alone, "the other node is seen")
                there = Client(scheduler, request("there", max_tokens=2))
                ticket = await node.claim()
                await node.send(ticket, node.tokens(ticket, 0, 5))
                await until(lambda: there.tokens == [5], "the first token")
                engine.mark_dead("the engine process ended with status -9")
                with pytest.raises(EngineDeadError):
                    await Client(scheduler, request("new")).end()
                other = await node.claim()
                assert (other.number, other.leg, other.num_attempts) == (0, 2, 1)
                await node.send(ticket, node.tokens(ticket, 1, 6, finish="length"))
                assert await there.end() == [5, 6]
            with pytest.raises(EngineDeadError):  # nobody is left
                await here.end()

    asyncio.run(run())


def test_the_end_of_an_owner_leaves_nothing_behind(redis: RedisServer) -> None:
    config = cluster_config(redis)

    async def run() -> None:
        async with ScriptedNode(config, "n") as node:
            async with owner(config) as (scheduler, _):
                client = Client(scheduler, request())
                await node.claim()
                await until(lambda: scheduler.owned(0).state is OwnedState.RUNNING, "the claim")
                scheduler.end_requests(ShuttingDownError("bye"))
                with pytest.raises(ShuttingDownError, match="bye"):
                    await client.end()
                with pytest.raises(ShuttingDownError, match="bye"):
                    await Client(scheduler, request("new")).end()
            assert await node.inbox() == [Abort(scheduler.name, 0, 1)]
            assert [key for key in redis.execute("KEYS", "*") if scheduler.name.encode() in key] == []
            assert await node.store.read_owners() == frozenset()

    asyncio.run(run())


def test_an_owner_that_ends_at_once_aborts_what_runs_elsewhere(redis: RedisServer) -> None:
    config = cluster_config(redis)

    async def run() -> None:
        async with ScriptedNode(config, "n") as node:
            async with owner(config) as (scheduler, _):
                client = Client(scheduler, request())
                await node.claim()
                await until(lambda: scheduler.owned(0).state is OwnedState.RUNNING, "the claim")
            assert await node.inbox() == [Abort(scheduler.name, 0, 1)]
            with pytest.raises(ShuttingDownError):
                await client.end()

    asyncio.run(run())
