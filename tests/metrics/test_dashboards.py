# SPDX-License-Identifier: Apache-2.0
"""vLLM's dashboards find their series: every name and label of `dashboard_series.txt` is in `/metrics` of a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.entrypoints.server_process import ServerProcess, mock_server, sample

LIST = Path(__file__).with_name("dashboard_series.txt")
PROCESS = (
    *("process_start_time_seconds", "process_cpu_seconds_total", "process_resident_memory_bytes"),
    *("process_open_fds", "process_max_fds"),
)


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two workers"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Run a server that has answered one request."""
    folder = tmp_path_factory.mktemp("mock")
    with mock_server(folder, "--workers", str(request.param), "--served-model-name", "a model") as running:
        running.post("/v1/completions", {"prompt": "the", "max_tokens": 3})
        yield running


def samples(server: ServerProcess) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for item in family.samples:
            found.setdefault(item.name, []).append(item)
    return found


def wanted() -> dict[str, set[str]]:
    rows = [line.split() for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    return {name: set(labels) for name, *labels in rows}


def test_every_series_of_the_list_exists_and_has_its_labels(server: ServerProcess) -> None:
    found = samples(server)
    assert len(wanted()) > 50
    for name, labels in wanted().items():
        assert name in found, name
        for item in found[name]:
            assert labels <= set(item.labels), name


def test_every_series_of_the_engine_and_of_requests_names_the_model(server: ServerProcess) -> None:
    labels = [
        (item.labels["model_name"], item.labels["engine"])
        for name, items in samples(server).items()
        if name.startswith("fastdeploy:")
        for item in items
    ]
    assert set(labels) == {("a model", "0")}


def test_labels_of_vllm_stand_beside_those_of_fastdeploy(server: ServerProcess) -> None:
    page = server.get("/metrics").text
    ended = 'fastdeploy:request_success_total{finish_reason="length",finished_reason="length"}'
    assert sample(page, ended) == 1
    route = 'path="/v1/completions",handler="/v1/completions"'
    assert sample(page, f'http_requests_total{{{route},status_code="200",status="2xx",method="POST"}}') == 1
    assert sample(page, f"http_request_duration_seconds_count{{{route}}}") == 1
    assert sample(page, 'fastdeploy:cache_config_info{num_blocks="100",num_gpu_blocks="100"}') == 1


def test_second_names_have_the_same_values(server: ServerProcess) -> None:
    page = server.get("/metrics").text
    assert sample(page, "fastdeploy:kv_cache_usage_perc") == sample(page, "fastdeploy:gpu_cache_usage_perc")
    for suffix in ('_bucket{le="0.1"}', "_count", "_sum"):
        value = sample(page, "fastdeploy:time_per_output_token_seconds" + suffix)
        assert value is not None
        assert value == sample(page, "fastdeploy:request_time_per_output_token_seconds" + suffix)
    assert "# TYPE fastdeploy:request_time_per_output_token_seconds histogram" in page


def test_objectives_of_the_dashboards_are_bounds_of_buckets(server: ServerProcess) -> None:
    page = server.get("/metrics").text
    for bound in ("0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "10.0"):
        assert sample(page, f'fastdeploy:time_to_first_token_seconds_bucket{{le="{bound}"}}') is not None, bound
    for bound in ("0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.5"):
        name = f'fastdeploy:request_time_per_output_token_seconds_bucket{{le="{bound}"}}'
        assert sample(page, name) is not None, bound


def test_a_single_process_exports_its_own_processor_time_and_memory(
    server: ServerProcess, request: pytest.FixtureRequest
) -> None:
    is_single = request.node.callspec.params["server"] == 1
    assert [name in samples(server) for name in PROCESS] == [is_single] * 5
