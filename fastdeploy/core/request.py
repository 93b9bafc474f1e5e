# SPDX-License-Identifier: Apache-2.0
"""The ledger that the engine keeps for each choice of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np

from fastdeploy.core.constraint import TokenArray as TokenArray
from fastdeploy.core.constraint import TokenConstraint
from fastdeploy.core.generation_request import GenerationRequest as GenerationRequest
from fastdeploy.core.outputs import RequestMetrics, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed to follow a request's last token.

    Attributes:
        token_ids: possibly empty. A list: arrays are dear behind a step that has emptied the caches.
        source: the proposer that made them, as reported in metrics.
        sources: of each token, where several proposers made one draft; else empty.
        match_len: tokens before them that were found to occur earlier; 0 for a source that does not match.
    """

    token_ids: list[int]
    source: str = ""
    sources: tuple[str, ...] = ()
    match_len: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    def cut(self, length: int) -> Draft:
        """Return the first `length` tokens of this draft."""
        if length >= len(self):
            return self
        return (
            Draft(self.token_ids[:length], self.source, self.sources[:length], self.match_len) if length else NO_DRAFT
        )

    def source_of_each(self) -> list[str]:
        """Return the proposer of each token."""
        return list(self.sources) or [self.source] * len(self)


NO_DRAFT = Draft([])


class DraftQuota(NamedTuple):
    """What may be proposed for a request.

    Attributes:
        max_drafts: draft tokens, at least 1.
        max_draft_passes: passes of a drafting model for this request.
        min_match_len: shortest match, in tokens, that is drafted from; behind drafts of a model any match is. 0 leaves
            it to the proposer.
    """

    max_drafts: int
    max_draft_passes: int
    min_match_len: int = 0


