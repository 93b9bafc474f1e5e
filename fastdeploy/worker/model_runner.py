# SPDX-License-Identifier: Apache-2.0
"""Computes a step: forward over packed rows, then sampling and verification of the rows whose next token is wanted.

Notation: B requests, R rows, L rows with logits, K most drafts of a request, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import add
from typing import Protocol

import numpy as np
import paddle
from paddle import Tensor

from fastdeploy.core.outputs import TokenLogprobs
from fastdeploy.core.request import Request, TokenArray
from fastdeploy.core.sampling_params import MAX_LOGPROBS_LIMIT
from fastdeploy.core.step import RequestResult, StepPlan, StepResult
from fastdeploy.ops.attention import KVCache
from fastdeploy.ops.batch_index import BatchIndex
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.gather import gather_rows
from fastdeploy.ops.sampling import LogprobBuffers, RowStatus, SamplingBatch, logprobs, sample
from fastdeploy.ops.verify import AcceptPolicy, VerifyBatch, verify_draft_tokens
from fastdeploy.worker.row_rules import RowRules

LOGITS_BYTES = 64 << 20  # logits buffer: more rows than fit are sampled in several goes
ACCEPT_POLICIES = {policy.name.lower(): int(policy) for policy in AcceptPolicy}
ROW_ERRORS = {
    RowStatus.NAN: "the logits of a row hold NaN or infinity",
    RowStatus.EMPTY: "no token survives the request's filters and masks",
}


class CausalLM(Protocol):
    """What the runner asks of a model (models.decoder.CausalLM)."""

    def forward(self, token_ids: Tensor, batch: BatchIndex, kv_caches: Sequence[KVCache]) -> Tensor:
        """Return hidden states [capacity, hidden] after the final norm; batch.num_rows rows are valid."""

    def compute_logits(self, hidden: Tensor, num_rows: int, out: Tensor) -> None:
        """Write float32 logits [num_rows, V] of the first rows of `hidden`."""


class StepObserver(Protocol):
    """Learns of every step: the runner of a drafting model, whose caches have the target's blocks."""

    def observe(self, plan: StepPlan) -> None:
        """Learn that the plan's rows are computed."""


@dataclass(frozen=True)
class RunnerConfig:
    """Sizes of the runner's buffers and the rules of verification.

    Attributes:
        max_rows: most rows of a step (R).
        max_seqs: most requests of a step (B).
        max_blocks_per_seq, block_size: blocks of the longest context, tokens per block.
        max_drafts: most drafts of a request (K).
        hidden_size, vocab_size: of the model.
        vocab_limit: ids from here on are never chosen (the tokenizer does not know them).
        eos_token_ids: end tokens, masked before a request's min_tokens.
        verify_strategy, accept_policy: docs/speculation.md.
        processed_logprobs: report log-probabilities after processing instead of before.
    """

    max_rows: int
    max_seqs: int
    max_blocks_per_seq: int
    block_size: int
    max_drafts: int
    hidden_size: int
    vocab_size: int
    vocab_limit: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    verify_strategy: str = "topp"
    accept_policy: str = "normal"
    processed_logprobs: bool = False


@dataclass(slots=True)
class _Segment:
    """Consecutive logits rows of one request: all its verification rows, or some of its prompt rows.

    `first` is the first of them among the step's logits rows; for prompt rows, `position` is that row's position.
    """

    plan_row: int
    first: int
    count: int
    is_prompt: bool = False
    position: int = 0


