# SPDX-License-Identifier: Apache-2.0
"""All nodes of a cluster are restarted one after the other under load, and no request fails."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.ipc.child import DEFAULT_FACTORY
from tests.cluster.bodies import MODEL, Reference
from tests.cluster.campaign import CAMPAIGN_FLAGS, single_node
from tests.cluster.clients import Answer, ask_any, make_client
from tests.cluster.cluster import Cluster, Node, Shape
from tests.cluster.leftovers import check_clean, check_ended

SHAPE = Shape("splitwise", ("prefill", "prefill", "decode", "decode"))
NUM_CLIENTS = 16
PROMPT_LENGTH, OUTPUT_LENGTH = 300, 120


def body(number: int) -> dict[str, Any]:
    draw = random.Random(f"rolling {number}")
    prompt = [draw.randint(5, 255) for _ in range(PROMPT_LENGTH)]
    lengths = {"max_tokens": OUTPUT_LENGTH, "ignore_eos": True, "temperature": 1}
    return {"model": MODEL, "prompt_token_ids": prompt, "seed": number, "request_id": f"rolling-{number}", **lengths}


class Load:
    """Clients that ask one request after the other, and retry what is refused.

    Attributes:
        answers: by number of the request.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.answers: dict[int, Answer] = {}
        self.is_over = False
        self._cluster = cluster
        self._num_asked = 0

    async def run(self) -> None:
        """Ask until `is_over`."""
        async with make_client() as client:

            async def keep_asking() -> None:
                while not self.is_over:
                    number, self._num_asked = self._num_asked, self._num_asked + 1
                    node = number % len(self._cluster.nodes)
                    answer = Answer(broken="not asked")
                    while answer.broken and answer.status == 0:  # a server that ends resets what it has not accepted
                        answer = await ask_any(client, lambda: self._cluster.urls, node, body(number))
                    self.answers[number] = answer

            await asyncio.gather(*(keep_asking() for _ in range(NUM_CLIENTS)))


async def restart_all(cluster: Cluster, load: Load) -> tuple[list[int], float, float]:
    """Restart each node in turn under load.

    Returns:
        The exit statuses, the number of other nodes' requests that the nodes had, and of tokens computed again.
    """
    asking = asyncio.create_task(load.run())
    statuses, num_foreign, num_recomputed = [], 0.0, 0.0
    for node in cluster.nodes:
        await asyncio.sleep(1.5)
        foreign, recomputed = await asyncio.to_thread(_read_counters, node)
        num_foreign, num_recomputed = num_foreign + foreign, num_recomputed + recomputed
        node.server.terminate()
        statuses.append(await asyncio.to_thread(node.server.wait_end, 90))
        node.start()
        await asyncio.to_thread(cluster.wait_ready)
    load.is_over = True
    await asking
    num_recomputed += sum(node.metric("kv_transfer_recomputed_tokens_total") for node in cluster.nodes)
    return statuses, num_foreign, num_recomputed


def _read_counters(node: Node) -> tuple[float, float]:
    return node.load()["num_foreign_requests"], node.metric("kv_transfer_recomputed_tokens_total")


def check_rolling_restart(cluster: Cluster, reference: Reference) -> None:
    load = Load(cluster)
    statuses, num_foreign, num_recomputed = asyncio.run(restart_all(cluster, load))
    assert statuses == [0, 0, 0, 0]
    expected = reference.answers([body(number) for number in load.answers])
    failed = [answer.outcome() for answer, right in zip(load.answers.values(), expected) if not answer.equals(right)]
    assert failed == []
    assert num_foreign > 0
    assert num_recomputed <= 0.05 * num_foreign * PROMPT_LENGTH
    check_clean(cluster)
    check_ended(cluster)


@pytest.mark.nightly
def test_a_rolling_restart_fails_no_request(tmp_path: Path) -> None:
    with single_node(tmp_path) as alone, Cluster(SHAPE, tmp_path, CAMPAIGN_FLAGS, step_s=0.01) as cluster:
        check_rolling_restart(cluster, Reference(alone.urls[0]))


@pytest.mark.nightly
def test_a_rolling_restart_of_real_engines_fails_no_request(tmp_path: Path) -> None:
    real = {"factory": DEFAULT_FACTORY, "model": "demo"}
    with single_node(tmp_path, is_real=True) as alone, Cluster(SHAPE, tmp_path, CAMPAIGN_FLAGS, **real) as cluster:
        check_rolling_restart(cluster, Reference(alone.urls[0]))
