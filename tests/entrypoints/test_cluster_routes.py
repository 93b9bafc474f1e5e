# SPDX-License-Identifier: Apache-2.0
"""POST /v1/role, and what /health and /load say of a node that works with others; the engine and agent are fakes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec
import pytest

from fastdeploy.config.api_keys import ApiKey
from fastdeploy.config.cluster_config import ClusterConfig
from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.generation_defaults import GenerationDefaults
from fastdeploy.config.server_config import ServerConfig
from fastdeploy.core.errors import (
    AttemptsFailedError,
    EngineDeadError,
    FastDeployError,
    NoProgressError,
    QueueFullError,
    QueueTimeoutError,
)
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.stats import EngineStats, NodeStats
from fastdeploy.entrypoints.openai import routes_cluster
from fastdeploy.entrypoints.openai.app import make_app
from fastdeploy.entrypoints.openai.examples import BODIES
from fastdeploy.entrypoints.openai.routes_cluster import RoleResponse
from fastdeploy.entrypoints.openai.server import ApiServer
from fastdeploy.ipc.messages import Ready
from tests.detokenize.tokenizers_for_tests import make_tokenizer
from tests.entrypoints.response_check import check_httpx_response

SPLIT = ClusterConfig(scheduler_name="splitwise", splitwise_role="decode", node_id="a1")
GLOBAL = ClusterConfig(scheduler_name="global", node_id="a1")
TOKENIZER = make_tokenizer("byte_level")
HERE, ELSEWHERE = "127.0.0.1", "10.1.2.3"
ADMIN = ApiKey("operations", "key-of-admin", admin=True)
USER = ApiKey("research", "key-of-user")


class FakeScheduler:
    """An engine whose agent takes a role after some looks at its counters.

    Attributes:
        asked: the roles that it was asked to take.
        num_looks: how often `stats` is read until the agent has the role; None: never.
    """

    def __init__(self, node: NodeStats | None, num_looks: int | None = 2) -> None:
        self.ready = Ready(200, 383, [1], {})
        self.dead_error: EngineDeadError | None = None
        self.is_stalled = False
        self.asked: list[str] = []
        self.num_looks = num_looks
        self._stats = EngineStats(node=node)

    def set_role(self, role: str) -> None:
        self.asked.append(role)

    @property
    def stats(self) -> EngineStats:
        if self.asked and self.num_looks is not None:
            self.num_looks -= 1
            if self.num_looks <= 0 and self._stats.node is not None:
                self._stats.node.role = self.asked[-1]
        return self._stats


def make_node(**fields: Any) -> NodeStats:
    return NodeStats(node="a1", **{"role": "decode", "is_redis_up": True, **fields})


def make_server(scheduler: FakeScheduler, cluster: ClusterConfig = SPLIT, keys: tuple[ApiKey, ...] = ()) -> ApiServer:
    config = ServerConfig(served_model_name=("m",), keys=keys)
    engine = EngineConfig(model="m")
    return ApiServer(config, engine, scheduler, TOKENIZER, GenerationDefaults(), cluster=cluster)  # type: ignore[arg-type]


def send(server: ApiServer, method: str, path: str, host: str = HERE, **options: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(server), client=(host, 5000))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    response = asyncio.run(run())
    check_httpx_response(response)
    return response


def set_role(server: ApiServer, role: Any, host: str = HERE, **headers: str) -> httpx.Response:
    return send(server, "POST", "/v1/role", host, json={"role": role}, headers=headers)


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["message"]


@pytest.mark.parametrize("cluster", [SPLIT, GLOBAL])
def test_the_example_of_the_documentation_is_answered(cluster: ClusterConfig) -> None:
    server = make_server(FakeScheduler(make_node(role="decode")), cluster)
    assert send(server, "POST", "/v1/role", json=BODIES["/v1/role"]).status_code == 200


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed", "draining"])
def test_a_role_is_answered_once_the_agent_reports_it(role: str) -> None:
    scheduler = FakeScheduler(make_node(role="other"))
    response = set_role(make_server(scheduler), role)
    assert msgspec.json.decode(response.content, type=RoleResponse) == RoleResponse(node="a1", role=role)
    assert (scheduler.asked, scheduler.num_looks) == ([role], 0)


@pytest.mark.parametrize(
    ("cluster", "role", "message"),
    [
        (SPLIT, None, "role: is missing; expected one of prefill, decode, mixed, draining"),
        (SPLIT, "boss", "role: expected one of prefill, decode, mixed, draining, got 'boss'"),
        (SPLIT, "Decode", "role: expected one of prefill, decode, mixed, draining, got 'Decode'"),
        (GLOBAL, "decode", "role: 'decode' needs --scheduler-name splitwise; this server runs with global"),
        (GLOBAL, "prefill", "role: 'prefill' needs --scheduler-name splitwise; this server runs with global"),
        (
            ClusterConfig(),
            "draining",
            "role: this server works alone; start it with --scheduler-name splitwise or global to give it a role",
        ),
    ],
)
def test_a_role_that_the_node_cannot_have_is_refused_and_not_passed_on(
    cluster: ClusterConfig, role: str | None, message: str
) -> None:
    scheduler = FakeScheduler(make_node())
    assert error_of(set_role(make_server(scheduler, cluster), role)) == (400, "invalid_value", message)
    assert scheduler.asked == []


def test_nodes_of_one_queue_can_be_drained_and_mixed() -> None:
    for role in ("draining", "mixed"):
        assert set_role(make_server(FakeScheduler(make_node()), GLOBAL), role).status_code == 200


@pytest.mark.parametrize(
    ("host", "headers"),
    [
        (ELSEWHERE, {}),
        ("", {}),
        ("2001:db8::1", {}),
        ("::ffff:10.1.2.3", {}),
        (HERE, {"X-Forwarded-For": "127.0.0.1"}),
        (HERE, {"Forwarded": "for=127.0.0.1"}),
        (HERE, {"Origin": "http://localhost"}),
    ],
)
def test_without_an_administrator_s_key_only_this_machine_may_change_the_role(
    host: str, headers: dict[str, str]
) -> None:
    scheduler = FakeScheduler(make_node())
    status, code, message = error_of(set_role(make_server(scheduler), "mixed", host, **headers))
    assert (status, code, scheduler.asked) == (403, "admin_required", [])
    assert "only a connection from the same machine may change the role" in message


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_every_loopback_address_is_this_machine(host: str) -> None:
    assert set_role(make_server(FakeScheduler(make_node())), "mixed", host).status_code == 200


def test_an_administrator_s_key_counts_from_everywhere_and_another_from_nowhere() -> None:
    scheduler = FakeScheduler(make_node())
    server = make_server(scheduler, keys=(ADMIN, USER))
    assert error_of(set_role(server, "mixed", HERE, Authorization="Bearer key-of-user"))[:2] == (403, "admin_required")
    assert error_of(set_role(server, "mixed", HERE))[:2] == (401, "invalid_api_key")
    assert scheduler.asked == []
    assert set_role(server, "mixed", ELSEWHERE, Authorization="Bearer key-of-admin").status_code == 200


def test_keys_without_an_administrator_s_are_needed_besides_the_machine() -> None:
    scheduler = FakeScheduler(make_node())
    server = make_server(scheduler, keys=(USER,))
    assert error_of(set_role(server, "mixed", ELSEWHERE, Authorization="Bearer key-of-user"))[0] == 403
    assert error_of(set_role(server, "mixed", HERE))[0] == 401
    assert set_role(server, "mixed", HERE, Authorization="Bearer key-of-user").status_code == 200


@pytest.mark.parametrize(("node", "present"), [(make_node(), "its role is decode"), (None, "it has reported nothing")])
def test_an_agent_that_does_not_take_the_role_is_an_error(
    monkeypatch: pytest.MonkeyPatch, node: NodeStats | None, present: str
) -> None:
    monkeypatch.setattr(routes_cluster, "ROLE_TIMEOUT_S", 0.1)
    status, code, message = error_of(set_role(make_server(FakeScheduler(node, None)), "mixed"))
    assert (status, code) == (503, "agent_unavailable")
    assert message == f"the node's agent has not taken the role mixed within 0.1 s; {present}"


def test_an_engine_that_dies_before_it_has_the_role_is_reported_at_once() -> None:
    class DyingScheduler(FakeScheduler):
        def set_role(self, role: str) -> None:
            self.dead_error = EngineDeadError("killed")

    assert error_of(set_role(make_server(DyingScheduler(make_node())), "mixed"))[:2] == (503, "service_unavailable")


def test_a_server_that_shuts_down_keeps_its_role() -> None:
    scheduler = FakeScheduler(make_node())
    server = make_server(scheduler)
    server.is_draining = True
    assert error_of(set_role(server, "mixed"))[:2] == (503, "shutting_down")
    assert scheduler.asked == []


@pytest.mark.parametrize(
    ("node", "cluster"),
    [
        (make_node(nodes={"prefill": 1, "decode": 1}), "ok"),
        (make_node(nodes={"decode": 2}), "ok"),
        (make_node(nodes={"decode": 1}), "alone"),
        (make_node(nodes={"decode": 1, "draining": 3}), "alone"),
        (make_node(nodes={}), "alone"),
        (make_node(is_redis_up=False, nodes={"decode": 2}), "degraded: redis"),
        (None, "degraded: agent"),
    ],
)
def test_health_says_whether_other_nodes_help_and_is_200_in_every_case(node: NodeStats | None, cluster: str) -> None:
    response = send(make_server(FakeScheduler(node)), "GET", "/health")
    assert response.status_code == 200
    assert response.json() == {"status": "ready", "node": "a1", "role": "decode", "cluster": cluster}


def test_a_draining_node_is_not_alone_while_another_one_takes_requests() -> None:
    node = make_node(role="draining", nodes={"draining": 1, "decode": 1})
    health = send(make_server(FakeScheduler(node)), "GET", "/health").json()
    assert (health["role"], health["cluster"]) == ("draining", "ok")
    node.nodes = {"draining": 2}
    assert send(make_server(FakeScheduler(node)), "GET", "/health").json()["cluster"] == "alone"


def test_load_counts_what_a_node_has_for_others() -> None:
    server = make_server(FakeScheduler(make_node(num_foreign=3, num_leased_slots=7)))
    load = send(server, "GET", "/load").json()
    assert (load["num_foreign_requests"], load["num_leased_slots"]) == (3, 7)


def test_a_server_that_works_alone_says_nothing_of_nodes() -> None:
    server = make_server(FakeScheduler(None), ClusterConfig())
    assert send(server, "GET", "/health").json() == {"status": "ready"}
    assert "num_foreign_requests" not in send(server, "GET", "/load").json()


class FailingScheduler(FakeScheduler):
    """Emits some tokens and then fails."""

    def __init__(self, error: FastDeployError, num_tokens: int) -> None:
        super().__init__(make_node())
        self._error, self._num_tokens = error, num_tokens

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[TokenDelta], None]:
        if self._num_tokens:
            yield [TokenDelta(request.request_id, 0, [10] * self._num_tokens)]
        raise self._error


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (AttemptsFailedError("every attempt failed: node b2 is gone"), 503, "attempts_failed", None),
        (NoProgressError("no progress for 900 s"), 504, "no_progress", None),
        (QueueFullError("8 requests are waiting already"), 429, "server_overloaded", "1"),
        (QueueTimeoutError("waited longer than 2 s"), 429, "server_overloaded", "1"),
    ],
)
def test_what_ends_a_request_among_nodes_is_typed_also_inside_a_stream(
    error: FastDeployError, status: int, code: str, retry_after: str | None
) -> None:
    body = {"prompt": "the", "max_tokens": 9}
    refused = send(make_server(FailingScheduler(error, 0)), "POST", "/v1/completions", json=body)
    assert error_of(refused) == (status, code, str(error))
    assert refused.headers.get("retry-after") == retry_after
    begun = send(make_server(FailingScheduler(error, 2)), "POST", "/v1/completions", json={**body, "stream": True})
    *tokens, last, done = begun.text.strip().split("\n\n")
    assert (begun.status_code, len(tokens), done) == (200, 1, "data: [DONE]")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == code
