# SPDX-License-Identifier: Apache-2.0
"""The ledger that the engine keeps for each choice of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np

from fastdeploy.core.constraint import TokenArray as TokenArray
from fastdeploy.core.constraint import TokenConstraint
from fastdeploy.core.generation_request import GenerationRequest as GenerationRequest
from fastdeploy.core.outputs import RequestMetrics, TokenLogprobs
from fastdeploy.core.sampling_params import MATCH


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed to follow a request's last token.

    Attributes:
        token_ids: possibly empty. A list, because NumPy calls are slow after a step that has evicted the caches.
        source: the proposer that the tokens came from, as reported in metrics.
        sources: the source of each token, if there are several; else empty.
        match_len: match length, the number of tokens before the draft that also occur earlier; 0 without a match.
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
        """Return the source of each token."""
        return list(self.sources) or [self.source] * len(self)


NO_DRAFT = Draft([])


class DraftQuota(NamedTuple):
    """Limits of what is proposed for a request.

    Attributes:
        max_drafts: maximum number of draft tokens, at least 1.
        max_draft_passes: maximum number of draft passes of a drafting model for this request.
        min_match_len: minimum match length of drafts, except those that continue the drafts of a model; 0 uses the
            minimum of the proposer.
    """

    max_drafts: int
    max_draft_passes: int
    min_match_len: int = 0


class RequestStatus(Enum):
    """State of a request in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class SpeculationStats:
    """Counts of decoding steps, of one request or of all requests.

    The counts that a request keeps include only steps that verify drafts; see `Request.decoding_stats`. Accepted drafts
    after a stop are not counted.

    Attributes:
        drafted, accepted: [n] number of steps that verified, and that accepted, n drafts, of the steps with drafts.
        drafted_per_source, accepted_per_source: number of draft tokens by source.
    """

    num_steps: int = 0
    num_emitted: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted_per_source: dict[str, int] = field(default_factory=dict)
    accepted_per_source: dict[str, int] = field(default_factory=dict)

    def record_step(self, draft: Draft, num_accepted: int, num_emitted: int) -> None:
        """Count a decoding step that verified `draft`, which is not empty."""
        self.num_steps += 1
        self.num_emitted += num_emitted
        num_drafted = len(draft)
        if num_drafted >= len(self.drafted):
            self._resize(num_drafted + 1)
        self.drafted[num_drafted] += 1
        self.accepted[num_accepted] += 1
        _count_sources(self.drafted_per_source, draft, num_drafted)
        _count_sources(self.accepted_per_source, draft, num_accepted)

    def add(self, other: SpeculationStats) -> None:
        """Add the counts of `other`."""
        self.num_steps += other.num_steps
        self.num_emitted += other.num_emitted
        self._resize(len(other.drafted))
        for num_tokens, (drafted, accepted) in enumerate(zip(other.drafted, other.accepted)):
            self.drafted[num_tokens] += drafted
            self.accepted[num_tokens] += accepted
        for counts, added in (
            (self.drafted_per_source, other.drafted_per_source),
            (self.accepted_per_source, other.accepted_per_source),
        ):
            for source, num_tokens in added.items():
                counts[source] = counts.get(source, 0) + num_tokens

    def drafted_per_position(self) -> list[int]:
        """Return, for each position of a draft, in how many steps a draft token there was verified."""
        return _per_position(self.drafted)

    def accepted_per_position(self) -> list[int]:
        """Return, for each position of a draft, in how many steps the draft token there was accepted."""
        return _per_position(self.accepted)

    def _resize(self, num_counts: int) -> None:
        missing = [0] * (num_counts - len(self.drafted))
        self.drafted += missing
        self.accepted += missing


def _count_sources(counts: dict[str, int], draft: Draft, num_tokens: int) -> None:
    if not draft.sources:
        counts[draft.source] = counts.get(draft.source, 0) + num_tokens
    for i, source in enumerate(draft.sources):
        counts[source] = counts.get(source, 0) + (i < num_tokens)


def _per_position(num_steps: list[int]) -> list[int]:
    """Return, for i = 0, 1, ..., the number of steps with more than i tokens; num_steps[n] is that with n tokens."""
    return [sum(num_steps[length:]) for length in range(1, len(num_steps))]


