# SPDX-License-Identifier: Apache-2.0
"""Collects the engine's counters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fastdeploy.core.request import GenerationRequest, Request, SpeculationStats
from fastdeploy.core.stats import HISTOGRAM_BOUNDS, EngineStats, Histogram
from fastdeploy.core.step import RequestResult, ScheduledRequest, StepPlan
from fastdeploy.engine.expert_counter import ExpertCounter

if TYPE_CHECKING:
    from fastdeploy.engine.batch_scheduler import BatchScheduler


class StatsCollector:
    """Counts events, and adds up the counts that each request keeps itself. Definitions: docs/glossary.md."""

    def __init__(self, experts: ExpertCounter | None = None) -> None:
        """Start with zeros; `experts` counts for a model that has them."""
        self._experts = experts
        self._stats = EngineStats()
        self._finished_speculation = SpeculationStats()  # of requests that have ended
        self._histograms = {name: Histogram([0] * (len(bounds) + 1)) for name, bounds in HISTOGRAM_BOUNDS.items()}

    def count_admitted(self, request: GenerationRequest) -> None:
        """Count the prompt and the choices of a new request."""
        self._stats.num_prompt_tokens += len(request.prompt_token_ids)
        self._observe("request_params_n", request.params.n)

    def record_queue_times(self, plan: StepPlan, start_s: float) -> None:
        """Set the queue times of the choices that a step begins with; `start_s` is when it starts."""
        for scheduled in plan.requests[len(plan.requests) - plan.num_admitted :]:
            request = scheduled.request
            if request.metrics.queue_s is None:
                request.metrics.queue_s = start_s - request.arrival_s

    def count_step(self, plan: StepPlan, results: Sequence[RequestResult], end_s: float) -> None:
        """Count the rows of a step, the choices that it began with, and the time since the last tokens of each choice.

        Args:
            end_s: when the step ended.
        """
        self._observe("iteration_tokens_total", plan.num_scheduled_tokens)
        self._stats.num_prefilled_tokens += _num_prompt_rows(plan)
        if self._experts is not None:
            self._observe("moe_distinct_experts", self._experts.count(plan.num_scheduled_tokens))
        for scheduled in plan.requests[len(plan.requests) - plan.num_admitted :]:
            if scheduled.request.metrics.num_preemptions == 0:
                self._count_prefill(scheduled.request)
        self._count_gaps(plan.requests, results, end_s)

    def _count_prefill(self, request: Request) -> None:
        """Count the prompt tokens of a choice that is scheduled for the first time, by where they come from."""
        stats, metrics, num_tokens = self._stats, request.metrics, request.num_prompt_tokens
        num_transferred = min(metrics.num_transferred_tokens, num_tokens)
        num_cached = min(metrics.num_cached_tokens, num_tokens - num_transferred)
        num_computed = num_tokens - num_transferred - num_cached
        stats.num_transferred_prompt_tokens += num_transferred
        stats.num_cached_prompt_tokens += num_cached
        stats.num_computed_prompt_tokens += num_computed
        self._observe("request_prefill_kv_computed_tokens", num_computed)

    def _count_gaps(
        self, scheduled: Sequence[ScheduledRequest], results: Sequence[RequestResult], end_s: float
    ) -> None:
        """Observe the time since the step before that emitted tokens of a choice; most choices share that step."""
        num_choices: dict[float, int] = {}  # by the time of that step
        for item, result in zip(scheduled, results):
            if result.token_ids:
                request = item.request
                if (last_s := request.last_tokens_s) is not None:
                    num_choices[last_s] = num_choices.get(last_s, 0) + 1
                request.last_tokens_s = end_s
        for last_s, count in num_choices.items():
            self._observe("inter_token_latency_seconds", end_s - last_s, count)

    def _observe(self, name: str, value: float, count: int = 1) -> None:
        histogram = self._histograms[name]
        histogram.counts[bisect_left(HISTOGRAM_BOUNDS[name], value)] += count
        histogram.total += count * value

    def count_finished(self, request: Request, finish_reason: str) -> None:
        """Count a choice that has ended, and its tokens."""
        self._stats.num_generated_tokens += request.num_output_tokens
        self._finished_speculation.add(request.decoding_stats())
        self._observe("request_num_preemptions", request.metrics.num_preemptions)
        self._stats.num_finished[finish_reason] = self._stats.num_finished.get(finish_reason, 0) + 1

    def count_forbidden(self, num_tokens: int) -> None:
        """Count proposed tokens that a constraint forbids."""
        self._stats.num_forbidden_draft_tokens += num_tokens

    def collect(self, scheduler: BatchScheduler, requests: Iterable[Request]) -> EngineStats:
        """Return the counters, including those of the unfinished `requests`, and the scheduler's state."""
        speculation, num_tokens = SpeculationStats(), self._stats.num_generated_tokens
        speculation.add(self._finished_speculation)
        for request in requests:
            if request.num_tokens == request.num_prompt_tokens:
                continue  # nothing to count, as for most waiting requests
            speculation.add(request.decoding_stats())
            num_tokens += request.num_output_tokens
        drafted, accepted = speculation.drafted_per_position(), speculation.accepted_per_position()
        kv_cache = scheduler.kv_cache_manager
        return replace(
            self._stats,
            num_running=len(scheduler.running),
            num_waiting=scheduler.shares.num_waiting,
            clients=scheduler.shares.loads(),
            num_blocks=kv_cache.pool.num_blocks,
            num_free_blocks=kv_cache.pool.num_free,
            resident_cache_bytes=kv_cache.pool.resident_bytes,
            num_generated_tokens=num_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_prefix_lookup_tokens=kv_cache.num_lookup_tokens,
            num_prefix_hit_tokens=kv_cache.num_hit_tokens,
            num_steps=speculation.num_steps,
            num_emitted_tokens=speculation.num_emitted,
            num_drafts=sum(speculation.drafted),
            num_draft_tokens=sum(drafted),
            num_accepted_tokens=sum(accepted),
            drafted_per_position=drafted,
            accepted_per_position=accepted,
            drafted_per_source=dict(speculation.drafted_per_source),
            accepted_per_source=dict(speculation.accepted_per_source),
            num_finished=dict(self._stats.num_finished),
            draft_length=scheduler.length_policy.stats(),
            experts=None if self._experts is None else self._experts.stats(),
            histograms={name: Histogram(list(h.counts), h.total) for name, h in self._histograms.items()},
        )


def _num_prompt_rows(plan: StepPlan) -> int:
    """Return the rows of a step that compute tokens of prompts."""
    return sum(
        [
            min(scheduled.num_scheduled_tokens, scheduled.request.num_prompt_tokens - scheduled.num_computed_tokens)
            for scheduled in plan.requests
            if scheduled.num_computed_tokens < scheduled.request.num_prompt_tokens
        ]
    )