class _Outcome:
    """A request's result in the making."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.num_accepted = 0
        self.logprobs: list[TokenLogprobs] | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.error = ""
        self.error_type = "numerics"

    def freeze(self) -> RequestResult:
        prompt = self.prompt_logprobs or None
        return RequestResult(self.token_ids, self.num_accepted, self.logprobs, prompt, self.error, self.error_type)


class ModelRunner:
    """Holds the model, its cache and every buffer of a step."""

    def __init__(
        self,
        model: CausalLM,
        kv_caches: Sequence[KVCache],
        config: RunnerConfig,
        observer: StepObserver | None = None,
    ) -> None:
        """Allocate the buffers.

        Args:
            observer: is told of every step.
        """
        self.model = model
        self.kv_caches = kv_caches
        self.config = config
        self.observer = observer
        self.batch = BatchIndex(config.max_rows, config.max_seqs, config.max_blocks_per_seq, config.block_size)
        self.token_ids = HostBuffer(config.max_rows, "int32")
        fitting = LOGITS_BYTES // (4 * config.vocab_size)
        self.logits_capacity = min(config.max_rows, max(fitting, 1 + config.max_drafts, 16))
        self.wanted_rows = HostBuffer(self.logits_capacity, "int32")
        self.wanted_hidden = paddle.zeros([self.logits_capacity, config.hidden_size], config.dtype)
        self.logits = paddle.zeros([self.logits_capacity, config.vocab_size], "float32")
        self.sampling = SamplingBatch(self.logits_capacity)
        self.rules = RowRules(self.sampling, config.eos_token_ids, config.vocab_limit)
        self.verification = VerifyBatch(self.logits_capacity)
        self.logprob_buffers = LogprobBuffers(self.logits_capacity, MAX_LOGPROBS_LIMIT)
        # Only where a draft is accepted for being the row's token are the rows behind another token nobody's.
        self.stop_at_rejections = config.verify_strategy != "topp_relaxed" and config.accept_policy == "normal"

    def forward(self, plan: StepPlan) -> Tensor:
        """Compute the plan's rows; return hidden states [max_rows, hidden], valid for the plan's rows."""
        tokens = self.token_ids.array
        at = 0
        for request, start, count in zip(plan.requests, plan.num_computed.tolist(), plan.num_scheduled.tolist()):
            tokens[at : at + count] = request.tokens_with_draft()[start : start + count]
            at += count
        tables = [request.block_ids for request in plan.requests]
        self.batch.fill(plan.num_scheduled, plan.num_computed, plan.num_prompt_rows + plan.num_verify_rows, tables)
        return self.model.forward(self.token_ids.tensor, self.batch, self.kv_caches)

    def verify(self, hidden: Tensor, plan: StepPlan) -> StepResult:
        """Choose the target's token of every row that wants one, and accept drafts while they equal it."""
        outcomes = [_Outcome() for _ in plan.requests]
        for go in _goes(plan, self.logits_capacity):
            self._compute_logits(hidden, go)
            self._sample(plan, go)
            self._judge(plan, [segment for segment in go if not segment.is_prompt], outcomes)
            self._read_logprobs(plan, go, outcomes)
        result = StepResult(tuple(outcome.freeze() for outcome in outcomes))
        if self.observer is not None:
            self.observer.observe(plan)
        return result

    def _compute_logits(self, hidden: Tensor, go: list[_Segment]) -> None:
        at = 0
        for segment in go:
            rows = self.batch.buffers.logits_rows.array[segment.first : segment.first + segment.count]
            self.wanted_rows.array[at : at + segment.count] = rows
            at += segment.count
        gather_rows(hidden, self.wanted_rows.tensor, self.wanted_hidden, at)
        self.model.compute_logits(self.wanted_hidden, at, self.logits)

    def _sample(self, plan: StepPlan, go: list[_Segment]) -> None:
        self.rules.begin()
        at = 0
        for segment in go:
            if segment.is_prompt:
                self.rules.write_plain(at, segment.count)
            else:
                self.rules.write(plan.requests[segment.plan_row], at, segment.count)
            at += segment.count
        sample(self.logits, self.sampling, at, self.config.processed_logprobs, self.stop_at_rejections)

    def _judge(self, plan: StepPlan, segments: list[_Segment], outcomes: list[_Outcome]) -> None:
        """Walk the verification rows, which come first in a go, and read off what each request emits."""
        if not segments:
            return
        counts = [segment.count for segment in segments]
        firsts = list(accumulate(counts[:-1], initial=0))
        sampling, batch = self.sampling, self.verification
        batch.fill(firsts, counts)
        relaxed, policy = self.config.verify_strategy == "topp_relaxed", ACCEPT_POLICIES[self.config.accept_policy]
        verify_draft_tokens(
            sampling.token_ids.tensor,
            sampling.int_params.tensor,
            sampling.draft_survives.tensor,
            batch,
            relaxed,
            policy,
        )
        num_rows = firsts[-1] + counts[-1]
        status = sampling.status.array[:num_rows].tolist()
        any_bad = any(status)
        emitted = batch.emitted.array[:num_rows].tolist()
        for segment, first, count in zip(segments, firsts, batch.num_accepted.array[: len(segments)].tolist()):
            outcome, end = outcomes[segment.plan_row], first + count + 1
            if any_bad and (bad := next(filter(None, status[first:end]), None)):
                _fail(outcome, plan.requests[segment.plan_row], RowStatus(bad))
                continue
            outcome.num_accepted = count
            outcome.token_ids = emitted[first:end]

    def _read_logprobs(self, plan: StepPlan, go: list[_Segment], outcomes: list[_Outcome]) -> None:
        """Compute log-probabilities of emitted and of prompt tokens where a request asked for them."""
        at = 0
        for segment in go:
            request, outcome = plan.requests[segment.plan_row], outcomes[segment.plan_row]
            if segment.is_prompt:
                chosen = request.token_ids[segment.position + 1 : segment.position + 1 + segment.count]
                top_n = request.params.prompt_logprobs or 0
                outcome.prompt_logprobs += self._logprobs(at, chosen, top_n)
            elif request.params.logprobs is not None:
                chosen = np.array(outcome.token_ids, np.int32)
                outcome.logprobs = self._logprobs(at, chosen, request.params.logprobs)
            at += segment.count

    def _logprobs(self, first_row: int, chosen: TokenArray, top_n: int) -> list[TokenLogprobs]:
        """Return the log-probabilities of `chosen` [n] in rows first_row, first_row + 1, ..."""
        buffers, count = self.logprob_buffers, len(chosen)
        buffers.rows.array[:count] = np.arange(first_row, first_row + count)
        buffers.chosen.array[:count] = chosen
        logprobs(self.logits, buffers.rows.tensor, buffers.chosen.tensor, count, top_n, buffers)
        top_ids, top_values = buffers.top_ids.array[:count, :top_n], buffers.top_logprobs.array[:count, :top_n]
        return [
            TokenLogprobs(token_id, value, rank, [(i, v) for i, v in zip(ids, values) if v > -math.inf])
            for token_id, value, rank, ids, values in zip(
                chosen.tolist(),
                buffers.chosen_logprob.array[:count].tolist(),
                buffers.chosen_rank.array[:count].tolist(),
                top_ids.tolist(),
                top_values.tolist(),
            )
        ]


