# SPDX-License-Identifier: Apache-2.0
"""Counters and state of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec


@dataclass
class DraftLengthStats:
    """State of adaptive length (docs/design/adaptive-length.md); all zero if it is off.

    Attributes:
        mean_length: running mean of the number of drafts verified per decoding request and step.
        num_rows: number of drafts that the latest step verified.
        num_zero_choices: steps for which drafts were proposed, but that verified none.
        num_withheld_tokens: draft tokens that were proposed, but not verified.
        is_paused: whether drafting is paused.
        num_requests: number of requests of the latest step that could have drafts.
        paused_s: seconds since drafting was paused.
    """

    mean_length: float = 0.0
    num_rows: int = 0
    num_zero_choices: int = 0
    num_withheld_tokens: int = 0
    is_paused: bool = False
    num_requests: int = 0
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
class ExpertStats:
    """How the rows of steps were spread over the experts of the target's sparse layers; sums over all steps.

    Attributes:
        layers: index of each sparse layer in the decoder.
        largest_loads: for each of these layers, the rows of the expert that has most of them.
        mean_load: the rows of an expert, as the mean of all experts of a layer; it is the same in every layer.
    """

    layers: list[int] = field(default_factory=list)
    largest_loads: list[int] = field(default_factory=list)
    mean_load: float = 0.0


@dataclass
class ClientLoad:
    """Sequences of one API key in the engine."""

    num_running: int = 0
    num_waiting: int = 0


@dataclass
class NodeStats:
    """What the agent of a node reports: its place in the cluster and its transfers, since its start.

    Attributes:
        node, role: its name and present role (`draining` included).
        is_redis_up: whether its commands reach Redis.
        nodes: number of live nodes of the group by role, itself included.
        queue_length: tickets that stand in Redis, by stage.
        num_held: tickets that it has, by state.
        num_foreign: requests of other nodes' owners that it has.
        num_orphaned: requests that it ended because their owner was gone.
        num_slots: slots of the arena, all of them.
        num_filling_slots, num_leased_slots: of these, slots that are being filled or read, and slots of images that
            others may still fetch.
        num_redis_commands: commands sent to Redis.
        resident_bytes: memory of the agent's process.
        transferred_bytes: by connector and direction (`in`, `out`).
        transfer_s: seconds spent in transfers, and their number, by connector.
        transfer_failures: by connector and reason.
        recomputed_tokens: tokens of handed-over contexts that were computed again, by reason.
        handover_s: seconds from the decision to hand over until the image was ready, and their number.
    """

    node: str = ""
    role: str = ""
    is_redis_up: bool = False
    nodes: dict[str, int] = field(default_factory=dict)
    queue_length: dict[str, int] = field(default_factory=dict)
    num_held: dict[str, int] = field(default_factory=dict)
    num_foreign: int = 0
    num_orphaned: int = 0
    num_slots: int = 0
    num_filling_slots: int = 0
    num_leased_slots: int = 0
    num_redis_commands: int = 0
    resident_bytes: int = 0
    transferred_bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    transfer_s: dict[str, tuple[float, int]] = field(default_factory=dict)
    transfer_failures: dict[str, dict[str, int]] = field(default_factory=dict)
    recomputed_tokens: dict[str, int] = field(default_factory=dict)
    handover_s: tuple[float, int] = (0.0, 0)


_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
HISTOGRAM_BOUNDS: dict[str, tuple[float, ...]] = {
    "inter_token_latency_seconds": (
        *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
        *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    ),
    "iteration_tokens_total": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "request_prefill_kv_computed_tokens": _TOKENS,
    "request_num_preemptions": (0, 1, 2, 3, 5, 10, 20, 50),
    "request_params_n": (1, 2, 5, 10, 20, 50, 100),
    "moe_distinct_experts": (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512),
}
"""Histogram that the engine keeps -> the upper bounds of its buckets."""


class Histogram(msgspec.Struct, array_like=True, gc=False):
    """Observed values.

    Attributes:
        counts: [i] number of values above bound i - 1 and not above bound i; the last one is those above all bounds.
        total: sum of the values.
    """

    counts: list[int]
    total: float = 0.0


@dataclass
class EngineStats:
    """Counters since the engine's start, and its current state; `/metrics` and `/load` show them.

    Attributes:
        num_waiting_tokens: prompt tokens of waiting and running requests that have still to be computed; 0 without a
            cluster.
        num_blocks: KV blocks, fewer than planned if memory was short when they should have been used.
        resident_cache_bytes: memory that KV blocks have taken so far; None if the whole cache has taken its own.
        resident_bytes: memory of the engine's process; 0 if the engine has no process of its own.
        num_imported_tokens: tokens whose keys and values came from other nodes.
        num_computed_prompt_tokens, num_cached_prompt_tokens, num_transferred_prompt_tokens: prompt tokens of scheduled
            choices, whose keys and values are computed, or come from the prefix cache, or from other nodes.
        num_prefilled_tokens: prompt tokens that steps have computed so far, again after a preemption.
        histograms: those of `HISTOGRAM_BOUNDS`, by name; a missing one is empty.
        num_failed_blocks: number of blocks that did not come from other nodes as they should have, by reason.
        node: what the agent reports; None without one.
        clients: the load of each API key that has any, by its name; requests of addresses are not in it.
        num_drafts: number of decoding steps that verified a draft.
        num_forbidden_draft_tokens: proposed tokens that a grammar or a reasoning budget forbids; they are not verified.
        drafted_per_position, accepted_per_position: [i] number of steps that verified, and that accepted, draft i.
        drafted_per_source, accepted_per_source: number of draft tokens by source.
        experts: None if the model has none.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    resident_cache_bytes: int | None = None
    resident_bytes: int = 0
    num_imported_tokens: int = 0
    num_failed_blocks: dict[str, int] = field(default_factory=dict)
    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_computed_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_transferred_prompt_tokens: int = 0
    num_prefilled_tokens: int = 0
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
    histograms: dict[str, Histogram] = field(default_factory=dict)
    experts: ExpertStats | None = None
    node: NodeStats | None = None
    clients: dict[str, ClientLoad] = field(default_factory=dict)

    @property
    def cache_usage(self) -> float:
        """Fraction of the KV blocks that are in use, 0 to 1."""
        return (self.num_blocks - self.num_free_blocks) / self.num_blocks if self.num_blocks else 0.0
