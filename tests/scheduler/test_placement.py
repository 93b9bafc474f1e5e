# SPDX-License-Identifier: Apache-2.0
"""Where requests begin."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from fastdeploy.core.stats import EngineStats
from fastdeploy.kv_cache.hashes import hash_blocks
from fastdeploy.scheduler.members import Members
from fastdeploy.scheduler.messages import Host, NodeLoad, NodeRecord
from fastdeploy.scheduler.placement import local_room
from fastdeploy.scheduler.request_states import Role, Stage
from tests.cluster.redis_server import RedisServer
from tests.scheduler.scripted_node import Client, ScriptedNode, cluster_config, owner, request, until


def test_a_request_goes_to_the_node_that_has_its_prompt_cached_unless_that_is_overloaded(redis: RedisServer) -> None:
    config = cluster_config(redis)
    prompt = request(num_prompt=40, cache_salt="s")
    hashes = hash_blocks("g", "s", prompt.prompt_token_ids, 16)

    async def run() -> None:
        async with ScriptedNode(config, "a") as first, ScriptedNode(config, "b") as second:
            await first.store.note_prefixes("a", hashes[:1])
            await first.store.note_prefixes("b", hashes[1:])
            async with owner(config) as (scheduler, _):
                client = Client(scheduler, prompt)
                ticket = await second.claim()
                assert second.entry.stream.endswith(":decode:b")
                await client.leave()
                second.load = NodeLoad(num_running=9)
                await until(lambda: scheduler.link.members.is_overloaded("b"), "b is overloaded")
                client = Client(scheduler, prompt)
                ticket = await first.claim()
                assert (first.entry.stream.endswith(":decode:a"), ticket.number) == (True, 1)
                await client.leave()
                await first.store.note_prefixes("gone", hashes)
                client = Client(scheduler, prompt)
                await first.claim()
                assert first.entry.stream.endswith(":decode")
                await client.leave()

    asyncio.run(run())


def test_what_a_decode_node_has_cached_counts_for_the_stage(redis: RedisServer) -> None:
    config = cluster_config(redis, scheduler_name="splitwise")

    async def run() -> None:
        async with ScriptedNode(config, "p", Role.PREFILL) as prefill, ScriptedNode(config, "d", Role.DECODE) as decode:
            for name, salt, stage in (("p", "a", Stage.PREFILL), ("d", "b", Stage.DECODE), ("", "c", Stage.PREFILL)):
                prompt = request(num_prompt=40, cache_salt=salt)
                if name:
                    await decode.store.note_prefixes(name, hash_blocks("g", salt, prompt.prompt_token_ids, 16))
                async with owner(config) as (scheduler, _):
                    client = Client(scheduler, prompt)
                    ticket = await (decode if stage is Stage.DECODE else prefill).claim(stage)
                    assert (ticket.stage, ticket.request.cache_salt) == (stage, salt)
                    await client.leave()

    asyncio.run(run())


def test_a_node_is_overloaded_beyond_a_quarter_and_one_more_than_the_mean_of_its_role() -> None:
    members = Members("own")

    def overloaded(**nodes: tuple[Role, int]) -> list[str]:
        host = Host("boot", "net", 0)
        members.update(
            {
                name: NodeRecord(1, 1, role, "g", host, load=NodeLoad(num_running=number - 1, num_waiting=1))
                for name, (role, number) in nodes.items()
            }
        )
        return [name for name in nodes if members.is_overloaded(name)]

    mixed = Role.MIXED
    assert overloaded(a=(mixed, 5), b=(mixed, 3)) == []
    assert overloaded(a=(mixed, 7), b=(mixed, 1)) == ["a"]
    assert overloaded(a=(mixed, 2), b=(mixed, 1)) == []
    assert overloaded(p=(Role.PREFILL, 1), d=(Role.DECODE, 30)) == []


def test_the_engine_has_room_for_what_neither_its_counters_nor_our_own_legs_take() -> None:
    description = {"max_num_seqs": 8}
    busy = EngineStats(num_running=3, num_waiting=2, num_blocks=100, num_free_blocks=50)
    assert [local_room(busy, description, num_legs) for num_legs in (0, 6, 9)] == [3, 2, 0]
    assert local_room(replace(busy, num_free_blocks=8), description, 0) == 0
    assert local_room(replace(busy, num_free_blocks=9), description, 0) == 3
