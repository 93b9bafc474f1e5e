# SPDX-License-Identifier: Apache-2.0
"""The engine's counters as Prometheus metrics with FastDeploy's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from fastdeploy.core.stats import (
    HISTOGRAM_BOUNDS,
    DraftLengthStats,
    EngineStats,
    ExpertStats,
    Histogram,
    SuffixCacheStats,
)

PREFIX = "fastdeploy:"
_CACHE_LABELS = {"num_blocks": "num_gpu_blocks", "dtype": "cache_dtype"}  # second names
_EXPERTS_OF_A_STEP = "moe_distinct_experts"
_HISTOGRAM_TEXTS = {
    "inter_token_latency_seconds": "Time between two steps that emit tokens of a choice",
    "iteration_tokens_total": "Rows of a step: prompt tokens, last tokens and draft tokens",
    "request_prefill_kv_computed_tokens": "Prompt tokens of a choice that were not found in a cache",
    "request_num_preemptions": "Preemptions of a choice",
    "request_params_n": "Choices per request (n)",
    _EXPERTS_OF_A_STEP: "Experts of a layer that have rows in a step, mean of the layers",
}


class EngineCollector(Collector):
    """Reads the latest `EngineStats` on each request of /metrics."""

    def __init__(
        self,
        read_stats: Callable[[], EngineStats],
        read_description: Callable[[], Mapping[str, Any]],
        is_complete: bool = True,
    ) -> None:
        """Read counters and the engine's description from these functions; the description is empty during start-up.

        Args:
            is_complete: also yield metrics of experts and of a suffix cache, as zeros, if the engine has none, so that
                dashboards find them, and the memory of the engine's process, which a script shares with it.
        """
        self._read_stats = read_stats
        self._read_description = read_description
        self._is_complete = is_complete

    def collect(self) -> Iterator[Metric]:
        """Yield one family per metric."""
        stats, description = self._read_stats(), self._read_description()
        yield from _state(stats)
        yield from _capacity(stats, description)
        yield from _totals(stats)
        yield from _prompt_tokens(stats)
        yield from _histograms(stats)
        yield from _speculation(stats, description.get("speculation", {}))
        if self._is_complete:
            yield _gauge("engine_resident_memory_bytes", "Memory of the engine's process", stats.resident_bytes)
        if self._is_complete or stats.experts is not None:
            yield from _experts(stats)
        if self._is_complete or stats.suffix_cache is not None:
            yield from _suffix_cache(stats.suffix_cache or SuffixCacheStats())


def _state(stats: EngineStats) -> Iterator[Metric]:
    yield _gauge("num_requests_running", "Requests in the batch", stats.num_running)
    yield _gauge("num_requests_waiting", "Requests that wait to be scheduled", stats.num_waiting)
    waiting = GaugeMetricFamily(
        PREFIX + "num_requests_waiting_by_reason", "Requests that wait for a place in the batch", labels=["reason"]
    )
    waiting.add_metric(["capacity"], stats.num_waiting)
    yield waiting
    yield _gauge("gpu_cache_usage_perc", "Fraction of KV blocks in use, 0 to 1", stats.cache_usage)
    yield _gauge("kv_cache_usage_perc", "The same", stats.cache_usage)
    yield _gauge("available_gpu_block_num", "KV blocks that are free or can be evicted", stats.num_free_blocks)
    rate = _ratio(stats.num_prefix_hit_tokens, stats.num_prefix_lookup_tokens)
    yield _gauge("hit_token_rate", "Fraction of looked-up prompt tokens that were in the prefix cache", rate)
    yield _gauge("gpu_hit_token_rate", "The same: the cache has one level", rate)


def _capacity(stats: EngineStats, description: Mapping[str, Any]) -> Iterator[Metric]:
    max_num_seqs = description.get("max_num_seqs", 0)
    free = _ratio(stats.num_free_blocks, stats.num_blocks)
    yield _gauge("batch_size", "Requests in the batch", stats.num_running)
    yield _gauge("max_batch_size", "Maximum number of requests in the batch (--max-num-seqs)", max_num_seqs)
    yield _gauge("available_batch_size", "Requests that could join the batch", max(0, max_num_seqs - stats.num_running))
    yield _gauge("max_gpu_block_num", "KV blocks", stats.num_blocks)
    yield _gauge("free_gpu_block_num", "KV blocks that are free or can be evicted", stats.num_free_blocks)
    yield _gauge("available_gpu_resource", "Fraction of KV blocks that are free, 0 to 1", free)
    described, resident = description.get("kv_cache", {}), stats.resident_cache_bytes
    planned = described.get("bytes", 0)
    resident = planned if resident is None else resident
    yield _gauge("kv_cache_planned_bytes", "Memory that the KV cache may take, bytes", planned)
    yield _gauge("kv_cache_resident_bytes", "Memory that KV blocks have taken so far, bytes", resident)
    cache = {key: str(value) for key, value in described.items()}
    cache |= {name: cache[key] for key, name in _CACHE_LABELS.items() if key in cache}
    yield _gauge("cache_config_info", "Configuration of the KV cache; the value is 1", 1, cache)


def _totals(stats: EngineStats) -> Iterator[Metric]:
    yield _counter("prompt_tokens", "Prompt tokens of admitted requests", stats.num_prompt_tokens)
    yield _counter("generation_tokens", "Tokens emitted", stats.num_generated_tokens)
    yield _counter("prefix_cache_token_num", "Prompt tokens found in the prefix cache", stats.num_prefix_hit_tokens)
    yield _counter("prefix_gpu_cache_token_num", "The same: the cache has one level", stats.num_prefix_hit_tokens)
    yield _counter("prefix_cache_hits", "The same", stats.num_prefix_hit_tokens)
    yield _counter("prefix_cache_queries", "Tokens looked up in the prefix cache", stats.num_prefix_lookup_tokens)
    yield _counter("num_preemptions", "Preemptions of requests", stats.num_preemptions)
    finished = CounterMetricFamily(
        PREFIX + "request_success",
        "Finished choices, by finish reason under two names",
        labels=["finish_reason", "finished_reason"],
    )
    for reason, count in stats.num_finished.items():
        finished.add_metric([reason, reason], count)
    yield finished


def _prompt_tokens(stats: EngineStats) -> Iterator[Metric]:
    """Yield the prompt tokens of scheduled choices by where their keys and values came from."""
    cached, transferred = stats.num_cached_prompt_tokens, stats.num_transferred_prompt_tokens
    sources = {
        "local_compute": stats.num_computed_prompt_tokens,
        "local_cache_hit": cached,
        "external_kv_transfer": transferred,
    }
    yield _counters("prompt_tokens_by_source", "Prompt tokens of scheduled choices", "source", sources, {})
    yield _counter("prompt_tokens_cached", "Of these, tokens that were not computed", cached + transferred)
    tiers = {"device": cached, "p2p": transferred}
    yield _counters("prompt_tokens_cached_by_source", "The same, by cache: own, other nodes", "source", tiers, {})


def _histograms(stats: EngineStats) -> Iterator[Metric]:
    for name in HISTOGRAM_BOUNDS:
        if name != _EXPERTS_OF_A_STEP:
            yield _histogram(stats, name)


def _histogram(stats: EngineStats, name: str) -> Metric:
    bounds = HISTOGRAM_BOUNDS[name]
    histogram = stats.histograms.get(name) or Histogram([0] * (len(bounds) + 1))
    uppers = [*map(floatToGoString, bounds), "+Inf"]
    family = HistogramMetricFamily(PREFIX + name, _HISTOGRAM_TEXTS[name])
    family.add_metric([], list(zip(uppers, accumulate(histogram.counts))), histogram.total)
    return family


def _experts(stats: EngineStats) -> Iterator[Metric]:
    """Yield the load of experts; series by layer are missing if the model has no experts."""
    yield _histogram(stats, _EXPERTS_OF_A_STEP)
    experts = stats.experts or ExpertStats()
    loads = {str(layer): load for layer, load in zip(experts.layers, experts.largest_loads)}
    yield _counters("moe_largest_load", "Rows of the expert of a layer that has most in a step", "layer", loads, {})
    yield _counter("moe_mean_load", "Rows of an expert in a step, mean of all experts", experts.mean_load)
    text = "Largest / mean load of the experts of a layer since the start; 1 is even"
    imbalance = GaugeMetricFamily(PREFIX + "moe_load_imbalance", text, labels=["layer"])
    for layer, load in loads.items():
        imbalance.add_metric([layer], _ratio(load, experts.mean_load))
    yield imbalance


def _speculation(stats: EngineStats, speculation: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield the measures of docs/glossary.md: drafted, accepted, emitted, and their ratios."""
    labels = {key: str(speculation.get(key, "")) for key in ("method", "verify_strategy", "accept_policy")}
    for name, text, value in (
        ("num_steps", "Decoding steps of requests", stats.num_steps),
        ("num_drafts", "Decoding steps that verified a draft", stats.num_drafts),
        ("num_draft_tokens", "Verified draft tokens", stats.num_draft_tokens),
        ("num_accepted_tokens", "Accepted draft tokens", stats.num_accepted_tokens),
        ("num_emitted_tokens", "Tokens emitted in decoding steps", stats.num_emitted_tokens),
    ):
        yield _counter("spec_decode_" + name, text, value, labels)
    yield from _draft_length(stats.draft_length, labels)
    yield from _per_position(stats, labels)
    yield from _per_source(stats, labels)
    rows = stats.num_steps + stats.num_draft_tokens
    acceptance = _ratio(stats.num_accepted_tokens, stats.num_draft_tokens)
    yield _gauge("spec_decode_draft_acceptance_rate", "Accepted / verified draft tokens", acceptance, labels)
    efficiency = _ratio(stats.num_emitted_tokens, rows)
    yield _gauge("spec_decode_efficiency", "Tokens emitted / rows computed in decoding steps", efficiency, labels)
    for i, (drafted, accepted) in enumerate(zip(stats.drafted_per_position, stats.accepted_per_position, strict=True)):
        name = f"spec_decode_draft_single_head_acceptance_rate_{i}"
        yield _gauge(name, f"Accepted / verified draft tokens at position {i}", _ratio(accepted, drafted), labels)


