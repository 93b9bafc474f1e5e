# SPDX-License-Identifier: Apache-2.0
"""The agent process. It reads its configuration from stdin; its last line of output says why it exits with status 2."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence

import msgspec
import uvloop

from fastdeploy.config.env import read_env
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.faults import arm
from fastdeploy.core.process import die_with_parent, write_stacks_on_signal
from fastdeploy.ipc.child import agent_identity
from fastdeploy.kv_cache.arena_socket import arena_file
from fastdeploy.kv_cache.connectors.base import Connector, Host
from fastdeploy.kv_cache.connectors.ipc import IpcConnector, this_host
from fastdeploy.metrics.logs import set_up_engine_logging
from fastdeploy.scheduler.agent import Agent
from fastdeploy.scheduler.agent_config import AgentConfig
from fastdeploy.scheduler.agent_engine import AgentEngine
from fastdeploy.scheduler.keys import Keys
from fastdeploy.scheduler.messages import NodeRecord
from fastdeploy.scheduler.store import Store, StoreError

CHECK_PERIOD_S = 2.0  # between tries to reach Redis at the start
LEAVE_S = 1.0  # to delete the membership key

logger = logging.getLogger("fastdeploy.agent")


def main() -> int:
    """Run the agent until SIGTERM; return the exit status: 0, 1 the engine is lost, 2 the configuration is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args()
    die_with_parent(args.parent)
    write_stacks_on_signal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    env = read_env()
    set_up_engine_logging(env)
    arm(env.faults)
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=AgentConfig)
    try:
        return uvloop.run(_run(config, args.address))
    except ConfigError as error:
        print(msgspec.json.encode([error.field, error.message]).decode(), flush=True)
        return 2


async def _run(config: AgentConfig, address: str) -> int:
    """Run until SIGTERM, or until the engine's messages cannot be read."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    lost: list[str] = []

    def on_lost(reason: str) -> None:
        lost.append(reason)
        stop.set()

    engine = AgentEngine(address, agent_identity(os.getpid()), on_lost)
    working, stopped = asyncio.create_task(_work(config, engine, address)), asyncio.create_task(stop.wait())
    await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not working.done():
        working.cancel()
    try:
        await working
    except asyncio.CancelledError:
        pass
    finally:
        engine.close()
    return 1 if lost else 0


async def _work(config: AgentConfig, engine: AgentEngine, address: str) -> None:
    await _start(config, engine)
    agent, store = make_agent(config, engine, address)
    try:
        await agent.run()
    except asyncio.CancelledError:  # not after an error: the key may be that of another node with this id
        await _leave(agent)
        raise
    finally:
        await store.close()


async def _start(config: AgentConfig, engine: AgentEngine) -> None:
    """Wait until the model is loaded; raise ConfigError as soon as it is clear that Redis cannot be used."""
    checking, starting = asyncio.create_task(_check_server(config)), asyncio.create_task(engine.start())
    try:
        await asyncio.wait({checking, starting}, return_when=asyncio.FIRST_COMPLETED)
        if checking.done():
            checking.result()
        await starting
    finally:
        checking.cancel()
        starting.cancel()


def make_agent(config: AgentConfig, engine: AgentEngine, address: str) -> tuple[Agent, Store]:
    """Return the agent of an engine that is ready, and its connection to Redis."""
    assert engine.ready is not None
    cluster = engine.ready.description["cluster"]
    host = this_host()
    connectors = _make_connectors(config, engine, host, address)
    record = NodeRecord(
        0,
        0,
        engine.role or config.first_role,
        cluster["group"],
        host,
        cluster["layouts"],
        {connector.name: connector.endpoint() for connector in connectors},
        parts=cluster["parts"],
    )
    keys = Keys(config.cluster.scheduler_topic, cluster["group"])
    store = Store(config.cluster, keys)
    return Agent(config, engine, store, keys, connectors, record), store


async def _leave(agent: Agent) -> None:
    try:
        async with asyncio.timeout(LEAVE_S):
            await agent.leave()
    except TimeoutError:
        logger.warning("Redis does not answer: the key of this node expires by itself")


async def _check_server(config: AgentConfig) -> None:
    """Check Redis once it is there; the agent does it again when it begins to work."""
    store = Store(config.cluster, Keys(config.cluster.scheduler_topic, ""))
    try:
        while True:
            try:
                await store.check_server()
                return
            except StoreError:
                await asyncio.sleep(CHECK_PERIOD_S)
    finally:
        await store.close()


def _make_connectors(config: AgentConfig, engine: AgentEngine, host: Host, address: str) -> Sequence[Connector]:
    """Return the connectors to use, the preferred one first; none without a second stage."""
    if not config.cluster.is_split:
        return []
    return [IpcConnector(engine, host, arena_file(address)) for name in config.cluster.connectors if name == "ipc"]


if __name__ == "__main__":
    sys.exit(main())
