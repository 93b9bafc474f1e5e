# SPDX-License-Identifier: Apache-2.0
"""Metrics by API key, of one process and of several."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.outputs import RequestMetrics
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.stats import ClientLoad, EngineStats
from fastdeploy.metrics.request_record import make_record
from fastdeploy.metrics.server_metrics import ServerMetrics

LOADS = {"alice": ClientLoad(num_running=2, num_waiting=3), "of another node": ClientLoad(5, 6)}
NAMES = ("alice", "bob")


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Return the samples with the label `client`, without buckets and times of creation, by metric and name."""
    return {
        (sample.name.removeprefix("fastdeploy:client_"), sample.labels["client"]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if "client" in sample.labels and not sample.name.endswith(("_bucket", "_created"))
    }


def test_every_key_has_its_own_series_from_the_start_and_no_other_name_gets_one() -> None:
    metrics = ServerMetrics(lambda: EngineStats(clients=LOADS), dict, client_names=NAMES)
    before = samples(metrics.registry)
    assert len(before) == 7 * len(NAMES)
    record(metrics, "mallory", RequestMetrics(queue_s=4.0, first_token_s=5.0, finish_s=6.0))
    metrics.clients.change_waiting("mallory", 3)
    metrics.clients.count("mallory", 3, 4)
    assert samples(metrics.registry) == before
    assert {(name, client): value for (name, client), value in before.items() if value} == {
        ("num_requests_running", "alice"): 2,
        ("num_requests_waiting", "alice"): 3,
    }


def record(metrics: ServerMetrics, client: str, times: RequestMetrics) -> None:
    request = GenerationRequest("r", [1], SamplingParams(), client_name=client)
    metrics.requests.record(make_record(request, 0, 3, "stop", times, None))


def test_queue_times_are_observed_by_key_unless_a_request_never_began() -> None:
    metrics = ServerMetrics(EngineStats, dict, client_names=NAMES)
    record(metrics, "bob", RequestMetrics(queue_s=4.0, first_token_s=5.0, finish_s=6.0))
    record(metrics, "bob", RequestMetrics(queue_s=0.25, first_token_s=5.0, finish_s=6.0))
    record(metrics, "bob", RequestMetrics(finish_s=6.0))
    record(metrics, "", RequestMetrics(queue_s=1.0, finish_s=6.0))
    found = samples(metrics.registry)
    assert found["request_queue_time_seconds_count", "bob"] == 2
    assert found["request_queue_time_seconds_sum", "bob"] == 4.25
    assert found["request_queue_time_seconds_count", "alice"] == 0
    within = metrics.registry.get_sample_value(
        "fastdeploy:client_request_queue_time_seconds_bucket", {"client": "bob", "le": "0.5"}
    )
    assert within == 1


_PROCESS = """
import sys
from fastdeploy.core.stats import EngineStats
from fastdeploy.metrics.server_metrics import ServerMetrics

metrics = ServerMetrics(EngineStats, dict, sys.argv[1], client_names=("alice", "bob"))
metrics.clients.change_waiting("alice", int(sys.argv[2]))
print(metrics.sequences_waiting(), flush=True)
input()
"""


def test_sequences_that_wait_are_added_up_over_the_processes(tmp_path: Path) -> None:
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}

    def start(count: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _PROCESS, str(tmp_path), str(count)]
        return subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    with start(3) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "{'alice': 3, 'bob': 0}\n"
        with start(4) as second:
            assert second.communicate("\n")[0] == "{'alice': 7, 'bob': 0}\n"
        first.communicate("\n")
