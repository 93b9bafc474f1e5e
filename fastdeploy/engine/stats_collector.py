# SPDX-License-Identifier: Apache-2.0
"""Collects the engine's counters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from fastdeploy.core.request import GenerationRequest, Request, SpeculationStats
from fastdeploy.core.stats import EngineStats

if TYPE_CHECKING:
    from fastdeploy.engine.batch_scheduler import BatchScheduler


class StatsCollector:
    """Counts events, and adds up the counts that each request keeps itself. Definitions: docs/glossary.md."""

    def __init__(self) -> None:
        self._stats = EngineStats()
        self._finished_speculation = SpeculationStats()  # of requests that have ended

    def count_admitted(self, request: GenerationRequest) -> None:
        """Count the prompt of a new request."""
        self._stats.num_prompt_tokens += len(request.prompt_token_ids)

    def count_finished(self, request: Request, finish_reason: str) -> None:
        """Count a choice that has ended, and its tokens."""
        self._stats.num_generated_tokens += request.num_output_tokens
        self._finished_speculation.add(request.decoding_stats())
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
            num_blocks=kv_cache.pool.num_blocks,
            num_free_blocks=kv_cache.pool.num_free,
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
        )
