# SPDX-License-Identifier: Apache-2.0
"""`LLM.get_metrics`: types, names, labels and exact values after known requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdeploy import LLM, SamplingParams
from fastdeploy.metrics.reader import Counter, Gauge, Histogram, Metric, Vector
from tests.entrypoints.small_llm import load_small_model

BLOCK = 64


@pytest.fixture(scope="module")
def metrics() -> dict[str, Metric]:
    """Return the metrics without further labels after three requests, of which the last one repeats the first."""
    llm = LLM(model="demo", max_model_len=256, seed=1)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    prompt = [*range(300, 430)]
    llm.generate([prompt], params, use_tqdm=False)
    llm.generate([prompt[:10]], SamplingParams(n=2, max_tokens=3, ignore_eos=True), use_tqdm=False)
    llm.generate([prompt], params, use_tqdm=False)
    found = [metric for metric in llm.get_metrics() if set(metric.labels) == {"model_name", "engine"}]
    assert {(metric.labels["model_name"], metric.labels["engine"]) for metric in found} == {("demo", "0")}
    return {metric.name.removeprefix("fastdeploy:"): metric for metric in found}


def test_counters_have_whole_values_and_names_without_an_ending(metrics: dict[str, Metric]) -> None:
    assert {name: metrics[name].value for name in COUNTERS} == COUNTERS  # type: ignore[attr-defined]
    assert all(type(metrics[name]) is Counter for name in COUNTERS)


COUNTERS = {
    "prompt_tokens": 130 + 10 + 130,
    "generation_tokens": 5 + 2 * 3 + 5,
    "requests_number": 3,
    "num_preemptions": 0,
    "prefix_cache_queries": 130 + 2 * 10 + 130,
    "prefix_cache_hits": 2 * BLOCK,
    "prompt_tokens_cached": 2 * BLOCK,
}


def test_gauges_tell_the_state_now(metrics: dict[str, Metric]) -> None:
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert metrics[name] == Gauge(f"fastdeploy:{name}", {"model_name": "demo", "engine": "0"}, 0.0)


def histogram(metrics: dict[str, Metric], name: str) -> Histogram:
    found = metrics[name]
    assert isinstance(found, Histogram)
    assert found.buckets["+Inf"] == found.count
    return found


def test_histograms_of_choices_and_steps_have_the_expected_counts(metrics: dict[str, Metric]) -> None:
    totals = {
        "request_prompt_tokens": (4, 130 + 2 * 10 + 130),
        "request_generation_tokens": (4, 5 + 2 * 3 + 5),
        "request_params_n": (3, 1 + 2 + 1),
        "request_params_max_tokens": (3, 5 + 3 + 5),
        "request_num_preemptions": (4, 0),
        "request_prefill_kv_computed_tokens": (4, 130 + 2 * 10 + 130 - 2 * BLOCK),
    }
    found = {name: histogram(metrics, name) for name in totals}
    assert {name: (h.count, h.sum) for name, h in found.items()} == totals
    assert [found["request_params_n"].buckets[bound] for bound in ("1.0", "2.0", "5.0")] == [2, 3, 3]
    steps = histogram(metrics, "iteration_tokens_total")
    assert steps.sum == 130 + 4 + 2 * (10 + 2) + 2 + 4  # rows: what was not cached, then one per further token
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert histogram(metrics, name).count == 4


def test_gaps_between_tokens_are_one_fewer_than_the_tokens_of_each_choice(metrics: dict[str, Metric]) -> None:
    gaps = histogram(metrics, "inter_token_latency_seconds")
    assert gaps.count == 4 + 2 * 2 + 4
    assert gaps.sum > 0.0
    mean = histogram(metrics, "request_time_per_output_token_seconds")
    assert mean.count == 4 and mean.sum > 0.0


def test_labelled_metrics_are_one_object_per_label_and_positions_a_vector() -> None:
    llm = LLM(
        model="demo",
        max_model_len=256,
        seed=1,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "adaptive": False},
    )
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    llm.generate("x = 1\nx = 1\nx = 1\nx = 1\nx = ", params, use_tqdm=False)
    named = {metric.name: metric for metric in llm.get_metrics()}
    ended = named["fastdeploy:request_success"]
    assert isinstance(ended, Counter)
    assert (ended.labels["finish_reason"], ended.labels["finished_reason"], ended.value) == ("length", "length", 1)
    accepted = named["fastdeploy:spec_decode_num_accepted_tokens_per_pos"]
    total = named["fastdeploy:spec_decode_num_accepted_tokens"]
    assert isinstance(accepted, Vector) and isinstance(total, Counter)
    assert len(accepted.values) == 3 and sum(accepted.values) == total.value > 0
    assert accepted.labels == total.labels
    gaps = named["fastdeploy:inter_token_latency_seconds"]
    steps = named["fastdeploy:spec_decode_num_drafts"]
    assert isinstance(gaps, Histogram) and isinstance(steps, Counter)
    assert steps.value <= gaps.count < 39  # a step that accepts drafts emits several tokens after one gap


def test_every_gauge_has_a_float_and_only_parts_that_the_model_has_are_reported(tmp_path: Path) -> None:
    adaptive = {"method": "suffix", "num_speculative_tokens": 2}
    models: dict[str, LLM] = {
        "dense": LLM(model="demo", max_model_len=64),
        "suffix": LLM(model="demo", max_model_len=64, speculative_config=adaptive),
        "experts": load_small_model(tmp_path, golden="qwen3_moe"),
    }
    for name, llm in models.items():
        llm.generate([5, 6], SamplingParams(max_tokens=2), use_tqdm=False)
        metrics = llm.get_metrics()
        assert {type(metric.value) for metric in metrics if isinstance(metric, Gauge)} == {float}
        for part, prefix in (("experts", "fastdeploy:moe_"), ("suffix", "fastdeploy:suffix_cache_")):
            found = {metric.name.removeprefix(prefix) for metric in metrics if metric.name.startswith(prefix)}
            assert bool(found) == (part == name), (name, found)
            if part == "experts" == name:
                assert found == {"distinct_experts", "largest_load", "mean_load", "load_imbalance"}
