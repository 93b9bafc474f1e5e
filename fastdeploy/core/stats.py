# SPDX-License-Identifier: Apache-2.0
"""Counters of an engine, from its start, and its state now."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class DraftLengthStats:
    """What adaptive length does (docs/design/adaptive-length.md); all zero where it is off.

    Attributes:
        mean_length: running mean of the drafts verified per decoding request and step.
        num_rows: drafts that the latest step verified.
        num_zero_choices: steps that had drafts and verified none.
        num_withheld_tokens: draft tokens that were proposed and not verified.
        is_paused: drafting is paused because drafts have lost time.
        paused_s: seconds for which it has been paused without a break.
    """

    mean_length: float = 0.0
    num_rows: int = 0
    num_zero_choices: int = 0
    num_withheld_tokens: int = 0
    is_paused: bool = False
    paused_s: float = 0.0


@dataclass
class SuffixCacheStats:
    """What suffix decoding keeps, and how often it helped; totals grow from the engine's start.

    Attributes:
        live_bytes, shared_bytes: memory of the live requests' texts and of the finished outputs.
        num_outputs, num_tokens: finished outputs kept, and their tokens.
        num_evicted_outputs: finished outputs that left again.
        num_own_drafts, num_shared_drafts: drafts that followed a request's own text, and a finished output.
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
    """What `/metrics`, `/load` and the tests read; totals grow from the engine's start.

    `accepted_per_position[i]` counts steps that kept draft i, `drafted_per_position[i]` steps that verified one there;
    `drafted_per_source` and `accepted_per_source` count draft tokens by the proposer that made them.
    `num_forbidden_draft_tokens` were proposed and never verified, as a grammar or a reasoning budget forbade them.
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