def _fail(outcome: _Outcome, request: Request, status: RowStatus) -> None:
    """Enter why a row has no token; a constraint that cannot go on knows better."""
    outcome.error = ROW_ERRORS[status]
    if status is RowStatus.EMPTY:
        outcome.error_type = "no_token"
        if request.constraint is not None and request.constraint.error:
            outcome.error = f"{outcome.error}: {request.constraint.error}"


def _goes(plan: StepPlan, capacity: int) -> Iterator[list[_Segment]]:
    """Cut the step's logits rows into goes of at most `capacity`, verification rows first; only prompts are split."""
    go: list[_Segment] = []
    room = capacity
    for segment in _segments(plan):
        if segment.count > room and not segment.is_prompt:
            yield go
            go, room = [], capacity
        while segment.count > room:
            yield [*go, replace(segment, count=room)] if room else go
            rest = segment.count - room
            segment = replace(segment, first=segment.first + room, position=segment.position + room, count=rest)
            go, room = [], capacity
        go.append(segment)
        room -= segment.count
    if go:
        yield go


def _segments(plan: StepPlan) -> Iterator[_Segment]:
    """Yield the verification rows of all requests, then their prompt rows."""
    prompt, verify = plan.num_prompt_rows.tolist(), plan.num_verify_rows.tolist()
    firsts = [0, *accumulate(map(add, prompt, verify))]
    for row, count in enumerate(verify):
        if count:
            yield _Segment(row, firsts[row] + prompt[row], count)
    for row, count in enumerate(prompt):
        if count:
            position = int(plan.num_computed[row] + plan.num_scheduled[row]) - verify[row] - count
            yield _Segment(row, firsts[row], count, is_prompt=True, position=position)
