# SPDX-License-Identifier: Apache-2.0
"""The times of a request that runs on another node, with a real Redis."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from tests.cluster.redis_server import RedisServer
from tests.scheduler.scripted_node import Client, ScriptedNode, cluster_config, owner, request


def test_times_count_from_the_arrival_at_the_server_which_other_nodes_are_not_told(redis: RedisServer) -> None:
    config = cluster_config(redis)

    async def run() -> None:
        async with ScriptedNode(config, "n") as node, owner(config) as (scheduler, _):
            arrived_s = time.monotonic() - 1000
            client = Client(scheduler, replace(request(max_tokens=1), arrived_s=arrived_s))
            ticket = await node.claim()
            assert ticket.request.arrived_s is None
            await node.send(ticket, node.tokens(ticket, 0, 5, finish="length"))
            await client.end()
            metrics = client.deltas[-1].metrics
            assert metrics is not None and metrics.queue_s is not None and metrics.first_token_s is not None
            assert 1000 < metrics.queue_s < metrics.first_token_s <= metrics.finish_s

    asyncio.run(run())
