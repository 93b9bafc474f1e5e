# SPDX-License-Identifier: Apache-2.0
"""Agents over a real Redis: they claim tickets, stream tokens, hand over, and live through losses."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from fastdeploy.core.errors import ConfigError
from fastdeploy.ipc.heartbeat import STALLED_S, heartbeat_file
from fastdeploy.kv_cache.hashes import hash_blocks
from fastdeploy.scheduler.request_states import Claimed, Role, Stage, Tokens
from tests.cluster.redis_server import RedisServer
from tests.scheduler.agent_nodes import KEYS, Cluster, cluster, until

DECODE, PREFILL = Stage.DECODE, Stage.PREFILL


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


def run(folder: Path, redis: RedisServer, test: Callable[[Cluster], Awaitable[None]]) -> None:
    async def body() -> None:
        async with cluster(folder, redis) as made:
            await test(made)

    asyncio.run(body())


@pytest.mark.parametrize("stage", [PREFILL, DECODE])
def test_a_ticket_is_claimed_and_its_tokens_reach_the_owner(tmp_path: Path, redis: RedisServer, stage: Stage) -> None:
    async def test(made: Cluster) -> None:
        node, owner = await made.node("n"), await made.owner()
        await owner.enqueue(1, stage)
        await owner.wait_ended(1)
        assert (owner.find(Claimed)[0].node, owner.ends) == ("n", {1: "length"})
        assert isinstance(owner.messages[0], Claimed)
        assert {message.delta.request_id for message in owner.find(Tokens)} == {""}
        await until(made.is_empty, "the queues are empty")
        assert node.num_tickets == 0

    run(tmp_path, redis, test)


def test_a_request_without_output_ends_on_the_node_that_computes_its_prompt(tmp_path: Path, redis: RedisServer) -> None:
    async def test(made: Cluster) -> None:
        prefill, _ = await made.node("p", "prefill"), await made.node("d", "decode")
        owner = await made.owner()
        await until(lambda: len(prefill.agent._membership.records) == 2, "p sees d")
        await owner.enqueue(1, params={"max_tokens": 0, "prompt_logprobs": 0}, prompt_logprobs=True)
        await owner.wait_ended(1, 0)
        [message] = owner.find(Tokens)
        assert (owner.ends, message.delta.token_ids, len(message.delta.prompt_logprobs)) == ({1: "length"}, [], 70)
        assert [message.node for message in owner.find(Claimed)] == ["p"]
        await until(lambda: prefill.num_tickets == 0, "the ticket is done")
        assert prefill.agent._engine.num_free_slots == 64

    run(tmp_path, redis, test)


def test_a_prompt_is_handed_over_with_its_blocks(tmp_path: Path, redis: RedisServer) -> None:
    async def test(made: Cluster) -> None:
        prefill, decode = await made.node("p", "prefill"), await made.node("d", "decode")
        owner = await made.owner()
        await until(lambda: len(prefill.agent._membership.records) == 2, "p sees d")
        await owner.enqueue(1, prompt=300)
        image = await owner.wait_handed(1)
        assert image is not None
        assert (image.node, len(owner.tokens[1]), prefill.agent.report().num_leased_slots) == ("p", 1, 5)
        await owner.enqueue(1, DECODE, leg=2, image=image, prompt=300)
        await owner.wait_ended(1)
        assert [message.node for message in owner.find(Claimed)] == ["p", "d"]
        await until(lambda: prefill.num_tickets == 0, "the image is released")  # by d
        report = decode.agent.report()
        assert (report.transfer_failures, report.recomputed_tokens) == ({}, {})
        assert report.transferred_bytes == {"ipc": {"in": 5 * 2**16, "out": 0}}
        assert prefill.agent.report().transferred_bytes == {"ipc": {"in": 0, "out": 5 * 2**16}}
        assert (report.transfer_s["ipc"][1], decode.thread.engine.stats().num_imported_tokens) == (1, 300)
        assert prefill.agent._engine.num_free_slots == 64

    run(tmp_path, redis, test)


@pytest.mark.parametrize(("caches_prefixes", "noted"), [(True, "n"), (False, "")])
def test_a_node_notes_the_prefixes_that_its_engine_caches(
    tmp_path: Path, redis: RedisServer, caches_prefixes: bool, noted: str
) -> None:
    async def test(made: Cluster) -> None:
        await made.node("n", caches_prefixes=caches_prefixes)
        owner = await made.owner()
        await owner.enqueue(1, prompt=130)
        await owner.wait_ended(1)
        await until(made.is_empty, "the ticket has ended")
        prompt = [11, *range(20, 149)]
        [key] = hash_blocks("mock", "", prompt, 64)[-1:]
        if noted:
            for _ in range(500):
                if await owner.store.find_prefixes([key]) == [noted]:
                    return
                await asyncio.sleep(0.01)
        assert await owner.store.find_prefixes([key]) == [noted]

    run(tmp_path, redis, test)


def test_an_image_that_is_gone_is_computed_and_counted(tmp_path: Path, redis: RedisServer) -> None:
    async def test(made: Cluster) -> None:
        prefill, decode, owner = await made.node("p", "prefill"), await made.node("d", "decode"), await made.owner()
        await until(lambda: len(prefill.agent._membership.records) == 2, "p sees d")
        await owner.enqueue(1, prompt=300)
        image = await owner.wait_handed(1)
        await prefill.stop()
        await until(lambda: len(decode.agent._membership.records) == 1, "d sees that p has gone")
        await owner.enqueue(1, DECODE, leg=2, image=image, prompt=300)
        await owner.wait_ended(1)
        report = decode.agent.report()
        assert (report.transfer_failures, report.recomputed_tokens) == ({"none": {"gone": 1}}, {"gone": 300})

    run(tmp_path, redis, test)


def test_a_wrong_request_is_refused_with_its_field(tmp_path: Path, redis: RedisServer) -> None:
    async def test(made: Cluster) -> None:
        node, owner = await made.node("n"), await made.owner()
        await owner.enqueue(1, params={"max_tokens": 2}, resumed=[[4, 5, 6]])
        refused = await owner.wait_refused(1)
        assert (refused.kind, refused.field) == ("invalid", "resumed")
        assert node.num_tickets == 0

    run(tmp_path, redis, test)


def test_a_leg_is_aborted(tmp_path: Path, redis: RedisServer) -> None:
    async def test(made: Cluster) -> None:
        node, owner = await made.node("n", step_s=0.01), await made.owner()
        await owner.enqueue(1, params={"max_tokens": 1500})
        await until(lambda: owner.tokens[1], "there are tokens")
        await owner.abort("n", 1)
        await until(lambda: not node.thread.engine.has_unfinished(), "the engine has aborted it")
        assert (node.num_tickets, node.agent._engine.legs) == (0, {})

    run(tmp_path, redis, test)


def test_no_more_is_claimed_than_the_engine_has_room_for(tmp_path: Path, redis: RedisServer) -> None:
    async def test(made: Cluster) -> None:
        node, owner = await made.node("n", hold=True, config_max_num_seqs=2), await made.owner()
        hold = Path(node.thread.engine._model) / "hold"
        hold.touch()
        for number in (1, 2, 3):
            await owner.enqueue(number)
        await until(lambda: len(owner.find(Claimed)) == 2, "two are claimed")
        await asyncio.sleep(0.5)
        assert len(owner.find(Claimed)) == 2
        hold.unlink()
        for number in (1, 2, 3):
            await owner.wait_ended(number)

    run(tmp_path, redis, test)


def test_the_requests_of_an_owner_that_died_are_aborted(tmp_path: Path, redis: RedisServer) -> None:
    async def test(made: Cluster) -> None:
        node, owner = await made.node("n", step_s=0.01), await made.owner()
        await owner.enqueue(1, params={"max_tokens": 1500})
        await until(lambda: owner.tokens[1], "there are tokens")
        await owner.stop()
        await until(lambda: not node.thread.engine.has_unfinished(), "the engine has aborted it")
        assert (node.num_tickets, node.agent.report().num_orphaned) == (0, 1)

    run(tmp_path, redis, test)


def test_an_agent_that_is_started_again_has_a_later_incarnation(tmp_path: Path, redis: RedisServer) -> None:
    async def test(made: Cluster) -> None:
        node, owner = await made.node("n", step_s=0.01), await made.owner()
        await owner.enqueue(1, params={"max_tokens": 1500})
        await until(lambda: owner.tokens[1], "there are tokens")
        await node.kill()
        again = await made.node("n", engine=node.thread, config_is_replacement=True)
        await until(lambda: not node.thread.engine.has_unfinished(), "the engine has aborted it")
        assert again.agent.states.incarnation > node.agent.states.incarnation
        await owner.enqueue(2)
        await owner.wait_ended(2)
        assert owner.find(Claimed, 2)[0].incarnation == again.agent.states.incarnation
        assert again.error is None  # the key of the former one is no other node

    run(tmp_path, redis, test)


def test_a_stream_goes_on_after_redis_was_away_and_emptied(tmp_path: Path, redis: RedisServer) -> None:
    async def test(made: Cluster) -> None:
        node, owner = await made.node("n", step_s=0.01), await made.owner()
        await owner.enqueue(1, params={"max_tokens": 150})
        await until(lambda: owner.tokens[1], "there are tokens")
        await asyncio.to_thread(redis.kill)
        await until(lambda: not node.agent.is_redis_up, "the loss is noticed")
        assert node.agent.report().is_redis_up is False
        await asyncio.to_thread(redis.start)
        await owner.wait_ended(1, 150)
        await owner.enqueue(2)
        await owner.wait_ended(2)
        assert node.agent.is_redis_up

    run(tmp_path, redis, test)


def test_a_node_hands_over_in_waves_when_it_drains(tmp_path: Path, redis: RedisServer) -> None:
    async def test(made: Cluster) -> None:
        leaving = await made.node("a", step_s=0.01, num_slots=4, config_graceful_s=1000.0)
        owner = await made.owner()
        for number in (1, 2, 3):
            await owner.enqueue(number, params={"max_tokens": 300}, prompt=130)
            assert await owner.wait_claimed(number) == "a"
        await until(lambda: all(owner.tokens[number] for number in (1, 2, 3)), "there are tokens")
        await made.node("b")
        leaving.set_role("draining")
        for number in (1, 2, 3):
            image = await owner.wait_handed(number)
            assert image is not None
            await owner.enqueue(number, DECODE, leg=2, image=image, params={"max_tokens": 300}, prompt=130)
            assert await owner.wait_claimed(number, leg=2) == "b"
        for number in (1, 2, 3):
            await owner.wait_ended(number, 300)
        await until(lambda: leaving.num_tickets == 0, "the images are released")
        report = leaving.agent.report()
        assert (report.role, report.num_foreign, report.num_leased_slots) == ("draining", 0, 0)
        assert (report.num_slots, report.num_filling_slots) == (4, 0)
        assert leaving.agent._membership.records["a"].role is Role.DRAINING

    run(tmp_path, redis, test)


def test_of_roles_asked_for_in_quick_succession_the_last_one_counts(tmp_path: Path, redis: RedisServer) -> None:
    async def test(made: Cluster) -> None:
        node = await made.node("a")
        await until(lambda: node.agent._num_reads > 0, "a read delays the changes")
        for count, role in enumerate(("draining", "decode", "prefill"), start=1):
            node.set_role(role)
            await until(lambda count=count: node.agent._num_role_changes == count, "the change is under way")
        await until(lambda: node.agent._num_role_changes == 0, "no change is under way")
        assert node.agent.report().role == "prefill"

    run(tmp_path, redis, test)


def test_a_drain_without_time_hands_over_without_blocks(tmp_path: Path, redis: RedisServer) -> None:
    async def test(made: Cluster) -> None:
        leaving = await made.node("a", step_s=0.01, num_slots=4, config_graceful_s=0.4)
        owner = await made.owner()
        for number in (1, 2):
            await owner.enqueue(number, params={"max_tokens": 1000}, prompt=130)
            await owner.wait_claimed(number)
        leaving.set_role("draining")
        images = [await owner.wait_handed(number) for number in (1, 2)]
        assert [image is None for image in images] == [False, True]

    run(tmp_path, redis, test)


def test_an_agent_that_is_started_again_begins_with_the_role_that_was_asked_for(
    tmp_path: Path, redis: RedisServer
) -> None:
    async def test(made: Cluster) -> None:
        node = await made.node("n", "decode")
        node.set_role("draining")
        await until(lambda: node.agent.states.role is Role.DRAINING, "the role is taken")
        await node.kill()
        again = await made.node("n", "decode", engine=node.thread)
        assert again.agent.states.role is Role.DRAINING

    run(tmp_path, redis, test)


@pytest.mark.parametrize("is_replacement", [False, True])  # which is taken for one, but is none
def test_of_two_nodes_with_one_id_the_second_ends(tmp_path: Path, redis: RedisServer, is_replacement: bool) -> None:
    async def test(made: Cluster) -> None:
        first, other = await made.node("n"), await made.node("other")
        second = await made.node("n", engine=other.thread, config_is_replacement=is_replacement)
        await until(lambda: second.error is not None, "the second has ended")
        assert isinstance(second.error, ConfigError)
        assert str(second.error) == "--node-id: another live node has the id 'n'; ids must differ"
        assert first.error is None

    run(tmp_path, redis, test)


def test_a_node_waits_until_the_key_of_one_that_was_killed_has_expired(tmp_path: Path, redis: RedisServer) -> None:
    async def test(made: Cluster) -> None:
        node = await made.node("n")
        await node.kill()
        assert redis.execute("EXISTS", KEYS.node("n")) == 1
        again = await made.node("n", engine=node.thread)
        assert again.error is None

    run(tmp_path, redis, test)


def test_a_node_that_ends_deletes_its_key(tmp_path: Path, redis: RedisServer) -> None:
    async def test(made: Cluster) -> None:
        node = await made.node("n")
        assert redis.execute("EXISTS", KEYS.node("n")) == 1
        await node.stop()
        assert redis.execute("EXISTS", KEYS.node("n")) == 0

    run(tmp_path, redis, test)


def test_a_node_whose_engine_is_silent_leaves_until_it_responds(
    tmp_path: Path, redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(made: Cluster) -> None:
        node, owner = await made.node("n"), await made.owner()
        beat = Path(heartbeat_file(node.thread.address))
        beat.touch()
        os.utime(beat, ns=(0, time.monotonic_ns() - int((STALLED_S + 1) * 1e9)))
        await until(lambda: not redis.execute("EXISTS", KEYS.node("n")), "the key is gone")
        await owner.enqueue(1)
        await asyncio.sleep(0.3)
        assert owner.messages == []
        beat.unlink()
        await owner.wait_ended(1)

    run(tmp_path, redis, test)
    assert [line for line in caplog.messages if "the engine" in line] == [
        "the engine does not respond: the node leaves until it does",
        "the engine responds again: the node has returned",
    ]