def _per_position(stats: EngineStats, labels: Mapping[str, str]) -> Iterator[Metric]:
    for what, text, counts in (
        ("draft", "Verified draft tokens, by position in the draft", stats.drafted_per_position),
        ("accepted", "Accepted draft tokens, by position in the draft", stats.accepted_per_position),
    ):
        by_position = {str(position): count for position, count in enumerate(counts)}
        yield _counters(f"spec_decode_num_{what}_tokens_per_pos", text, "position", by_position, labels)


def _per_source(stats: EngineStats, labels: Mapping[str, str]) -> Iterator[Metric]:
    for what, text, counts in (
        ("draft", "Verified draft tokens, by source", stats.drafted_per_source),
        ("accepted", "Accepted draft tokens, by source", stats.accepted_per_source),
    ):
        yield _counters(f"spec_decode_num_{what}_tokens_per_source", text, "source", counts, labels)


def _suffix_cache(cache: SuffixCacheStats) -> Iterator[Metric]:
    yield _gauge("suffix_cache_live_bytes", "Memory of the contexts of running requests, bytes", cache.live_bytes)
    yield _gauge("suffix_cache_bytes", "Memory of the cached outputs, bytes", cache.shared_bytes)
    yield _gauge("suffix_cache_num_outputs", "Cached outputs of finished requests", cache.num_outputs)
    yield _gauge("suffix_cache_num_tokens", "Tokens of the cached outputs", cache.num_tokens)
    yield _counter("suffix_cache_evicted_outputs", "Outputs evicted from the cache", cache.num_evicted_outputs)
    drafts = {"own": cache.num_own_drafts, "shared": cache.num_shared_drafts}
    text = "Drafts by the text of the match: the request's own context, or cached outputs (shared)"
    yield _counters("suffix_cache_drafts", text, "text", drafts, {})


