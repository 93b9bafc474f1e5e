# SPDX-License-Identifier: Apache-2.0
"""Counters and state of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class DraftLengthStats:
    """State of adaptive length (docs/design/adaptive-length.md); all zero if it is off.

    Attributes:
        mean_length: running mean of the number of drafts verified per decoding request and step.
        num_rows: number of drafts that the latest step verified.
        num_zero_choices: steps for which drafts were proposed, but that verified none.
        num_withheld_tokens: draft tokens that were proposed, but not verified.
        is_paused: whether drafting is paused.
        paused_s: seconds since drafting was paused.
    """

    mean_length: float = 0.0
    num_rows: int = 0
    num_zero_choices: int = 0
    num_withheld_tokens: int = 0
    is_paused: bool = False
    paused_s: float = 0.0


@dataclass
class SuffixCacheStats:
    """Contents and use of the suffix cache.

    Attributes:
        live_bytes, shared_bytes: memory of the contexts of unfinished requests, and of cached outputs.
        num_outputs, num_tokens: number of cached outputs and of their tokens.
        num_evicted_outputs: number of outputs evicted since the start.
        num_own_drafts, num_shared_drafts: number of drafts since the start that continue a match in the request's own
            context, and a match in a cached output.
    """

    live_bytes: int = 0
    shared_bytes: int = 0
    num_outputs: int = 0
    num_tokens: int = 0
    num_evicted_outputs: int = 0
    num_own_drafts: int = 0
    num_shared_drafts: int = 0


@dataclass
class EngineStats:
    """Counters since the engine's start, and its current state; `/metrics` and `/load` show them.

    Attributes:
        num_drafts: number of decoding steps that verified a draft.
        num_forbidden_draft_tokens: proposed tokens that a grammar or a reasoning budget forbids; they are not verified.
        drafted_per_position, accepted_per_position: [i] number of steps that verified, and that accepted, draft i.
        drafted_per_source, accepted_per_source: number of draft tokens by source.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_prefix_lookup_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_forbidden_draft_tokens: int = 0
    num_emitted_tokens: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    drafted_per_source: dict[str, int] = field(default_factory=dict)
    accepted_per_source: dict[str, int] = field(default_factory=dict)
    suffix_cache: SuffixCacheStats | None = None
    num_finished: dict[str, int] = field(default_factory=dict)
    draft_length: DraftLengthStats = field(default_factory=DraftLengthStats)
