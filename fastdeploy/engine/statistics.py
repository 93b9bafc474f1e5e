# SPDX-License-Identifier: Apache-2.0
"""Keeps the engine's counters and each request's tally."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fastdeploy.core.request import GenerationRequest, Request
from fastdeploy.core.stats import EngineStats
from fastdeploy.core.step import RequestResult

if TYPE_CHECKING:
    from fastdeploy.engine.batch_scheduler import BatchScheduler
    from fastdeploy.engine.output_processor import Emission


class StatsKeeper:
    """Counts what happens; definitions in docs/glossary.md."""

    def __init__(self) -> None:
        self._stats = EngineStats()

    def admitted(self, request: GenerationRequest) -> None:
        """Count a request's prompt."""
        self._stats.num_prompt_tokens += len(request.prompt_token_ids)

    def finished(self, reason: str) -> None:
        """Count an end."""
        self._stats.num_finished[reason] = self._stats.num_finished.get(reason, 0) + 1

    def emitted(self, request: Request, result: RequestResult, emission: Emission) -> None:
        """Count one request's part in a step; call before the ledger takes the tokens.

        The token that the prompt's last row emits is no decoding step. Where the text ends at an accepted draft, the
        drafts behind it count as drafted and not as accepted.
        """
        count = len(emission.token_ids)
        self._stats.num_generated_tokens += count
        if not count or request.num_output_tokens == 0:
            return
        num_accepted = min(result.num_accepted, count)
        drafted_by = request.draft.source_of_each()
        request.tally.record(drafted_by, num_accepted, count)
        self._count_drafts(drafted_by, num_accepted, count)

    def forbidden(self, num_tokens: int) -> None:
        """Count drafts that a request's constraint cut off before they cost a row."""
        self._stats.num_forbidden_draft_tokens += num_tokens

    def snapshot(self, scheduler: BatchScheduler) -> EngineStats:
        """Return a copy of the counters with the scheduler's state filled in."""
        pool = scheduler.kv.pool
        return replace(
            self._stats,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_preemptions=scheduler.num_preemptions,
            num_prefix_lookup_tokens=scheduler.kv.num_lookup_tokens,
            num_prefix_hit_tokens=scheduler.kv.num_hit_tokens,
            drafted_per_position=list(self._stats.drafted_per_position),
            accepted_per_position=list(self._stats.accepted_per_position),
            drafted_per_source=dict(self._stats.drafted_per_source),
            accepted_per_source=dict(self._stats.accepted_per_source),
            num_finished=dict(self._stats.num_finished),
            draft_budget=scheduler.draft_budget.stats(),
        )

    def _count_drafts(self, drafted_by: list[str], num_accepted: int, num_emitted: int) -> None:
        stats, num_drafted = self._stats, len(drafted_by)
        stats.num_steps += 1
        stats.num_emitted_tokens += num_emitted
        stats.num_drafts += num_drafted > 0
        stats.num_draft_tokens += num_drafted
        stats.num_accepted_tokens += num_accepted
        while len(stats.drafted_per_position) < num_drafted:
            stats.drafted_per_position.append(0)
            stats.accepted_per_position.append(0)
        for i, source in enumerate(drafted_by):
            is_accepted = i < num_accepted
            stats.drafted_per_position[i] += 1
            stats.accepted_per_position[i] += is_accepted
            stats.drafted_per_source[source] = stats.drafted_per_source.get(source, 0) + 1
            stats.accepted_per_source[source] = stats.accepted_per_source.get(source, 0) + is_accepted
