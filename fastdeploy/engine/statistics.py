# SPDX-License-Identifier: Apache-2.0
"""Keeps the engine's counters and each request's tally."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from fastdeploy.core.request import GenerationRequest, Request, SpeculationTally
from fastdeploy.core.stats import EngineStats

if TYPE_CHECKING:
    from fastdeploy.engine.batch_scheduler import BatchScheduler


class StatsKeeper:
    """Counts what happens; definitions in docs/glossary.md.

    Tokens and steps are counted by each request; those of requests that have ended are added up here.
    """

    def __init__(self) -> None:
        self._stats = EngineStats()
        self._ended = SpeculationTally()

    def admitted(self, request: GenerationRequest) -> None:
        """Count a request's prompt."""
        self._stats.num_prompt_tokens += len(request.prompt_token_ids)

    def finished(self, request: Request, reason: str) -> None:
        """Count an end."""
        self._stats.num_generated_tokens += request.num_output_tokens
        self._ended.add(request.all_steps())
        self._stats.num_finished[reason] = self._stats.num_finished.get(reason, 0) + 1

    def forbidden(self, num_tokens: int) -> None:
        """Count drafts that a request's constraint cut off before they cost a row."""
        self._stats.num_forbidden_draft_tokens += num_tokens

    def snapshot(self, scheduler: BatchScheduler, live: Iterable[Request]) -> EngineStats:
        """Return a copy of the counters with the state of the scheduler and of the live requests filled in."""
        pool, tally, num_tokens = scheduler.kv.pool, SpeculationTally(), self._stats.num_generated_tokens
        tally.add(self._ended)
        for request in live:
            tally.add(request.all_steps())
            num_tokens += request.num_output_tokens
        drafted_at, accepted_at = tally.drafted_at(), tally.accepted_at()
        return replace(
            self._stats,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_generated_tokens=num_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_prefix_lookup_tokens=scheduler.kv.num_lookup_tokens,
            num_prefix_hit_tokens=scheduler.kv.num_hit_tokens,
            num_steps=tally.num_steps,
            num_emitted_tokens=tally.num_emitted,
            num_drafts=sum(tally.drafted),
            num_draft_tokens=sum(drafted_at),
            num_accepted_tokens=sum(accepted_at),
            drafted_per_position=drafted_at,
            accepted_per_position=accepted_at,
            drafted_per_source=dict(tally.drafted_per_source),
            accepted_per_source=dict(tally.accepted_per_source),
            num_finished=dict(self._stats.num_finished),
            draft_length=scheduler.length_policy.stats(),
        )
