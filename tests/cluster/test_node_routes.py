# SPDX-License-Identifier: Apache-2.0
"""Two nodes on one Redis: /v1/role, /health, /v1/abort_requests, metrics and log lines, as operators use them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.cluster.bodies import MODEL
from tests.cluster.cluster import Cluster, Node, Shape, until
from tests.entrypoints.response_check import check_httpx_response

STEP_S = 0.02
LONG: dict[str, Any] = {
    "model": MODEL,
    "prompt_token_ids": [*range(5, 75)],
    "max_tokens": 150,
    "ignore_eos": True,
    "seed": 3,
    "stream": True,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("nodes")
    with Cluster(Shape("splitwise", ("mixed", "mixed")), folder, step_s=STEP_S) as running:
        yield running


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[tuple[Node, Node]]:
    """The two nodes, which are mixed again after the test."""
    first, second = cluster.nodes
    yield first, second
    for node in (first, second):
        assert set_role(node, "mixed").status_code == 200
    for node in (first, second):
        until(lambda node=node: node.health()["cluster"] == "ok", "both nodes are mixed", why=node.health)


def set_role(node: Node, role: str, **headers: str) -> httpx.Response:
    response = httpx.post(node.url + "/v1/role", json={"role": role}, headers=headers, timeout=30)
    check_httpx_response(response)
    return response


def abort(node: Node, request_id: str) -> dict[str, Any]:
    response = httpx.post(node.url + "/v1/abort_requests", json={"req_ids": [request_id]}, timeout=30)
    check_httpx_response(response)
    return dict(response.json())


def load(node: Node) -> dict[str, Any]:
    return dict(httpx.get(node.url + "/load", timeout=30).json())


class Stream:
    """A streamed completion, of which a test reads a part."""

    def __init__(self, response: httpx.Response) -> None:
        self._events = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.metrics: dict[str, Any] = {}

    def read(self, num_tokens: int = 10**9) -> Stream:
        """Read until so many tokens are there, or to the end."""
        for event in self._events:
            if event == "[DONE]":
                return self
            (choice,) = json.loads(event)["choices"]
            self.token_ids += choice["completion_token_ids"] or []
            self.finish_reason = choice["finish_reason"]
            self.metrics = choice.get("metrics") or {}
            if len(self.token_ids) >= num_tokens:
                return self
        return self


@contextlib.contextmanager
def stream(node: Node, **fields: Any) -> Iterator[Stream]:
    with httpx.stream("POST", node.url + "/v1/completions", json={**LONG, **fields}, timeout=60) as response:
        assert response.status_code == 200
        yield Stream(response)


def test_health_names_node_role_and_cluster(nodes: tuple[Node, Node]) -> None:
    first, second = nodes[0].health(), nodes[1].health()
    assert set(first) == {"status", "node", "role", "cluster"}
    assert (first["status"], first["role"], first["cluster"]) == ("ready", "mixed", "ok")
    assert first["node"] != second["node"] and len(first["node"]) == 8


def test_a_role_is_changed_on_one_node_and_seen_by_the_other(nodes: tuple[Node, Node]) -> None:
    first, second = nodes
    assert set_role(second, "decode").json() == {"node": second.health()["node"], "role": "decode"}
    assert (first.health()["role"], second.health()["role"]) == ("mixed", "decode")
    until(lambda: first.metric("cluster_nodes", 'role="decode",state="live"') == 1, "the other node sees the role")
    assert first.metric("cluster_nodes", 'role="mixed",state="live"') == 1
    assert set_role(second, "boss").status_code == 400
    assert second.health()["role"] == "decode", "a refused role changes nothing"


def test_a_role_asked_for_through_a_proxy_is_refused(nodes: tuple[Node, Node]) -> None:
    response = set_role(nodes[0], "draining", **{"X-Forwarded-For": "10.1.2.3"})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "admin_required")
    assert nodes[0].health()["role"] == "mixed"


def test_a_draining_node_s_clients_are_served_by_the_other_one(nodes: tuple[Node, Node]) -> None:
    first, second = nodes
    with stream(first, max_tokens=30) as whole:
        expected = whole.read().token_ids
    assert len(expected) == 30
    assert set_role(first, "draining").status_code == 200
    until(lambda: second.health()["cluster"] == "alone", "the other node sees nobody who takes requests")
    assert first.health()["cluster"] == "ok"
    with stream(first, max_tokens=30, collect_metrics=True) as moved:
        found = moved.read()
    assert found.token_ids == expected
    assert (found.metrics["node"], found.metrics["path"]) == (second.health()["node"], "redis")
    assert found.metrics["num_attempts"] == 1
    assert first.metric("cluster_requests_total", 'path="redis"') >= 1
    assert first.metric("cluster_queue_wait_seconds_count") >= 1
    assert f"node {second.health()['node']}, path redis, attempts 1" in first.server.stderr


def test_a_node_that_begins_to_drain_hands_a_running_request_over(nodes: tuple[Node, Node]) -> None:
    first, second = nodes
    with stream(first, max_tokens=110) as whole:
        expected = whole.read().token_ids
    set_role(first, "draining")
    with stream(first, max_tokens=110, collect_metrics=True) as moved:
        moved.read(5)
        until(lambda: load(second)["num_foreign_requests"] == 1, "the other node runs it")
        assert set_role(first, "mixed").status_code == 200
        until(lambda: second.metric("cluster_nodes", 'role="mixed",state="live"') == 2, "the node is back")
        assert set_role(second, "draining").status_code == 200
        until(lambda: load(second)["num_foreign_requests"] == 0, "the request has left the draining node")
        found = moved.read()
    assert (found.token_ids, found.finish_reason) == (expected, "length")
    assert found.metrics["node"] == first.health()["node"]
    assert found.metrics["num_attempts"] == 1, "a hand-over is no loss"
    until(lambda: load(second)["num_leased_slots"] == 0, "its image is released")


def test_a_request_is_aborted_through_any_node(nodes: tuple[Node, Node]) -> None:
    first, second = nodes
    set_role(first, "draining")
    for asked in (second, first):
        with stream(first, request_id="mine") as running:
            running.read(5)
            assert abort(asked, "other") == {"aborted": [], "not_found": ["other"]}
            answer = abort(asked, "mine")
            rest = running.read()
        assert answer["not_found"] == []
        assert [one["request_id"] for one in answer["aborted"]] == ["cmpl-mine"]
        assert rest.finish_reason == "abort"
        assert 5 <= answer["aborted"][0]["num_generated_tokens"] == len(rest.token_ids) < 150
        until(lambda: load(second)["num_running"] == 0, "the node that ran it has forgotten it")


def test_without_redis_a_node_is_degraded_and_serves(cluster: Cluster, nodes: tuple[Node, Node]) -> None:
    first, _ = nodes
    assert cluster.redis is not None
    cluster.redis.server.kill()
    until(lambda: first.health()["cluster"] == "degraded: redis", "the loss of Redis is noticed", why=first.health)
    assert httpx.get(first.url + "/health").status_code == 200
    assert first.metric("cluster_redis_up") == 0, "/metrics needs no Redis"
    with stream(first, max_tokens=5, collect_metrics=True) as alone:
        found = alone.read()
    assert (len(found.token_ids), found.metrics["path"]) == (5, "local")
    assert found.metrics["node"] == first.health()["node"]
    assert set_role(first, "decode").status_code == 200, "roles can be changed meanwhile"
    cluster.redis.server.start()
    for node in nodes:
        until(lambda node=node: node.health()["cluster"] == "ok", "Redis is back", why=node.health)
    until(lambda: first.metric("cluster_redis_up") == 1, "the metric says so")


def test_a_node_whose_agent_is_killed_is_degraded_until_it_has_another_one(nodes: tuple[Node, Node]) -> None:
    _, second = nodes
    assert set_role(second, "decode").status_code == 200
    second.kill("agent")
    until(lambda: second.health()["cluster"] == "degraded: agent", "the loss of the agent is noticed")
    with stream(second, max_tokens=5) as running:
        assert len(running.read().token_ids) == 5
    until(lambda: second.health()["cluster"] == "ok", "there is another agent", why=second.health)
    assert second.health()["role"] == "decode", "the new agent begins with the role of the former one"


def test_a_node_whose_peer_is_killed_goes_on_with_its_streams_alone(cluster: Cluster) -> None:
    first, second = cluster.nodes
    with stream(first, max_tokens=60) as whole:
        expected = whole.read().token_ids
    set_role(first, "draining")
    with stream(first, max_tokens=60, collect_metrics=True) as running:
        running.read(5)
        second.kill()
        found = running.read()
    assert (found.token_ids, found.finish_reason) == (expected, "length")
    assert found.metrics["node"] == first.health()["node"]
    assert (found.metrics["path"], found.metrics["num_attempts"]) == ("taken_over", 2)
    assert first.metric("cluster_attempts_total", 'reason="node_lost"') == 1
    assert first.metric("cluster_requests_total", 'path="taken_over"') == 1
    assert (first.health()["status"], first.health()["cluster"]) == ("ready", "alone")
