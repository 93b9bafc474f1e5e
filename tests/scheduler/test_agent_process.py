# SPDX-License-Identifier: Apache-2.0
"""The agent as a process of a server: it is refused, killed, started again and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from fastdeploy.config.cluster_config import ClusterConfig
from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.ipc.client import EngineClient
from fastdeploy.scheduler.agent_child import AgentChild
from fastdeploy.scheduler.agent_config import AgentConfig
from tests.cluster.redis_server import RedisServer
from tests.mock_engine import FACTORY, save_mock_model
from tests.scheduler.agent_nodes import KEYS, ScriptedOwner, until

EXPIRE_MS = 60_000  # a key that is gone was deleted


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture
def redis(server: RedisServer) -> RedisServer:
    """Return a Redis without keys of nodes that the tests before have killed."""
    server.execute("FLUSHALL")
    return server


@contextlib.asynccontextmanager
async def serving(
    folder: Path, redis: RedisServer, password: str = ""
) -> AsyncIterator[tuple[EngineClient, AgentChild]]:
    """Start an engine and its agent, without waiting for the agent."""
    config = EngineConfig(model=str(save_mock_model(folder)), max_model_len=400, seed=7, hands_over=True)
    client = EngineClient(config, factory=FACTORY)
    cluster = ClusterConfig(
        scheduler_name="splitwise",
        scheduler_port=redis.port,
        scheduler_password=password,
        node_id="n",
        scheduler_sync_period=100,
        scheduler_expire_period=EXPIRE_MS,
    )
    agent = AgentChild(AgentConfig(cluster), client, None, json_log=False)
    try:
        await agent.start()
        await client.start()
        yield client, agent
    finally:
        await agent.stop()
        await client.close()


def agent_pid(agent: AgentChild) -> int:
    """Return the agent's process, 0 while it is started."""
    assert agent._child is not None
    return 0 if agent._child._process is None else agent._child._process.pid


def is_member(redis: RedisServer) -> bool:
    return bool(redis.execute("EXISTS", KEYS.node("n")))


def test_a_wrong_password_is_refused_in_one_line(tmp_path: Path) -> None:
    async def test() -> None:
        with RedisServer(tmp_path / "redis", requirepass="correct") as redis:
            async with serving(tmp_path, redis, password="hunter2") as (_, agent):
                error = await asyncio.wait_for(agent.refused, 30)
                assert error.field == "--scheduler-password"
                assert "hunter2" not in str(error) and "\n" not in str(error)
                await agent.wait_for_redis()  # it does not wait for what will not come

    asyncio.run(test())


def test_an_agent_that_dies_is_started_again_with_a_line_that_has_its_process_id(
    tmp_path: Path, redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with serving(tmp_path, redis) as (client, agent):
            await agent.wait_for_redis()
            os.kill(agent_pid(agent), signal.SIGKILL)
            await until(lambda: client.stats.node is None, "the engine has forgotten it")
            await agent.wait_for_redis()
            assert f"the agent is started again as process {agent_pid(agent)}" in caplog.messages
            owner = ScriptedOwner(redis, "other", 200)
            await owner.start()
            await owner.enqueue(1)
            assert await owner.wait_claimed(1) == "n"
            await owner.stop()

    asyncio.run(test())


def test_a_node_whose_agent_dies_again_and_again_serves_alone(
    tmp_path: Path, redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with serving(tmp_path, redis) as (client, agent):
            killed = {0}
            with caplog.at_level(logging.ERROR, "fastdeploy.server"):
                while "serves alone" not in caplog.text:
                    if agent_pid(agent) not in killed:
                        killed.add(agent_pid(agent))
                        os.kill(agent_pid(agent), signal.SIGKILL)
                    await asyncio.sleep(0.01)
            assert len(killed) == 1 + 3
            assert client.dead_error is None

    asyncio.run(test())


def test_the_key_of_the_node_is_deleted_when_the_server_ends(tmp_path: Path, redis: RedisServer) -> None:
    async def test() -> None:
        async with serving(tmp_path, redis) as (_, agent):
            await agent.wait_for_redis()
            assert is_member(redis)
            await agent.drain()  # nobody waits for this node
            await agent.stop()
            assert not is_member(redis)

    asyncio.run(test())


def test_the_key_of_the_node_is_deleted_when_the_engine_dies(tmp_path: Path, redis: RedisServer) -> None:
    async def test() -> None:
        async with serving(tmp_path, redis) as (client, agent):
            await agent.wait_for_redis()
            assert client._child._process is not None
            os.kill(client._child._process.pid, signal.SIGKILL)
            await until(lambda: not is_member(redis), "the key is gone")

    asyncio.run(test())


def test_an_agent_waits_for_redis(tmp_path: Path) -> None:
    async def test() -> None:
        redis = RedisServer(tmp_path / "redis")
        async with serving(tmp_path, redis) as (client, agent):
            await until(lambda: client.stats.node is not None, "the agent reports")
            assert client.stats.node is not None and not client.stats.node.is_redis_up
            with redis:
                await agent.wait_for_redis()
                assert is_member(redis)

    asyncio.run(test())
