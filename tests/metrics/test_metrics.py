# SPDX-License-Identifier: Apache-2.0
"""Names and values of Prometheus metrics, request records and log lines."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

import fastdeploy
from fastdeploy.config.env import Env
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.outputs import RequestMetrics, SpeculateMetrics
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.stats import DraftLengthStats, EngineStats, ExpertStats, Histogram, SuffixCacheStats
from fastdeploy.metrics.engine_collector import EngineCollector
from fastdeploy.metrics.logs import set_up_logging
from fastdeploy.metrics.request_record import RequestRecorder, make_record

STATS = EngineStats(
    num_running=3,
    num_waiting=2,
    num_blocks=10,
    num_free_blocks=4,
    resident_cache_bytes=1024,
    resident_bytes=2**29,
    num_steps=5,
    num_prompt_tokens=100,
    num_computed_prompt_tokens=60,
    num_cached_prompt_tokens=25,
    num_transferred_prompt_tokens=15,
    num_generated_tokens=19,
    num_prefix_lookup_tokens=80,
    num_prefix_hit_tokens=20,
    num_drafts=4,
    num_draft_tokens=11,
    num_accepted_tokens=6,
    num_emitted_tokens=12,
    drafted_per_position=[4, 4, 3],
    accepted_per_position=[4, 2, 0],
    drafted_per_source={"mtp": 8, "suffix": 3},
    accepted_per_source={"mtp": 5, "suffix": 1},
    suffix_cache=SuffixCacheStats(4096, 8192, 3, 50, 2, 7, 9),
    num_finished={"stop": 2, "length": 1},
    histograms={"request_params_n": Histogram([4, 1, 1, 0, 0, 0, 0, 1], 190.0)},
    experts=ExpertStats([1, 3], [12, 30], 6.0),
    draft_length=DraftLengthStats(
        mean_length=1.5, num_rows=4, num_zero_choices=3, num_withheld_tokens=9, is_paused=True, paused_s=2.5
    ),
)
SPECULATION = {"method": "ngram", "verify_strategy": "topp", "accept_policy": "normal"}
DESCRIPTION = {
    "speculation": SPECULATION,
    "max_num_seqs": 8,
    "kv_cache": {"num_blocks": 10, "block_size": 64, "num_tokens": 640, "bytes": 4096},
}
LABELS = '{accept_policy="normal",method="ngram",verify_strategy="topp"}'


def exposition_text() -> str:
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: STATS, lambda: DESCRIPTION))
    return generate_latest(registry).decode()


def exposition() -> dict[str, float]:
    lines = exposition_text().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fastdeploy:num_requests_running", 3),
        ("fastdeploy:num_requests_waiting", 2),
        ("fastdeploy:gpu_cache_usage_perc", 0.6),
        ("fastdeploy:available_gpu_block_num", 4),
        ("fastdeploy:hit_token_rate", 0.25),
        ("fastdeploy:batch_size", 3),
        ("fastdeploy:max_batch_size", 8),
        ("fastdeploy:available_batch_size", 5),
        ("fastdeploy:max_gpu_block_num", 10),
        ("fastdeploy:free_gpu_block_num", 4),
        ("fastdeploy:kv_cache_planned_bytes", 4096),
        ("fastdeploy:kv_cache_resident_bytes", 1024),
        ("fastdeploy:available_gpu_resource", 0.4),
        ("fastdeploy:engine_resident_memory_bytes", 2**29),
        (
            'fastdeploy:cache_config_info{block_size="64",bytes="4096",num_blocks="10",num_gpu_blocks="10",'
            'num_tokens="640"}',
            1,
        ),
        ("fastdeploy:prompt_tokens_total", 100),
        ("fastdeploy:generation_tokens_total", 19),
        ("fastdeploy:prefix_cache_token_num_total", 20),
        ('fastdeploy:request_success_total{finish_reason="stop",finished_reason="stop"}', 2),
        ("fastdeploy:kv_cache_usage_perc", 0.6),
        ('fastdeploy:num_requests_waiting_by_reason{reason="capacity"}', 2),
        ("fastdeploy:prefix_cache_hits_total", 20),
        ("fastdeploy:prefix_cache_queries_total", 80),
        ('fastdeploy:prompt_tokens_by_source_total{source="local_compute"}', 60),
        ('fastdeploy:prompt_tokens_by_source_total{source="local_cache_hit"}', 25),
        ('fastdeploy:prompt_tokens_by_source_total{source="external_kv_transfer"}', 15),
        ("fastdeploy:prompt_tokens_cached_total", 40),
        ('fastdeploy:prompt_tokens_cached_by_source_total{source="device"}', 25),
        ('fastdeploy:prompt_tokens_cached_by_source_total{source="p2p"}', 15),
        ('fastdeploy:request_params_n_bucket{le="1.0"}', 4),
        ('fastdeploy:request_params_n_bucket{le="5.0"}', 6),
        ('fastdeploy:request_params_n_bucket{le="+Inf"}', 7),
        ("fastdeploy:request_params_n_count", 7),
        ('fastdeploy:moe_largest_load_total{layer="3"}', 30),
        ("fastdeploy:moe_mean_load_total", 6),
        ('fastdeploy:moe_load_imbalance{layer="1"}', 2),
        ('fastdeploy:moe_load_imbalance{layer="3"}', 5),
        ("fastdeploy:request_params_n_sum", 190.0),
        ('fastdeploy:iteration_tokens_total_bucket{le="+Inf"}', 0),
        ("fastdeploy:spec_decode_num_drafts_total" + LABELS, 4),
        ("fastdeploy:spec_decode_num_draft_tokens_total" + LABELS, 11),
        ("fastdeploy:spec_decode_num_accepted_tokens_total" + LABELS, 6),
        ("fastdeploy:spec_decode_num_emitted_tokens_total" + LABELS, 12),
        ("fastdeploy:spec_decode_draft_acceptance_rate" + LABELS, 6 / 11),
        ("fastdeploy:spec_decode_efficiency" + LABELS, 12 / 16),
        ("fastdeploy:spec_decode_adaptive_mean_length" + LABELS, 1.5),
        ("fastdeploy:spec_decode_adaptive_rows" + LABELS, 4),
        ("fastdeploy:spec_decode_adaptive_zero_choices_total" + LABELS, 3),
        ("fastdeploy:spec_decode_adaptive_withheld_tokens_total" + LABELS, 9),
        ("fastdeploy:spec_decode_adaptive_paused" + LABELS, 1),
        ("fastdeploy:spec_decode_adaptive_paused_seconds" + LABELS, 2.5),
        (
            "fastdeploy:spec_decode_num_accepted_tokens_per_pos_total"
            + LABELS.replace(",verify", ',position="1",verify'),
            2,
        ),
        (
            "fastdeploy:spec_decode_num_draft_tokens_per_pos_total" + LABELS.replace(",verify", ',position="2",verify'),
            3,
        ),
        (
            "fastdeploy:spec_decode_num_draft_tokens_per_source_total"
            + LABELS.replace(",verify", ',source="suffix",verify'),
            3,
        ),
        (
            "fastdeploy:spec_decode_num_accepted_tokens_per_source_total"
            + LABELS.replace(",verify", ',source="mtp",verify'),
            5,
        ),
        ("fastdeploy:spec_decode_draft_single_head_acceptance_rate_1" + LABELS, 0.5),
        ("fastdeploy:suffix_cache_live_bytes", 4096),
        ("fastdeploy:suffix_cache_bytes", 8192),
        ("fastdeploy:suffix_cache_num_outputs", 3),
        ("fastdeploy:suffix_cache_num_tokens", 50),
        ("fastdeploy:suffix_cache_evicted_outputs_total", 2),
        ('fastdeploy:suffix_cache_drafts_total{text="own"}', 7),
        ('fastdeploy:suffix_cache_drafts_total{text="shared"}', 9),
    ],
)
def test_engine_counters_have_the_documented_names(name: str, value: float) -> None:
    assert exposition()[name] == pytest.approx(value)


REQUEST = GenerationRequest("0¶salt§cmpl-1", [7] * 20, SamplingParams(), client_name="alice")


def record_one(
    recorder: RequestRecorder, drafted: int = 4, request: GenerationRequest = REQUEST, **fields: Any
) -> None:
    times: dict[str, Any] = {"queue_s": 0.25, "first_token_s": 0.75, "finish_s": 2.75, **fields}
    metrics = RequestMetrics(num_cached_tokens=16, **times)
    speculation = SpeculateMetrics(drafted_tokens=drafted, accept_ratio=0.75, average_accept_length=2.5)
    recorder.record(make_record(request, 0, 5, "stop", metrics, speculation))


def test_request_times_are_observed_by_their_histograms() -> None:
    registry = CollectorRegistry()
    recorder = RequestRecorder(registry)
    recorder.started(128)
    recorder.started(None)
    record_one(recorder)
    sums = {
        sample.name.removeprefix("fastdeploy:").removesuffix("_sum"): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.endswith("_sum")
    }
    assert sums == {
        "time_to_first_token_seconds": 0.75,
        "time_per_output_token_seconds": 0.5,
        "e2e_request_latency_seconds": 2.75,
        "request_queue_time_seconds": 0.25,
        "request_prefill_time_seconds": 0.5,
        "request_decode_time_seconds": 2.0,
        "request_inference_time_seconds": 2.5,
        "request_prompt_tokens": 20,
        "request_generation_tokens": 5,
        "request_params_max_tokens": 128,
    }
    assert registry.get_sample_value("fastdeploy:requests_number_total") == 2
    assert registry.get_sample_value("fastdeploy:first_token_latency") == 0.75
    assert registry.get_sample_value("fastdeploy:infer_latency") == 2.75


@pytest.fixture
def fresh_logging() -> Iterator[None]:
    logger = logging.getLogger("fastdeploy")
    kept = (list(logger.handlers), logger.level, logger.propagate)
    yield
    for handler in logger.handlers:
        handler.close()
    logger.handlers[:], logger.level, logger.propagate = kept


@pytest.mark.usefixtures("fresh_logging")
def test_one_line_per_request_on_stderr_and_in_the_log_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logging(Env(log_dir=str(tmp_path / "logs")))
    record_one(RequestRecorder(CollectorRegistry()))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith(
        "INFO fastdeploy.request: cmpl-1[0] stop, client alice, prompt 20 (16 cached), output 5, queued 250.0 ms, "
        "prefill 500.0 ms, TTFT 750.0 ms, TPOT 500.0 ms, total 2750.0 ms, acceptance rate 0.75, "
        "mean acceptance length 2.50"
    )
    assert (tmp_path / "logs" / "api_server.log").read_text().splitlines() == lines


@pytest.mark.usefixtures("fresh_logging")
def test_json_log_lines_are_documents(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(Env(log_format="json"))
    record_one(RequestRecorder(CollectorRegistry(), json_lines=True), drafted=0)
    logging.getLogger("fastdeploy.server").warning("plain words")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["request_id"], first["ttft_s"], first["acceptance"]) == ("cmpl-1", 0.75, None)
    assert (first["client"], first["cached_tokens"], first["queue_s"], first["prefill_s"]) == ("alice", 16, 0.25, 0.5)
    assert {"node", "path", "attempts"}.isdisjoint(first)
    assert (second["message"], second["level"]) == ("plain words", "WARNING")


@pytest.mark.usefixtures("fresh_logging")
def test_log_lines_among_several_nodes_end_with_node_path_and_attempts(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(Env())
    place: dict[str, Any] = {"node": "a1", "path": "taken_over", "num_attempts": 2}
    record_one(RequestRecorder(CollectorRegistry()), drafted=0, **place)
    record_one(RequestRecorder(CollectorRegistry(), json_lines=True), drafted=0, **place)
    text, document = capsys.readouterr().err.splitlines()
    assert text.endswith("total 2750.0 ms, node a1, path taken_over, attempts 2")
    found = json.loads(document[document.index("{") :])
    assert (found["node"], found["path"], found["attempts"]) == ("a1", "taken_over", 2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"first_token_s": None}, "queued 250.0 ms, prefill -, TTFT -, TPOT -, total 2750.0 ms"),
        ({"queue_s": None, "first_token_s": None}, "queued -, prefill -, TTFT -, TPOT -, total 2750.0 ms"),
        ({"queue_s": None}, "queued -, prefill -, TTFT 750.0 ms, TPOT 500.0 ms, total 2750.0 ms"),
        (
            {"num_preemptions": 2},
            "queued 250.0 ms, prefill 500.0 ms, TTFT 750.0 ms, TPOT 500.0 ms, total 2750.0 ms, preemptions 2",
        ),
    ],
    ids=["ended in its prefill", "ended in the queue", "no one knows when it began", "preempted"],
)
def test_a_line_shows_the_times_that_are_known_and_no_client_without_keys(
    fields: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    registry = CollectorRegistry()
    with caplog.at_level(logging.INFO, logger="fastdeploy.request"):
        record_one(RequestRecorder(registry), drafted=0, request=replace(REQUEST, client_name=""), **fields)
    assert caplog.messages == [f"cmpl-1[0] stop, prompt 20 (16 cached), output 5, {words}"]
    num_prefills = registry.get_sample_value("fastdeploy:request_prefill_time_seconds_count")
    assert num_prefills == (0 if "prefill -" in words else 1), "an unknown time is not observed"


def test_log_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="FD_LOG_DIR: cannot create"):
        set_up_logging(Env(log_dir=str(tmp_path / "file" / "logs")))


def test_demo_page_finds_the_method_and_the_seconds_of_a_pause_in_the_metrics() -> None:
    page = (Path(fastdeploy.__file__).parent / "assets" / "page.html").read_text()
    pattern = re.search(r"/(\^fastdeploy:spec_decode_adaptive_paused_seconds.*)/m\.exec", page)
    assert pattern is not None
    assert re.findall(pattern[1], exposition_text(), re.MULTILINE) == [(LABELS, "2.5")]