class RequestStatus(Enum):
    """Where a request stands in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class SpeculationTally:
    """Counts of decoding steps, one request's or all requests'.

    A request's own counts only those that verify drafts: every other one emits a token, see `Request.all_steps`.
    A step whose text ended at a kept draft counts no token after it.

    Attributes:
        drafted, accepted: [n] steps that verified, and that kept, n drafts, of the steps that had any.
        drafted_per_source, accepted_per_source: draft tokens, by the proposer that made them.
    """

    num_steps: int = 0
    num_emitted: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted_per_source: dict[str, int] = field(default_factory=dict)
    accepted_per_source: dict[str, int] = field(default_factory=dict)

    def record(self, draft: Draft, num_accepted: int, num_emitted: int) -> None:
        """Add one decoding step, which verified this draft."""
        self.num_steps += 1
        self.num_emitted += num_emitted
        num_drafted = len(draft)
        if not num_drafted:
            return
        if num_drafted >= len(self.drafted):
            self._reserve(num_drafted + 1)
        self.drafted[num_drafted] += 1
        self.accepted[num_accepted] += 1
        _count_sources(self.drafted_per_source, draft, num_drafted)
        _count_sources(self.accepted_per_source, draft, num_accepted)

    def add(self, other: SpeculationTally) -> None:
        """Add the steps that another tally has counted."""
        self.num_steps += other.num_steps
        self.num_emitted += other.num_emitted
        self._reserve(len(other.drafted))
        for num_tokens, (drafted, accepted) in enumerate(zip(other.drafted, other.accepted)):
            self.drafted[num_tokens] += drafted
            self.accepted[num_tokens] += accepted
        for counts, added in (
            (self.drafted_per_source, other.drafted_per_source),
            (self.accepted_per_source, other.accepted_per_source),
        ):
            for source, num_tokens in added.items():
                counts[source] = counts.get(source, 0) + num_tokens

    def _reserve(self, num_counts: int) -> None:
        missing = [0] * (num_counts - len(self.drafted))
        self.drafted += missing
        self.accepted += missing

    def drafted_at(self) -> list[int]:
        """Return, for each position of a draft, how many steps verified one there."""
        return _at_least(self.drafted)

    def accepted_at(self) -> list[int]:
        """Return, for each position of a draft, how many steps kept the one there."""
        return _at_least(self.accepted)


def _count_sources(counts: dict[str, int], draft: Draft, num_tokens: int) -> None:
    if not draft.sources:
        counts[draft.source] = counts.get(draft.source, 0) + num_tokens
    for i, source in enumerate(draft.sources):
        counts[source] = counts.get(source, 0) + (i < num_tokens)


def _at_least(steps: list[int]) -> list[int]:
    """Return, for i = 0, 1, ..., the steps of more than i tokens."""
    return [sum(steps[length:]) for length in range(1, len(steps))]


class Request:
    """One choice's ledger: everything the scheduler needs to plan its next step.

    A step computes `num_tokens + len(draft) - num_computed` tokens, as many as the budget allows; there are no phases.

    Set at admission: request_id, index, key (both of them, unique among the choices in flight), params, seed,
        cache_salt, priority, arrival_s, deadline_s, num_prompt_tokens, max_total_tokens, max_drafts, constraint,
        wants_logprobs.
    Set by the scheduler: arrival_number, its place among all requests that were queued.
    Set by commit: num_tokens (prompt + emitted), num_computed (tokens whose keys and values are in the cache),
        num_first_tokens (emitted by the step that read the prompt's last token), tally.
    Set by the proposer, trimmed by the length policy before a step is planned: draft.
    Set by the KV manager: block_ids, block_hashes, num_published_blocks.
    Gathered over its prompt chunks, if asked for: prompt_logprobs, of prompt tokens 1, 2, ...
    """

    def __init__(
        self,
        source: GenerationRequest,
        index: int,
        seed: int,
        max_total_tokens: int,
        max_drafts: int,
        arrival_s: float = 0.0,
        constraint: TokenConstraint | None = None,
    ) -> None:
        """Make the ledger of choice `index`.

        Args:
            max_total_tokens: prompt + most emitted tokens, at most the context length.
            max_drafts: most drafts of a step (room behind the last token).
            arrival_s: the engine's clock at arrival.
            constraint: what may be emitted, for this choice alone.
        """
        self.request_id = source.request_id
        self.index = index
        self.key = (source.request_id, index)
        self.params = source.params
        self.seed = seed
        self.cache_salt = source.cache_salt
        self.priority = source.priority
        self.arrival_number = 0
        self.arrival_s = arrival_s
        self.deadline_s = None if source.timeout_s is None else arrival_s + source.timeout_s
        self.num_prompt_tokens = len(source.prompt_token_ids)
        self.max_total_tokens = max_total_tokens
        self.max_drafts = max_drafts
        self.constraint = constraint

        self._buffer: TokenArray = np.empty(max_total_tokens + max_drafts + 1, np.int32)
        self._memory: memoryview = self._buffer.data  # what a step writes and reads, cheaper than NumPy
        self._buffer[: self.num_prompt_tokens] = source.prompt_token_ids
        self.num_tokens = self.num_prompt_tokens
        self.num_first_tokens = 0
        self.num_computed = 0
        self.draft = NO_DRAFT
        self.status = RequestStatus.WAITING

        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_published_blocks = 0

        self.prompt_logprobs: list[TokenLogprobs] = []
        self.wants_logprobs = source.params.logprobs is not None or source.params.prompt_logprobs is not None
        self.metrics = RequestMetrics()
        self.tally = SpeculationTally()

    @property
    def num_output_tokens(self) -> int:
        """Tokens emitted so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Tokens that are known but not yet in the cache, the draft not counted."""
        return self.num_tokens - self.num_computed

    @property
    def draft_room(self) -> int:
        """Most drafts that can still matter: the token after them must fit too."""
        return max(0, min(self.max_drafts, self.max_total_tokens - self.num_tokens - 1))

    @property
    def token_ids(self) -> TokenArray:
        """[num_tokens] int32 view of prompt and emitted tokens."""
        return self._buffer[: self.num_tokens]

    @property
    def output_token_ids(self) -> TokenArray:
        """[num_output_tokens] int32 view of the emitted tokens."""
        return self._buffer[self.num_prompt_tokens : self.num_tokens]

    def set_draft(self, draft: Draft) -> None:
        """Store `draft` behind the last token, where the step reads it."""
        self.draft = draft
        for at, token_id in enumerate(draft.token_ids, self.num_tokens):
            self._memory[at] = token_id

    def tokens_with_draft(self, draft: Draft) -> TokenArray:
        """[num_tokens + len(draft)] int32 view; `draft` is this request's draft or its beginning."""
        return self._buffer[: self.num_tokens + len(draft)]

    def tokens_of_rows(self, start: int, count: int) -> memoryview:
        """[count] int32 view of the tokens, the draft's among them, from position `start` on."""
        return self._memory[start : start + count]

    def tokens_since(self, start: int) -> memoryview:
        """[num_tokens - start] int32 view of the prompt's and the emitted tokens from position `start` on."""
        return self._memory[start : self.num_tokens]

    def all_steps(self) -> SpeculationTally:
        """Return the counts of all decoding steps; the one that reads the prompt's end is none."""
        tally = SpeculationTally()
        tally.add(self.tally)
        num_undrafted = self.num_output_tokens - self.num_first_tokens - tally.num_emitted
        tally.num_steps += num_undrafted
        tally.num_emitted += num_undrafted
        return tally

    def append(self, token_ids: list[int]) -> None:
        """Append emitted tokens; the draft is spent."""
        for token_id in token_ids:
            self._memory[self.num_tokens] = token_id
            self.num_tokens += 1
        self.draft = NO_DRAFT

    def reset_computed(self) -> None:
        """Forget what is in the cache (preemption): the tokens will be computed again."""
        self.num_computed = 0
        self.draft = NO_DRAFT
        self.block_ids = []
        self.num_published_blocks = 0
