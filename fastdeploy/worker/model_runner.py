# SPDX-License-Identifier: Apache-2.0
"""Computes a step: forward over packed rows, then sampling and verification of the rows whose next token is wanted.

All that the operators of a step read is written before the first of them; where they can be captured, a step is then
two native calls in a row, its rows' hidden states and their tokens. Between them nothing is left to do that would have
to come back into the caches which the model's weights have just gone through.

Notation: B requests, R rows, L rows with logits, K most drafts of a request, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import paddle
from paddle import Tensor

from fastdeploy.core.outputs import TokenLogprobs
from fastdeploy.core.request import Request, TokenArray
from fastdeploy.core.sampling_params import MAX_LOGPROBS_LIMIT
from fastdeploy.core.step import RequestResult, StepPlan
from fastdeploy.ops.attention import AttentionMetadata, KVCache
from fastdeploy.ops.batch_index import BatchIndex, virtual_padding
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.gather import gather_rows
from fastdeploy.ops.graph import CapturedGraph
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

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv_caches: Sequence[KVCache]) -> Tensor:
        """Return hidden states [capacity, hidden] after the final norm, of which metadata.num_rows rows are valid.

        It is the same tensor every time.
        """

    def compute_logits(self, hidden: Tensor, num_rows: int, out: Tensor) -> None:
        """Write float32 logits [num_rows, V] of the first rows of `hidden`."""


class StepObserver(Protocol):
    """Learns of every step: the runner of a drafting model, whose caches have the target's blocks."""

    def begin_step(self, plan: StepPlan) -> bool:
        """Learn what is about to be computed; return whether `end_step` is wanted then."""

    def end_step(self) -> None:
        """Learn that it is computed."""


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
        verify_strategy, accept_policy: docs/guide/speculation.md.
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
    """Consecutive rows of one request whose logits are wanted: all its verification rows, or some of its prompt rows.

    For prompt rows, `position` is that of the first one. `at` is its place among the logits of its go.
    """

    plan_row: int
    count: int
    is_prompt: bool = False
    position: int = 0
    at: int = 0


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
        self.wanted_hidden = paddle.zeros([self.logits_capacity, config.hidden_size], config.dtype)
        self.logits = paddle.zeros([self.logits_capacity, config.vocab_size], "float32")
        self.sampling = SamplingBatch(self.logits_capacity)
        self.rules = RowRules(self.sampling, config.eos_token_ids, config.vocab_limit)
        self.verification = VerifyBatch(self.logits_capacity)
        self.logprob_buffers = LogprobBuffers(self.logits_capacity, MAX_LOGPROBS_LIMIT)
        # Only where a draft is accepted for being the row's token are the rows behind another token nobody's.
        self.stop_at_rejections = config.verify_strategy != "topp_relaxed" and config.accept_policy == "normal"
        self._hidden: Tensor | None = None
        self._forward = CapturedGraph(self._forward_rows, config.max_rows, config.max_seqs)
        self._choose = CapturedGraph(self._choose_tokens, self.logits_capacity, self.logits_capacity)

    def run(self, plan: StepPlan) -> list[RequestResult]:
        """Compute the plan's rows; choose the target's token of every row that wants one; accept drafts that equal it.

        Returns:
            One result per planned request, in the plan's order.
        """
        results = [RequestResult() for _ in plan.requests]
        is_watched = self.observer is not None and self.observer.begin_step(plan)
        num_rows = self._write_rows(plan)
        num_chosen = 0
        for go in _goes(plan, self.logits_capacity):
            num_wanted, judged = self._write_rules(plan, go, results)
            if num_chosen:
                self._skip_chosen(num_chosen, num_wanted)
            else:
                self._forward.run(num_rows, len(plan.requests))
            if go:
                self._choose.run(num_wanted, len(judged))
                self._read_tokens(plan, judged, results)
                self._read_logprobs(plan, go, results)
            num_chosen += num_wanted
        if self.observer is not None and is_watched:
            self.observer.end_step()
        return results

    def _forward_rows(self, num_rows: int, num_seqs: int) -> None:
        virtual_padding(self.batch.buffers, num_seqs, self.batch.block_size)
        metadata = self.batch.attention_metadata(num_rows, num_seqs)
        self._hidden = self.model.forward(self.token_ids.tensor, metadata, self.kv_caches)

    def _choose_tokens(self, num_rows: int, num_seqs: int) -> None:
        """Sample the first wanted rows, and walk the drafts of `num_seqs` requests among them."""
        assert self._hidden is not None
        gather_rows(self._hidden, self.batch.logits_rows, self.wanted_hidden, num_rows)
        self.model.compute_logits(self.wanted_hidden, num_rows, self.logits)
        sample(self.logits, self.sampling, num_rows, self.config.processed_logprobs, self.stop_at_rejections)
        self.judge_drafts(num_seqs)

    def judge_drafts(self, num_seqs: int) -> None:
        """Walk the drafts of the first `num_seqs` requests of a go, by the tokens that stand in `sampling`."""
        sampling, config = self.sampling, self.config
        self.verification.num_seqs = num_seqs
        verify_draft_tokens(
            sampling.token_ids.tensor,
            sampling.int_params.tensor,
            sampling.draft_is_allowed.tensor,
            self.verification,
            config.verify_strategy == "topp_relaxed",
            ACCEPT_POLICIES[config.accept_policy],
        )

    def sample_all_rows(self) -> None:
        """From now on also choose tokens for rows behind a rejected draft, which nobody reads."""
        self.stop_at_rejections = False
        self._choose.invalidate()

    def _write_rows(self, plan: StepPlan) -> int:
        """Write the plan's tokens and what its index arrays are made of; return the number of rows."""
        tokens, at = self.token_ids.memory, 0
        for s in plan.requests:
            count = s.num_scheduled_tokens
            tokens[at : at + count] = s.request.tokens_of_rows(s.num_computed_tokens, count)
            at += count
        self.batch.write_inputs(
            [s.num_scheduled_tokens for s in plan.requests],
            [s.num_computed_tokens for s in plan.requests],
            [s.num_prompt_logprob_rows + s.num_verify_rows for s in plan.requests],
            [s.request.block_ids for s in plan.requests],
        )
        return at

    def _skip_chosen(self, num_chosen: int, num_wanted: int) -> None:
        """Put the next wanted rows where those of the last go stood."""
        rows = self.batch.buffers.logits_rows.array
        rows[:num_wanted] = rows[num_chosen : num_chosen + num_wanted]

    def _write_rules(
        self, plan: StepPlan, go: list[_Segment], results: list[RequestResult]
    ) -> tuple[int, list[_Segment]]:
        """Write by which rules the tokens of a go's rows are chosen, and which of them are whose drafts.

        What a request's constraint raises is its result; its rows are computed all the same.

        Returns:
            The number of rows, and the segments among whose rows drafts are judged.
        """
        rules, at, judged = self.rules, 0, []
        rules.begin()
        for segment in go:
            segment.at = at
            if segment.is_prompt:
                rules.write_plain(at, segment.count)
            else:
                scheduled = plan.requests[segment.plan_row]
                try:
                    rules.write(scheduled.request, scheduled.draft, at)
                except Exception as fault:
                    results[segment.plan_row].fault = fault
                    rules.write_plain(at, segment.count)
                judged.append(segment)
            at += segment.count
        self.verification.fill([segment.at for segment in judged], [segment.count for segment in judged])
        if rules.has_lists and self.sampling.has_moved():
            self._choose.invalidate()
        return at, judged

    def _read_tokens(self, plan: StepPlan, judged: list[_Segment], results: list[RequestResult]) -> None:
        """Read off what each request emits whose verification rows these are: the tokens before the first bad row."""
        num_rows = judged[-1].at + judged[-1].count if judged else 0
        accepted = self.verification.num_accepted.memory[: len(judged)].tolist()
        emitted = self.verification.emitted.memory[:num_rows].tolist()
        status = self.sampling.status.memory[:num_rows].tolist()
        any_bad = any(status)
        for segment, num_accepted in zip(judged, accepted):
            result, first = results[segment.plan_row], segment.at
            if result.fault is not None:
                continue
            end = first + num_accepted + 1
            if any_bad and (bad := next((row for row in range(first, end) if status[row]), None)) is not None:
                _fail(result, plan.requests[segment.plan_row].request, RowStatus(status[bad]))
                num_accepted, end = bad - first, bad
            result.num_accepted = num_accepted
            result.token_ids = emitted[first:end]

    def _read_logprobs(self, plan: StepPlan, go: list[_Segment], results: list[RequestResult]) -> None:
        """Compute log-probabilities of emitted and of prompt tokens where a request asked for them."""
        for segment in go:
            request, result = plan.requests[segment.plan_row].request, results[segment.plan_row]
            if not request.wants_logprobs:
                continue
            if segment.is_prompt:
                chosen = request.token_ids[segment.position + 1 : segment.position + 1 + segment.count]
                top_n = request.params.prompt_logprobs or 0
                result.prompt_logprobs = [*result.prompt_logprobs, *self._logprobs(segment.at, chosen, top_n)]
            elif request.params.logprobs is not None:
                chosen = np.array(result.token_ids, np.int32)
                result.logprobs = self._logprobs(segment.at, chosen, request.params.logprobs)

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