@dataclass
class PromptLogprobs:
    """The log-probabilities of a prompt: its choices compute each once, and the first one with output reports them.

    Attributes:
        num_requested: number of prompt tokens after the first; 0 if no log-probabilities are requested.
        entries: of prompt tokens 1, 2, ..., as far as a choice has computed them.
    """

    num_requested: int
    entries: list[TokenLogprobs] = field(default_factory=list)
    _is_reported: bool = False

    @property
    def num_missing(self) -> int:
        """Number of log-probabilities that no choice has computed yet."""
        return self.num_requested - len(self.entries)

    def report(self) -> list[TokenLogprobs | None] | None:
        """Return one entry per prompt token, None for the first; None if they have been reported."""
        if self._is_reported:
            return None
        self._is_reported = True
        return [None, *self.entries]


class Prompt:
    """What the choices of a request share of their prompt.

    Attributes:
        token_ids: [num_prompt_tokens] int32, read-only.
        logprobs: its log-probabilities.
    """

    __slots__ = ("logprobs", "token_ids")

    def __init__(self, source: GenerationRequest) -> None:
        self.token_ids: TokenArray = np.array(source.prompt_token_ids, np.int32)
        self.token_ids.flags.writeable = False
        self.logprobs = PromptLogprobs(0 if source.params.prompt_logprobs is None else len(self.token_ids) - 1)