def _draft_length(stats: DraftLengthStats, labels: Mapping[str, str]) -> Iterator[Metric]:
    name = "spec_decode_adaptive_"
    yield _gauge(name + "mean_length", "Drafts verified per request and step, running mean", stats.mean_length, labels)
    yield _gauge(name + "rows", "Drafts that the latest step verified", stats.num_rows, labels)
    yield _counter(name + "zero_choices", "Steps that had drafts and verified none", stats.num_zero_choices, labels)
    yield _counter(name + "withheld_tokens", "Draft tokens that were not verified", stats.num_withheld_tokens, labels)
    yield _gauge(name + "paused", "1 while drafting is paused because drafts lost time", stats.is_paused, labels)
    yield _gauge(name + "paused_seconds", "Seconds since drafting was paused; 0 while drafting", stats.paused_s, labels)


def _gauge(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=list(labels or ()))
    family.add_metric(list((labels or {}).values()), value)
    return family


def _counter(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=list(labels or ()))
    family.add_metric(list((labels or {}).values()), value)
    return family


def _counters(name: str, text: str, label: str, counts: Mapping[str, int], labels: Mapping[str, str]) -> Metric:
    """Return one counter per value of `label`."""
    family = CounterMetricFamily(PREFIX + name, text, labels=[*labels, label])
    for value, count in counts.items():
        family.add_metric([*labels.values(), value], count)
    return family


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
