# SPDX-License-Identifier: Apache-2.0
"""Histograms of steps: rows, prompt tokens by source, and the time between the tokens of a choice."""

from __future__ import annotations

import numpy as np

from fastdeploy.core.request import NO_DRAFT, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.stats import HISTOGRAM_BOUNDS, ExpertStats
from fastdeploy.core.step import RequestResult, ScheduledRequest, StepPlan
from fastdeploy.engine.expert_counter import ExpertCounter
from fastdeploy.engine.stats_collector import StatsCollector


def choice(name: str, num_prompt: int = 10, num_cached: int = 0, num_transferred: int = 0) -> Request:
    request = Request(GenerationRequest(name, list(range(num_prompt)), SamplingParams()), 0, 1, 100, 0)
    request.metrics.num_cached_tokens, request.metrics.num_transferred_tokens = num_cached, num_transferred
    return request


def step(collector: StatsCollector, end_s: float, *rows: tuple[Request, int, int], num_admitted: int = 0) -> None:
    """Count a step with (request, number of rows, number of emitted tokens) of each choice."""
    plan = StepPlan([ScheduledRequest(request, count, 0, NO_DRAFT, 1) for request, count, _ in rows], num_admitted)
    collector.count_step(plan, [RequestResult([7] * count) for _, _, count in rows], end_s)


def nonzero(collector: StatsCollector, name: str) -> tuple[dict[float, int], float]:
    """Return the counts of a histogram by upper bound, and its sum."""
    histogram = collector._histograms[name]
    bounds = (*HISTOGRAM_BOUNDS[name], float("inf"))
    return {bound: count for bound, count in zip(bounds, histogram.counts, strict=True) if count}, histogram.total


def test_gaps_are_the_time_since_the_latest_step_that_emitted_tokens_of_the_choice() -> None:
    collector, a, b = StatsCollector(), choice("a"), choice("b")
    step(collector, 1.0, (a, 10, 1), (b, 4, 0))  # the prompt of b is not complete
    assert nonzero(collector, "inter_token_latency_seconds") == ({}, 0.0)
    step(collector, 1.25, (a, 1, 1), (b, 6, 1))
    step(collector, 1.75, (a, 4, 3), (b, 1, 1))  # a emits three tokens at once
    step(collector, 2.0, (a, 1, 1))  # b is preempted
    step(collector, 61.75, (a, 1, 0), (b, 11, 1))  # a fails
    assert nonzero(collector, "inter_token_latency_seconds") == (
        {0.3: 2, 0.5: 2, 80.0: 1},
        0.25 + 0.5 + 0.5 + 0.25 + 60,
    )


def test_a_gap_on_a_bound_counts_below_it_and_a_long_one_above_all() -> None:
    collector, a = StatsCollector(), choice("a")
    for end_s in (0.0, 0.5, 1000.0):
        step(collector, end_s, (a, 1, 1))
    assert nonzero(collector, "inter_token_latency_seconds") == ({0.5: 1, float("inf"): 1}, 1000.0)


def test_rows_of_a_step_are_counted_together() -> None:
    collector, a, b = StatsCollector(), choice("a"), choice("b")
    step(collector, 1.0, (a, 10, 1), (b, 7, 0))
    step(collector, 2.0, (a, 1, 1))
    assert nonzero(collector, "iteration_tokens_total") == ({1: 1, 32: 1}, 18)


def test_prompt_tokens_are_counted_by_source_when_a_choice_is_first_scheduled() -> None:
    collector = StatsCollector()
    a, b = choice("a", 10, num_cached=4), choice("b", 100, num_cached=32, num_transferred=64)
    step(collector, 1.0, (a, 6, 1), (b, 4, 1), num_admitted=2)
    step(collector, 2.0, (a, 1, 1), (b, 1, 1))
    b.metrics.num_preemptions = 1
    step(collector, 3.0, (b, 101, 1), num_admitted=1)  # again, after a preemption
    stats = collector._stats
    assert (stats.num_computed_prompt_tokens, stats.num_cached_prompt_tokens) == (6 + 4, 4 + 32)
    assert stats.num_transferred_prompt_tokens == 64
    assert nonzero(collector, "request_prefill_kv_computed_tokens") == ({10: 1, 5: 1}, 10)


def test_tokens_of_prompts_are_counted_when_steps_compute_them() -> None:
    collector, a = StatsCollector(), choice("a", 100)
    counted = []
    for num_computed, num_rows in (
        (16, 40),  # behind a cached prefix
        (56, 44),  # the rest of the prompt
        (100, 1),
        (101, 4),  # with three drafts
        (0, 90),  # again, after a preemption
        (90, 13),  # ten tokens of the prompt and three of the output
    ):
        plan = StepPlan([ScheduledRequest(a, num_rows, num_computed, NO_DRAFT, 1)] * 2)
        collector.count_step(plan, [RequestResult()] * 2, 1.0)
        counted.append(collector._stats.num_prefilled_tokens // 2)
    assert counted == [40, 84, 84, 84, 174, 184]


def test_sources_never_exceed_the_prompt_although_resumed_tokens_may_be_cached() -> None:
    collector, a = StatsCollector(), choice("a", 10, num_cached=32, num_transferred=4)
    step(collector, 1.0, (a, 1, 1), num_admitted=1)
    stats = collector._stats
    assert (stats.num_transferred_prompt_tokens, stats.num_cached_prompt_tokens) == (4, 6)
    assert stats.num_computed_prompt_tokens == 0


def test_spread_over_experts_is_read_after_each_step() -> None:
    load = np.zeros((2, 2), np.int32)
    collector, a = StatsCollector(ExpertCounter(load, num_experts=8, num_chosen=2, layers=[1, 3])), choice("a")
    load[:] = [[6, 4], [8, 3]]
    step(collector, 1.0, (a, 10, 1))
    load[:] = [[2, 1], [2, 1]]
    step(collector, 2.0, (a, 1, 1))
    assert nonzero(collector, "moe_distinct_experts") == ({2: 1, 8: 1}, 9.0)
    assert collector._experts is not None
    assert collector._experts.stats() == ExpertStats([1, 3], [5, 4], 10 * 2 / 8 + 2 / 8)


def test_model_without_experts_counts_none() -> None:
    collector, a = StatsCollector(), choice("a")
    step(collector, 1.0, (a, 10, 1))
    assert nonzero(collector, "moe_distinct_experts") == ({}, 0.0)