class Request:
    """The ledger of one choice: everything that the scheduler needs to plan its next step.

    A step computes `num_tokens + len(draft) - num_computed` tokens, as many as the budget allows; there are no phases.

    Set at admission: request_id, index, key (both of them, unique among the unfinished choices), params, seed,
        num_resumed_tokens (output that was emitted before, elsewhere; with it the ledger begins),
        hands_over, cache_salt, priority, client_id, client_name, client_weight, arrival_s, deadline_s,
        num_prompt_tokens, max_total_tokens, max_drafts, constraint, bad_words, wants_logprobs, is_prefill_only (it
        emits no token).
    Set by the scheduler: status, and arrival_number, which counts the choices that were added.
    Set by commit: num_tokens (prompt + emitted), num_computed (tokens whose keys and values are in the cache),
        num_first_tokens (the resumed ones and those of the step that ends the prefill), bad_words_state, speculation.
    Set by the collector of statistics: last_tokens_s, the end of the latest step that emitted tokens.
    Set by the proposer, and trimmed by the length policy before a step is planned: draft.
    Set by the KV cache manager: block_ids, block_hashes, num_published_blocks.
    Shared with the other choices: prompt_logprobs.
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
        prompt: Prompt | None = None,
        resumed: Sequence[int] = (),
    ) -> None:
        """Create the ledger of choice `index`.

        Args:
            max_total_tokens: maximum number of prompt and emitted tokens, at most the context length.
            max_drafts: maximum number of drafts of a step; there is room for them after the last token.
            arrival_s: when the engine got the request, on its clock; metrics count from `source.arrived_s` if given.
            constraint: constraint of this choice alone.
            prompt: of `source`, which the choices share; None makes one for this choice.
            resumed: the output so far.
        """
        self.request_id, self.index = self.key = (source.request_id, index)
        self.params, self.seed = source.params, seed
        self.cache_salt = source.cache_salt
        self.priority = source.priority
        self.client_id, self.client_name = source.client_id, source.client_name
        self.client_weight = source.client_weight
        self.arrival_number = 0
        self.arrival_s = arrival_s if source.arrived_s is None else min(source.arrived_s, arrival_s)
        self.deadline_s = None if source.timeout_s is None else arrival_s + source.timeout_s
        self.hands_over = source.hands_over
        prompt = prompt or Prompt(source)
        self.num_prompt_tokens = len(prompt.token_ids)
        self.max_total_tokens, self.max_drafts = max_total_tokens, max_drafts
        self.drafts_by_model = source.params.speculative is None or source.params.speculative.method != MATCH
        self.constraint = constraint
        self.bad_words = source.bad_words
        self.bad_words_state = source.prompt_bad_words_state

        self._buffer = prompt.token_ids  # the prompt that all choices share, until the first token is written
        self._memory: memoryview = self._buffer.data  # reads and writes of a step are faster here
        self._owns_buffer = False
        self.num_tokens = self.num_prompt_tokens
        self.num_resumed_tokens = self.num_first_tokens = len(resumed)
        self.num_computed = 0
        self.draft = NO_DRAFT
        self.status = RequestStatus.WAITING

        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_published_blocks = 0

        self.prompt_logprobs = prompt.logprobs
        self.is_prefill_only = source.params.max_tokens == 0
        self.wants_logprobs = source.params.logprobs is not None or source.params.prompt_logprobs is not None
        self.metrics, self.speculation = RequestMetrics(), SpeculationStats()
        self.last_tokens_s: float | None = None
        if resumed:
            self.append(resumed)

    @property
    def num_output_tokens(self) -> int:
        """Number of emitted tokens."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Number of tokens that are known but not in the cache yet, without the draft."""
        return self.num_tokens - self.num_computed

    @property
    def draft_room(self) -> int:
        """Maximum number of drafts in the next step: the token after them must fit, too."""
        return max(0, min(self.max_drafts, self.max_total_tokens - self.num_tokens - 1))

    @property
    def token_ids(self) -> TokenArray:
        """[num_tokens] int32 view of prompt and emitted tokens."""
        return self._buffer[: self.num_tokens]

    @property
    def prompt_token_ids(self) -> TokenArray:
        """[num_prompt_tokens] int32 view of the prompt."""
        return self._buffer[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> TokenArray:
        """[num_output_tokens] int32 view of the emitted tokens."""
        return self._buffer[self.num_prompt_tokens : self.num_tokens]

    def set_draft(self, draft: Draft) -> None:
        """Store `draft` after the last token, where the next step reads it."""
        if not self._owns_buffer:
            self._allocate_buffer()
        self.draft = draft
        for position, token_id in enumerate(draft.token_ids, self.num_tokens):
            self._memory[position] = token_id

    def tokens_with_draft(self, draft: Draft) -> TokenArray:
        """[num_tokens + len(draft)] int32 view; `draft` is this request's draft or its beginning."""
        return self._buffer[: self.num_tokens + len(draft)]

    def tokens_of_rows(self, start: int, count: int) -> memoryview:
        """[count] int32 view of the tokens and the draft from position `start` on."""
        return self._memory[start : start + count]

    def tokens_since(self, start: int) -> memoryview:
        """[num_tokens - start] int32 view of the tokens, without the draft, from position `start` on."""
        return self._memory[start : self.num_tokens]

    def decoding_stats(self) -> SpeculationStats:
        """Return the counts of all decoding steps, which exclude the step that ends the prefill.

        Every step that `speculation` does not count had no drafts and emitted one token.
        """
        stats = SpeculationStats()
        stats.add(self.speculation)
        num_without_drafts = self.num_output_tokens - self.num_first_tokens - stats.num_emitted
        stats.num_steps += num_without_drafts
        stats.num_emitted += num_without_drafts
        return stats

    def append(self, token_ids: Sequence[int]) -> None:
        """Append emitted tokens and drop the draft."""
        if not self._owns_buffer:
            self._allocate_buffer()
        for token_id in token_ids:
            self._memory[self.num_tokens] = token_id
            self.num_tokens += 1
        if self.bad_words is not None:
            self.bad_words_state = self.bad_words.advance(self.bad_words_state, token_ids)
        self.draft = NO_DRAFT

    def reset_computed(self) -> None:
        """Record that nothing is in the cache (preemption): all tokens will be computed again."""
        self.num_computed = 0
        self.draft = NO_DRAFT
        self.block_ids = []
        self.num_published_blocks = 0

    def _allocate_buffer(self) -> None:
        """Copy the prompt into a buffer with room for all tokens, which a waiting request does not need."""
        buffer: TokenArray = np.empty(self.max_total_tokens + self.max_drafts + 1, np.int32)
        buffer[: self.num_tokens] = self._buffer
        self._buffer, self._memory, self._owns_buffer = buffer, buffer.data, True
