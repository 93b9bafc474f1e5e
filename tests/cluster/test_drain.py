# SPDX-License-Identifier: Apache-2.0
"""Servers that get SIGTERM hand over what runs there, serve their own clients, and leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.bodies import MODEL, Reference
from tests.cluster.campaign import single_node
from tests.cluster.clients import Answer, ask, make_client
from tests.cluster.cluster import Cluster, Node, Shape, until

NUM_STREAMS = 6
PATIENT = ("--scheduler-expire-period", "10000")  # a node whose heartbeat is late on a busy machine still gets work
HELD: dict[str, Any] = {"step_s": 0.02, "hold": True}


def body(seed: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt_token_ids": [5 + seed, *range(20, 200)],
        "max_tokens": 200,
        "ignore_eos": True,
        "seed": seed,
        "request_id": f"r{seed}",
    }


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Answer]]:
    with single_node(tmp_path_factory.mktemp("alone")) as alone:
        yield Reference(alone.urls[0]).answers([body(seed) for seed in range(NUM_STREAMS)])


def num_running(*nodes: Node) -> float:
    return sum(node.metric("num_requests_running") for node in nodes)


async def end_while_streaming(
    cluster: Cluster, asked: Node, ended: Node, decoding: list[Node]
) -> tuple[list[Answer], int]:
    """Send SIGTERM to a node while streams run; return their answers and the node's exit status.

    No stream gets beyond its first tokens before the node has got the signal, or has ended if other nodes serve the
    streams.

    Args:
        asked: gets the requests.
        decoding: the nodes on which they run.
    """
    hold = cluster.model / "hold"
    hold.touch()

    def is_running() -> bool:
        return num_running(*decoding) == NUM_STREAMS and num_running(decoding[0]) > 0

    def counts() -> list[float]:
        return [num_running(node) for node in cluster.nodes]

    async with make_client() as client:
        asking = [asyncio.create_task(ask(client, asked.url, body(seed))) for seed in range(NUM_STREAMS)]
        await asyncio.to_thread(until, is_running, "all streams run, and some of them on the first node", why=counts)
        ended.server.terminate()
        if ended is asked:
            hold.unlink()  # it ends when its clients have their texts
        status = await asyncio.to_thread(ended.server.wait_end, 60)
        hold.unlink(missing_ok=True)
        return await asyncio.gather(*asking), status


def check(answers: list[Answer], expected: list[Answer]) -> None:
    assert [answer.outcome() for answer in answers] == ["complete"] * NUM_STREAMS
    assert [answer.equals(right) for answer, right in zip(answers, expected, strict=True)] == [True] * NUM_STREAMS


@pytest.mark.parametrize("workers", [1, 2])
def test_the_requests_of_other_nodes_go_on_there_with_their_blocks(
    tmp_path: Path, expected: list[Answer], workers: int
) -> None:
    with Cluster(Shape("splitwise", ("prefill", "decode", "decode"), workers), tmp_path, PATIENT, **HELD) as cluster:
        first, second, third = cluster.nodes
        answers, status = asyncio.run(end_while_streaming(cluster, first, second, [second, third]))
        assert status == 0
        check(answers, expected)
        # From the first node or from the second. A slow machine may let an offer end before it is taken: then the
        # request is computed again, and its text is the same.
        attempts = sum(node.metric("cluster_attempts_total") for node in (first, third))
        recomputed = sum(node.metric("kv_transfer_recomputed_tokens_total") for node in (first, third))
        assert third.metric("kv_transfer_seconds_count") >= (NUM_STREAMS if attempts == recomputed == 0 else 1)


def test_a_server_serves_its_own_clients_until_their_end(tmp_path: Path, expected: list[Answer]) -> None:
    with Cluster(Shape("splitwise", ("prefill", "decode"), 2), tmp_path, PATIENT, **HELD) as cluster:
        first, second = cluster.nodes
        answers, status = asyncio.run(end_while_streaming(cluster, first, first, [second]))
        assert status == 0
        check(answers, expected)
