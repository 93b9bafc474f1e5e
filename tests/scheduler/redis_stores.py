# SPDX-License-Identifier: Apache-2.0
"""What the tests of the store share: stores for a server, and small tickets, records and messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fastdeploy.config.cluster_config import ClusterConfig
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.scheduler.keys import Keys
from fastdeploy.scheduler.messages import Host, NodeRecord
from fastdeploy.scheduler.request_states import Claimed, Role, Stage, Ticket
from fastdeploy.scheduler.store import Store
from tests.cluster.redis_server import RedisServer

KEYS = Keys("topic", "group")
OWNER = "n1.0.a"
INBOX = KEYS.owner_inbox(OWNER)
DECODE = [Stage.DECODE]
CLAIMED = Claimed(1, 1, "n1", 1, 1)


def config(url: str, **keys: Any) -> ClusterConfig:
    return ClusterConfig(**{"scheduler_name": "splitwise", "scheduler_url": url, **keys})


def run_with(server: RedisServer, scenario: Callable[[Store], Coroutine[Any, Any, None]], **keys: Any) -> None:
    """Run a scenario with a store for the topic "topic" and the group "group"."""
    asyncio.run(_run(config(keys.pop("url", server.address), **keys), scenario))


async def _run(config: ClusterConfig, scenario: Callable[[Store], Coroutine[Any, Any, None]]) -> None:
    async with opened(config) as store:
        await scenario(store)


@asynccontextmanager
async def opened(config: ClusterConfig, keys: Keys = KEYS) -> AsyncIterator[Store]:
    store = Store(config, keys)
    try:
        yield store
    finally:
        await store.close()


def ticket(number: int, owner: str = OWNER, stage: Stage = Stage.DECODE, prompt: int = 3) -> Ticket:
    request = GenerationRequest(f"r{number}", list(range(1, 1 + prompt)), SamplingParams())
    return Ticket(owner, number, 1, stage, request, [[]])


def record(count: int = 1, group: str = "group") -> NodeRecord:
    return NodeRecord(count, 7, Role.MIXED, group, Host("boot", "net", 1000))
