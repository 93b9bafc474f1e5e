# SPDX-License-Identifier: Apache-2.0
"""What a client sees when a node, one of its processes or Redis is lost (mock engines, real Redis)."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.bodies import Reference, draw_body
from tests.cluster.campaign import CAMPAIGN_FLAGS, judge, run_slice, single_node
from tests.cluster.clients import Answer, ask, make_client
from tests.cluster.cluster import Cluster, Shape
from tests.cluster.leftovers import check_clean, check_ended
from tests.cluster.plan import Asked, Event, Plan

POISON = 256  # a token that no drawn prompt holds
PAIR = Shape("splitwise", ("prefill", "decode"), workers=2)
FOUR = Shape("global", ("mixed",) * 4)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    with single_node(tmp_path_factory.mktemp("alone")) as alone:
        yield Reference(alone.urls[0])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(PAIR, tmp_path_factory.mktemp("pair"), CAMPAIGN_FLAGS, step_s=0.02) as cluster:
        yield cluster
        check_ended(cluster)


def bodies(count: int, name: str, **change: Any) -> list[dict[str, Any]]:
    """Return requests of 60 tokens, which take more than a second."""
    draw = random.Random(name)
    return [draw_body(draw, f"{name}-{number}") | {"max_tokens": 60, "n": 1} | change for number in range(count)]


def outcomes(
    cluster: Cluster,
    reference: Reference,
    name: str,
    events: list[Event],
    node: int | None = None,
    count: int = 12,
    num_tokens: int = 60,
) -> tuple[dict[str, int], list[Answer]]:
    """Run a slice whose requests begin at once, and check that nothing is wrong and nothing is left.

    Args:
        node: index of the node that all requests ask; None for each in turn.
    """
    wanted = bodies(count, name, max_tokens=num_tokens)
    where = [number % len(cluster.nodes) if node is None else node for number in range(count)]
    plan = Plan(0, [Asked(0.0, at, body) for at, body in zip(where, wanted, strict=True)], events)
    expected = reference.answers(wanted)
    answers, faults = asyncio.run(run_slice(cluster, plan))
    judged = [judge(answer, right, faults) for answer, right in zip(answers, expected, strict=True)]
    assert [problem for _, problem in judged if problem] == [] and faults.problems == []
    cluster.heal()
    check_clean(cluster)
    return Counter(word for word, _ in judged), answers


def total(cluster: Cluster, name: str, labels: str = "") -> float:
    return sum(node.metric(name, labels) for node in cluster.nodes)


def test_a_request_goes_over_two_nodes_through_redis(pair: Cluster, reference: Reference) -> None:
    assert outcomes(pair, reference, "calm", [])[0] == {"right": 12}
    assert total(pair, "cluster_requests_total", 'path="redis"') >= 12
    generated = [node.metric("generation_tokens_total") for node in pair.nodes]
    assert generated[0] == 12 and generated[1] == 12 * 59


def test_a_killed_decode_node_is_replaced_by_the_prefill_node(pair: Cluster, reference: Reference) -> None:
    events = [Event(0.7, "kill", 1, "all", 0.1)]
    assert outcomes(pair, reference, "decode lost", events, node=0)[0] == {"right": 12}
    assert pair.nodes[0].metric("cluster_attempts_total", 'reason="node_lost"') > 0


def test_late_results_of_a_woken_node_are_ignored(pair: Cluster, reference: Reference) -> None:
    events = [Event(0.7, "stop", 1, "all", 2.0)]
    assert outcomes(pair, reference, "decode woken", events, node=0)[0] == {"right": 12}


def test_clients_of_a_woken_owner_get_their_answers(pair: Cluster, reference: Reference) -> None:
    events = [Event(0.7, "stop", 0, "api", 2.0)]
    assert outcomes(pair, reference, "owner woken", events, node=0)[0] == {"right": 12}


def test_a_killed_api_process_takes_only_its_own_requests_with_it(pair: Cluster, reference: Reference) -> None:
    events = [Event(0.7, "kill", 0, "api")]
    counts, answers = outcomes(pair, reference, "owner lost", events, count=24, num_tokens=200)
    assert counts["broken"] > 0 and counts["right"] >= 12 and counts["error"] == 0
    assert {answer.node for answer in answers if answer.broken} == {0}
    assert total(pair, "cluster_attempts_total", 'reason="owner_lost"') > 0


def test_streams_end_though_the_engine_of_the_node_asked_is_dead(pair: Cluster, reference: Reference) -> None:
    events = [Event(0.7, "kill", 0, "engine", 0.1)]
    assert outcomes(pair, reference, "engine lost", events, node=0)[0] == {"right": 12}


def test_a_killed_agent_is_started_again(pair: Cluster, reference: Reference) -> None:
    events = [Event(0.5, "kill", 0, "agent"), Event(0.8, "kill", 1, "agent")]
    assert outcomes(pair, reference, "agents lost", events)[0] == {"right": 12}


NIGHTLY = [pytest.param(action, marks=pytest.mark.nightly) for action in ("redis_kill", "redis_stop")]


@pytest.mark.parametrize("action", ["flush", "failover", *NIGHTLY])
def test_a_redis_that_loses_its_data_costs_no_stream(pair: Cluster, reference: Reference, action: str) -> None:
    assert outcomes(pair, reference, action, [Event(0.6, action, length_s=0.4)])[0] == {"right": 12}


def test_a_prompt_that_kills_every_engine_ends_alone(tmp_path: Path, reference: Reference) -> None:
    with Cluster(FOUR, tmp_path, CAMPAIGN_FLAGS, step_s=0.02, die_at_token=POISON) as cluster:
        others = bodies(31, "beside poison")
        expected = reference.answers(others)
        poison = {**others[0], "request_id": "poison", "prompt_token_ids": [7, POISON, 9]}
        answers = asyncio.run(ask_beside(cluster, poison, others))
        error = answers[0].error
        assert error is not None and error["code"] == "attempts_failed" and answers[0].status == 503
        ended = [node for node in cluster.nodes if not node.pids("engine")]
        assert len(ended) == 3
        assert [node.name for node in ended if node.name not in error["message"]] == [], error["message"]
        wrong = [answer.outcome() for answer, right in zip(answers[1:], expected) if not answer.equals(right)]
        assert wrong == []
        assert [node.server.wait_end() for node in ended] == [1, 1, 1]


async def ask_beside(cluster: Cluster, poison: dict[str, Any], others: list[dict[str, Any]]) -> list[Answer]:
    """Ask all nodes for these answers in turn, the poison a moment later; its answer is the first."""
    async with make_client() as client:
        urls = cluster.urls

        async def ask_later() -> Answer:
            await asyncio.sleep(0.3)
            return await ask(client, urls[0], poison)

        streams = [ask(client, urls[number % len(urls)], body) for number, body in enumerate(others)]
        return list(await asyncio.gather(ask_later(), *streams))


def test_requests_in_flight_end_though_redis_is_dead_for_good(tmp_path: Path, reference: Reference) -> None:
    with Cluster(PAIR, tmp_path, CAMPAIGN_FLAGS, step_s=0.02) as cluster:
        wanted = bodies(16, "no redis")
        expected = reference.answers(wanted)
        plan = Plan(0, [Asked(0.0, i % 2, body) for i, body in enumerate(wanted)], [Event(0.6, "redis_dead")])
        answers, _ = asyncio.run(run_slice(cluster, plan))
        assert [answer.outcome() for answer, right in zip(answers, expected) if not answer.equals(right)] == []
        for node in cluster.nodes:
            assert node.health()["cluster"] == "degraded: redis" and node.metric("cluster_redis_up") == 0
        later = asyncio.run(run_slice(cluster, Plan(0, plan.requests[:4], [])))[0]
        assert all(answer.equals(right) for answer, right in zip(later, expected))
        check_ended(cluster)


def test_two_topics_on_one_redis_never_meet(pair: Cluster, tmp_path: Path, reference: Reference) -> None:
    alone = Shape("splitwise", ("prefill",))
    with Cluster(alone, tmp_path, CAMPAIGN_FLAGS, topic="other", redis=pair.redis) as other:
        before = [node.metric("generation_tokens_total") for node in pair.nodes]
        assert outcomes(other, reference, "topic", [])[0] == {"right": 12}
        assert other.nodes[0].health()["cluster"] == "alone"
        assert [node.metric("generation_tokens_total") for node in pair.nodes] == before
        assert other.nodes[0].metric("generation_tokens_total") == 12 * 60
        check_ended(other)
