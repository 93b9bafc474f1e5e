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


def body(seed: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt_token_ids": [5 + seed, *range(20, 200)],
        "max_tokens": 400,  # eight seconds, so that no stream ends before the node does on a slow machine
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


async def end_while_streaming(asked: Node, ended: Node, decoding: list[Node]) -> tuple[list[Answer], int]:
    """Send SIGTERM to a node while streams run; return their answers and the node's exit status.

    Args:
        asked: gets the requests.
        decoding: the nodes on which they run.
    """
    async with make_client() as client:
        asking = [asyncio.create_task(ask(client, asked.url, body(seed))) for seed in range(NUM_STREAMS)]
        await asyncio.to_thread(until, lambda: num_running(*decoding) == NUM_STREAMS, "all streams run")
        await asyncio.to_thread(until, lambda: num_running(decoding[0]) > 0, "some run on the first one")
        ended.server.terminate()
        status = await asyncio.to_thread(ended.server.wait_end, 60)
        return await asyncio.gather(*asking), status


def check(answers: list[Answer], expected: list[Answer]) -> None:
    assert [answer.outcome() for answer in answers] == ["complete"] * NUM_STREAMS
    assert [answer.equals(right) for answer, right in zip(answers, expected, strict=True)] == [True] * NUM_STREAMS


@pytest.mark.parametrize("workers", [1, 2])
def test_the_requests_of_other_nodes_go_on_there_with_their_blocks(
    tmp_path: Path, expected: list[Answer], workers: int
) -> None:
    with Cluster(Shape("splitwise", ("prefill", "decode", "decode"), workers), tmp_path, step_s=0.02) as cluster:
        first, second, third = cluster.nodes
        answers, status = asyncio.run(end_while_streaming(first, second, [second, third]))
        assert status == 0
        check(answers, expected)
        # From the first node or from the second. A slow machine may let an offer end before it is taken: then the
        # request is computed again, and its text is the same.
        attempts = sum(node.metric("cluster_attempts_total") for node in (first, third))
        recomputed = sum(node.metric("kv_transfer_recomputed_tokens_total") for node in (first, third))
        assert third.metric("kv_transfer_seconds_count") >= (NUM_STREAMS if attempts == recomputed == 0 else 1)


def test_a_server_serves_its_own_clients_until_their_end(tmp_path: Path, expected: list[Answer]) -> None:
    with Cluster(Shape("splitwise", ("prefill", "decode"), 2), tmp_path, step_s=0.02) as cluster:
        first, second = cluster.nodes
        answers, status = asyncio.run(end_while_streaming(first, first, [second]))
        assert status == 0
        check(answers, expected)
