# SPDX-License-Identifier: Apache-2.0
"""Metrics of a node among others: what its agent reports and what its API processes count."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client import generate_latest

from fastdeploy.core.stats import EngineStats, NodeStats
from fastdeploy.metrics.cluster_metrics import LossReason
from fastdeploy.metrics.server_metrics import FOLDER_VARIABLE, ServerMetrics
from fastdeploy.scheduler import owner_events
from fastdeploy.scheduler.request_states import Stage

NODE = NodeStats(
    node="a1",
    role="decode",
    is_redis_up=True,
    nodes={"prefill": 1, "decode": 2, "draining": 1},
    queue_length={"prefill": 3, "decode": 0},
    num_orphaned=4,
    num_slots=100,
    num_filling_slots=7,
    num_leased_slots=20,
    num_redis_commands=500,
    resident_bytes=2**27,
    transferred_bytes={"ipc": {"in": 4096, "out": 8192}},
    transfer_s={"ipc": (1.5, 3)},
    transfer_failures={"ipc": {"checksum": 2}},
    recomputed_tokens={"arena_full": 64},
    handover_s=(0.25, 5),
)


def page(metrics: ServerMetrics) -> dict[str, float]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {
        name.removeprefix("fastdeploy:"): float(value)
        for name, value in pairs
        if "cluster" in name or "agent" in name or "kv_transfer" in name.partition("{")[0] or "handover" in name
    }


def make_metrics(node: NodeStats | None = NODE, is_clustered: bool = True) -> ServerMetrics:
    stats = EngineStats(node=node, num_imported_tokens=640, num_failed_blocks={"stale": 3})
    return ServerMetrics(lambda: stats, dict, is_clustered=is_clustered)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("agent_resident_memory_bytes", 2**27),
        ('cluster_queue_length{stage="prefill"}', 3),
        ('cluster_queue_length{stage="decode"}', 0),
        ('cluster_nodes{role="prefill",state="live"}', 1),
        ('cluster_nodes{role="decode",state="live"}', 2),
        ('cluster_nodes{role="draining",state="draining"}', 1),
        ("cluster_redis_up", 1),
        ("cluster_redis_commands_total", 512),
        ('cluster_attempts_total{reason="owner_lost"}', 4),
        ('cluster_attempts_total{reason="node_lost"}', 1),
        ('cluster_attempts_total{reason="stalled"}', 0),
        ('cluster_requests_total{path="redis"}', 2),
        ('cluster_requests_total{path="local"}', 0),
        ('cluster_requests_total{path="taken_over"}', 1),
        ('cluster_queue_wait_seconds_sum{stage="decode"}', 0.75),
        ('cluster_queue_wait_seconds_count{stage="prefill"}', 0),
        ('kv_transfer_bytes_total{connector="ipc",direction="in"}', 4096),
        ('kv_transfer_bytes_total{connector="ipc",direction="out"}', 8192),
        ('kv_transfer_seconds_sum{connector="ipc"}', 1.5),
        ('kv_transfer_seconds_count{connector="ipc"}', 3),
        ('kv_transfer_slots{state="free"}', 73),
        ('kv_transfer_slots{state="filling"}', 7),
        ('kv_transfer_slots{state="leased"}', 20),
        ('kv_transfer_failures_total{connector="ipc",reason="checksum"}', 2),
        ('kv_transfer_recomputed_tokens_total{reason="arena_full"}', 64),
        ("handover_seconds_sum", 0.25),
        ("handover_seconds_count", 5),
        ("kv_transfer_imported_tokens_total", 640),
        ('kv_transfer_failed_blocks_total{reason="stale"}', 3),
    ],
)
def test_counters_of_agent_and_owner_have_the_documented_names(name: str, value: float) -> None:
    metrics = make_metrics()
    assert metrics.cluster is not None
    metrics.cluster.claimed("decode", 0.5)
    metrics.cluster.claimed("decode", 0.25)
    metrics.cluster.lost("node_lost")
    for path in ("redis", "redis", "taken_over", ""):
        metrics.cluster.ended(path)
    metrics.cluster.sent(12)
    assert page(metrics)[name] == value


def test_every_family_is_exported_once_as_prometheus_requires() -> None:
    lines = generate_latest(make_metrics().registry).decode().splitlines()
    names = [line for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_while_the_agent_does_not_run_nothing_is_said_of_it_and_of_redis() -> None:
    found = page(make_metrics(node=None))
    assert "cluster_redis_up" not in found and "agent_resident_memory_bytes" not in found
    assert found['cluster_attempts_total{reason="owner_lost"}'] == 0
    assert found["cluster_redis_commands_total"] == 0


def test_a_server_that_works_alone_exports_none_of_them() -> None:
    metrics = make_metrics(node=None, is_clustered=False)
    assert (page(metrics), metrics.cluster) == ({}, None)


def test_reasons_and_stages_are_those_of_the_state_machine() -> None:
    assert get_args(LossReason) == tuple(reason.value for reason in owner_events.LossReason)
    metrics = make_metrics()
    assert metrics.cluster is not None
    for stage in Stage:
        metrics.cluster.claimed(stage, 0.0)


WORKER = """
from fastdeploy.core.stats import EngineStats, NodeStats
from fastdeploy.metrics.server_metrics import ServerMetrics
import sys
metrics = ServerMetrics(EngineStats, dict, sys.argv[1], is_clustered=True)
metrics.cluster.lost("stalled")
metrics.cluster.claimed("prefill", 2.0)
metrics.cluster.ended("local")
metrics.cluster.sent(5)
"""
READER = """
from fastdeploy.core.stats import EngineStats, NodeStats
from fastdeploy.metrics.server_metrics import ServerMetrics
from prometheus_client import generate_latest
import sys
stats = EngineStats(node=NodeStats(num_redis_commands=100, num_orphaned=3))
print(generate_latest(ServerMetrics(lambda: stats, dict, sys.argv[1], is_clustered=True).registry).decode())
"""


def test_counts_of_several_api_processes_add_up_and_those_of_the_agent_count_once(tmp_path: Path) -> None:
    def run(code: str) -> str:
        command = [sys.executable, "-c", code, str(tmp_path)]
        env = {FOLDER_VARIABLE: str(tmp_path), "PATH": ""}
        return subprocess.run(
            command, env=env, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True, timeout=120
        ).stdout

    run(WORKER)
    run(WORKER)
    lines = run(READER).splitlines()
    for expected in (
        'fastdeploy:cluster_attempts_total{reason="stalled"} 2.0',
        'fastdeploy:cluster_attempts_total{reason="owner_lost"} 3.0',
        'fastdeploy:cluster_requests_total{path="local"} 2.0',
        'fastdeploy:cluster_queue_wait_seconds_sum{stage="prefill"} 4.0',
        "fastdeploy:cluster_redis_commands_total 110.0",
    ):
        assert expected in lines