def _fail(result: RequestResult, request: Request, status: RowStatus) -> None:
    """Enter why a row has no token; a constraint that cannot go on knows better."""
    result.error = ROW_ERRORS[status]
    if status is RowStatus.EMPTY:
        result.error_type = "no_token"
        if request.constraint is not None and request.constraint.error:
            result.error = f"{result.error}: {request.constraint.error}"


def _goes(plan: StepPlan, capacity: int) -> list[list[_Segment]]:
    """Cut the wanted rows into goes of at most `capacity`, in the order of the rows; only prompts are split.

    There is always one, which may be empty.
    """
    segments = _segments(plan)
    fits = sum([s.num_prompt_logprob_rows + s.num_verify_rows for s in plan.requests]) <= capacity
    return [segments] if fits else list(_cut(segments, capacity))


def _cut(segments: list[_Segment], capacity: int) -> Iterator[list[_Segment]]:
    go: list[_Segment] = []
    room = capacity
    for segment in segments:
        if segment.count > room and not segment.is_prompt:
            yield go
            go, room = [], capacity
        while segment.count > room:
            yield [*go, replace(segment, count=room)] if room else go
            segment = replace(segment, position=segment.position + room, count=segment.count - room)
            go, room = [], capacity
        go.append(segment)
        room -= segment.count
    yield go


def _segments(plan: StepPlan) -> list[_Segment]:
    """Return of each request its prompt rows, then its verification rows: its last rows, in order."""
    segments = []
    for row, s in enumerate(plan.requests):
        if s.num_prompt_logprob_rows:
            end = s.num_computed_tokens + s.num_scheduled_tokens - s.num_verify_rows
            first = end - s.num_prompt_logprob_rows
            segments.append(_Segment(row, s.num_prompt_logprob_rows, is_prompt=True, position=first))
        if s.num_verify_rows:
            segments.append(_Segment(row, s.num_verify_rows))
    return segments
