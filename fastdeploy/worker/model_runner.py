# SPDX-License-Identifier: Apache-2.0
"""Computes a step: the forward pass over packed rows, then sampling and verification of the rows with logits.

Everything that the operators of a step read is written before the first of them runs, so that the step is two calls in
a row, each of which replays a captured graph: rows to hidden states, hidden states to tokens. Python code between them
would be slow, because the model's weights have evicted it from the processor's caches.

B requests, R rows, L rows with logits, K drafts of a request at most, V ids in the vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import paddle
from paddle import Tensor

from fastdeploy.core.faults import fault_point
from fastdeploy.core.request import Request
from fastdeploy.core.step import RequestResult, StepPlan
from fastdeploy.ops.attention import AttentionMetadata
from fastdeploy.ops.batch_index import BatchIndex, shift_logits_rows, virtual_padding
from fastdeploy.ops.block_moves import BlockRegion
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.caches import LayerCache
from fastdeploy.ops.experts import ExpertLoad
from fastdeploy.ops.gather import gather_rows
from fastdeploy.ops.graph import CapturedGraph
from fastdeploy.ops.input_checks import InputLimits, check_row_ranges
from fastdeploy.ops.registry import selected_backend
from fastdeploy.ops.sampling import RowStatus, SamplingBatch, sample
from fastdeploy.ops.verify import AcceptPolicy, VerifyBatch, verify_draft_tokens
from fastdeploy.worker.logits_batches import LogitsRange, split_logits_batches
from fastdeploy.worker.logprob_reader import LogprobQuery, LogprobReader
from fastdeploy.worker.sampling_metadata import SamplingMetadata

LOGITS_BYTES = 64 << 20  # of the logits buffer; a step with more rows than fit has several logits batches
ACCEPT_POLICIES = {policy.name.lower(): int(policy) for policy in AcceptPolicy}
ROW_ERRORS = {
    RowStatus.NAN: "the logits of a row hold NaN or infinity",
    RowStatus.EMPTY: "no token survives the request's filters and masks",
}

logger = logging.getLogger("fastdeploy.engine")


class CausalLM(Protocol):
    """What the runner needs of a model (models.decoder.CausalLM).

    Attributes:
        expert_load: how the rows of the last step were spread over experts; None if all layers are dense.
    """

    expert_load: ExpertLoad | None

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv_caches: Sequence[LayerCache]) -> Tensor:
        """Return hidden states [capacity, H] after the final norm, of which the first metadata.num_rows are valid.

        Every call returns the same tensor.
        """

    def compute_logits(self, hidden: Tensor, num_rows: int, out: Tensor) -> None:
        """Write float32 logits [num_rows, V] of the first rows of `hidden`."""


class StepObserver(Protocol):
    """The runner of a drafting model, whose caches use the same blocks as the target's."""

    def begin_step(self, plan: StepPlan) -> bool:
        """Prepare for a step that is about to run; return whether `end_step` must be called after it."""

    def end_step(self) -> None:
        """Continue after the step."""

    def reset(self) -> None:
        """Forget what has been computed, because a call raised, and make no drafts before the next step."""


@dataclass(frozen=True)
class RunnerConfig:
    """Sizes of the runner's buffers and the rules of verification.

    Attributes:
        max_rows: maximum number of rows of a step (R).
        max_seqs: maximum number of requests of a step (B).
        max_model_len: tokens of the longest context.
        block_size: tokens of a KV block.
        max_drafts: maximum number of drafts of a request (K).
        hidden_size, vocab_size: of the model.
        vocab_limit: ids from this one on are never sampled, because the tokenizer does not have them.
        eos_token_ids: end tokens, masked until a request has its min_tokens.
        verify_strategy, accept_policy: docs/guide/speculation.md.
        processed_logprobs: report log-probabilities of the processed instead of the raw logits.
    """

    max_rows: int
    max_seqs: int
    max_model_len: int
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

    @property
    def max_blocks_per_seq(self) -> int:
        """Return the number of blocks of the longest context."""
        return -(-self.max_model_len // self.block_size)

    def limits_of(self, kv_cache: LayerCache) -> InputLimits:
        """Return what the rows of a step with such caches may refer to."""
        return InputLimits(self.vocab_size, kv_cache.num_blocks, self.max_model_len)


def max_logits_rows(config: RunnerConfig) -> int:
    """Return for how many sequences the logits of drafts are computed at once."""
    return min(config.max_seqs, max(LOGITS_BYTES // (4 * config.vocab_size), 1))


class ModelRunner:
    """Owns the model, its KV cache and the buffers of a step."""

    def __init__(
        self,
        model: CausalLM,
        kv_caches: Sequence[LayerCache],
        config: RunnerConfig,
        observer: StepObserver | None = None,
    ) -> None:
        """Allocate the buffers.

        Args:
            observer: called before and after each step.
        """
        self.model = model
        self.kv_caches = kv_caches
        self.config = config
        self.observer = observer
        self.batch = BatchIndex(config.max_rows, config.max_seqs, config.max_blocks_per_seq, config.block_size)
        self.token_ids = HostBuffer(config.max_rows, "int32")
        max_logits_rows = LOGITS_BYTES // (4 * config.vocab_size)
        self.logits_capacity = min(config.max_rows, max(max_logits_rows, 1 + config.max_drafts, 16))
        self.logits_hidden = paddle.zeros([self.logits_capacity, config.hidden_size], config.dtype)
        self.logits = paddle.zeros([self.logits_capacity, config.vocab_size], "float32")
        self.sampling = SamplingBatch(self.logits_capacity)
        self.sampling_metadata = SamplingMetadata(self.sampling, config.eos_token_ids, config.vocab_limit)
        self.verification = VerifyBatch(self.logits_capacity)
        self.logprob_reader = LogprobReader(self.logits)
        # Rows after a rejected draft need no token, if a draft is rejected whenever it differs from the row's token.
        self.stop_at_rejections = config.verify_strategy != "topp_relaxed" and config.accept_policy == "normal"
        self._limits = config.limits_of(kv_caches[0])
        self._backend = selected_backend()
        self._shares_memory = self._backend.shares_memory
        self._hidden: Tensor | None = None
        self._forward = CapturedGraph(self._forward_rows, config.max_rows, config.max_seqs)
        self._sample_and_verify = CapturedGraph(
            self._sample_and_verify_rows, self.logits_capacity, self.logits_capacity
        )

    def run(self, plan: StepPlan) -> list[RequestResult]:
        """Compute the rows of a step, sample the target's tokens and accept the drafts that equal them.

        Returns:
            One result per scheduled request, in the plan's order.
        """
        results = [RequestResult() for _ in plan.requests]
        fault_point("run")
        calls_end_step = self.observer is not None and self._begin_step(self.observer, plan)
        num_rows = self._write_inputs(plan)
        num_sampled = 0
        for logits_batch in split_logits_batches(plan, self.logits_capacity):
            num_logits, verified = self.write_sampling_metadata(plan, logits_batch, results)
            if not self._shares_memory:
                self._upload(0 if num_sampled else num_rows, len(plan.requests), num_logits)
            if num_sampled:
                shift_logits_rows(self.batch.buffers, num_sampled, num_logits)
            else:
                self._forward.run(num_rows, len(plan.requests))
            if logits_batch:
                self._sample_and_verify.run(num_logits, len(verified))
                if not self._shares_memory:
                    self._download(num_logits, len(verified))
                self._read_tokens(plan, verified, results)
                self._read_logprobs(plan, logits_batch, results)
            num_sampled += num_logits
        self._backend.synchronize()  # the next step overwrites the inputs
        if self.observer is not None and calls_end_step:
            self._end_step(self.observer)
        return results

    def block_regions(self) -> list[BlockRegion]:
        """Describe the blocks of the KV caches."""
        num_blocks = self.kv_caches[0].num_blocks
        return [r for cache in self.kv_caches for r in self._backend.block_regions(cache, num_blocks)]

    def verify_drafts(self, num_seqs: int) -> None:
        """Verify the drafts of the first `num_seqs` requests of a logits batch with the tokens in `sampling`."""
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
        """From now on also sample tokens in rows after a rejected draft (benchmarks)."""
        self.stop_at_rejections = False
        self._sample_and_verify.invalidate()

    def write_sampling_metadata(
        self, plan: StepPlan, logits_batch: list[LogitsRange], results: list[RequestResult]
    ) -> tuple[int, list[LogitsRange]]:
        """Write the sampling metadata of a logits batch and the row range of each request that is verified.

        An exception raised by a request's constraint becomes part of its result; its rows are computed anyway.

        Returns:
            The number of rows, and the ranges of verification rows.
        """
        metadata, first_row, verified = self.sampling_metadata, 0, list[LogitsRange]()
        metadata.begin_batch()
        for rows in logits_batch:
            rows.first_row = first_row
            if rows.is_prompt:
                metadata.write_unused(first_row, rows.num_rows)
            else:
                scheduled = plan.requests[rows.request_index]
                try:
                    metadata.write(scheduled.request, scheduled.draft, first_row)
                except Exception as exception:
                    results[rows.request_index].exception = exception
                    metadata.write_unused(first_row, rows.num_rows)
                verified.append(rows)
            first_row += rows.num_rows
        self.verification.fill([rows.first_row for rows in verified], [rows.num_rows for rows in verified])
        if metadata.has_lists and self.sampling.has_moved():
            self._sample_and_verify.invalidate()
        return first_row, verified

    def _begin_step(self, observer: StepObserver, plan: StepPlan) -> bool:
        """Call the observer before a step; return whether it must be called after it."""
        try:
            fault_point("observe")
            return observer.begin_step(plan)
        except Exception as exception:
            _reset(observer, exception)
            return False

    def _end_step(self, observer: StepObserver) -> None:
        try:
            observer.end_step()
        except Exception as exception:
            _reset(observer, exception)

    def _forward_rows(self, num_rows: int, num_seqs: int) -> None:
        virtual_padding(self.batch.buffers, num_seqs, self.batch.block_size)
        metadata = self.batch.attention_metadata(num_rows, num_seqs)
        self._hidden = self.model.forward(self.token_ids.tensor, metadata, self.kv_caches)

    def _sample_and_verify_rows(self, num_rows: int, num_seqs: int) -> None:
        """Sample the first rows with logits and verify the drafts of `num_seqs` requests among them."""
        assert self._hidden is not None
        gather_rows(self._hidden, self.batch.logits_rows, self.logits_hidden, num_rows)
        self.model.compute_logits(self.logits_hidden, num_rows, self.logits)
        sample(self.logits, self.sampling, num_rows, self.config.processed_logprobs, self.stop_at_rejections)
        self.verify_drafts(num_seqs)

    def _write_inputs(self, plan: StepPlan) -> int:
        """Write the plan's tokens and the inputs of its index arrays; return the number of rows."""
        token_ids, num_rows = self.token_ids.memory, 0
        for s in plan.requests:
            end = num_rows + s.num_scheduled_tokens
            token_ids[num_rows:end] = s.request.tokens_of_rows(s.num_computed_tokens, s.num_scheduled_tokens)
            num_rows = end
        self.batch.write_inputs(
            [s.num_scheduled_tokens for s in plan.requests],
            [s.num_computed_tokens for s in plan.requests],
            [s.num_prompt_logprob_rows + s.num_verify_rows for s in plan.requests],
            [s.request.block_ids for s in plan.requests],
        )
        return num_rows

    def _upload(self, num_rows: int, num_seqs: int, num_logits: int) -> None:
        """Check what the host has written and send it to the device, before the first launch of a logits batch.

        Args:
            num_rows: rows of the step; 0 if they have been sent with an earlier batch.
            num_logits: rows with logits of this batch.

        Raises:
            ValueError: an id, a position or a count is out of range.
        """
        if num_rows:
            self._limits.check_rows(self.batch, self.token_ids, num_seqs)
            self.token_ids.upload(num_rows)
            self.batch.upload(num_seqs)
        if num_logits:
            check_row_ranges(self.verification)
            self.sampling.upload(num_logits)
            self.verification.upload()

    def _download(self, num_logits: int, num_verified: int) -> None:
        """Fetch the results of a logits batch and wait for them, after its last launch."""
        self.sampling.download(num_logits)
        self.verification.download(num_verified, num_logits)
        self._backend.synchronize()

    def _read_tokens(self, plan: StepPlan, verified: list[LogitsRange], results: list[RequestResult]) -> None:
        """Read the emitted tokens of each verified request: those before its first row that could not be sampled."""
        num_rows = verified[-1].first_row + verified[-1].num_rows if verified else 0
        accepted = self.verification.num_accepted.memory[: len(verified)].tolist()
        emitted = self.verification.emitted.memory[:num_rows].tolist()
        status = self.sampling.status.memory[:num_rows].tolist()
        any_bad = any(status)
        for rows, num_accepted in zip(verified, accepted):
            result, first = results[rows.request_index], rows.first_row
            if result.exception is not None:
                continue
            end = first + num_accepted + 1
            if any_bad and (bad := next((row for row in range(first, end) if status[row]), None)) is not None:
                _set_error(result, plan.requests[rows.request_index].request, RowStatus(status[bad]))
                num_accepted, end = bad - first, bad
            result.num_accepted = num_accepted
            result.token_ids = emitted[first:end]

    def _read_logprobs(self, plan: StepPlan, logits_batch: list[LogitsRange], results: list[RequestResult]) -> None:
        """Compute log-probabilities of emitted tokens and of prompt tokens, where they are requested, in one call.

        An exception that concerns one request becomes part of its result.
        """
        wanted, queries = list[LogitsRange](), list[LogprobQuery]()
        for rows in logits_batch:
            request, result = plan.requests[rows.request_index].request, results[rows.request_index]
            if not request.wants_logprobs or result.exception is not None:
                continue
            try:
                query = _logprob_query(request, rows, result)
            except Exception as exception:
                result.exception = exception
                continue
            if query is not None:
                wanted.append(rows)
                queries.append(query)
        for rows, found in zip(wanted, self.logprob_reader.read(queries) if queries else ()):
            result = results[rows.request_index]
            if rows.is_prompt:
                result.prompt_logprobs = [*result.prompt_logprobs, *found]
            else:
                result.logprobs = found


def _logprob_query(request: Request, rows: LogitsRange, result: RequestResult) -> LogprobQuery | None:
    """Return the log-probabilities that a request wants of some of its rows."""
    fault_point("logprobs", request.request_id)
    params = request.params
    if rows.is_prompt:
        next_tokens = request.token_ids[rows.position + 1 : rows.position + 1 + rows.num_rows]
        return LogprobQuery(rows.first_row, next_tokens, params.prompt_logprobs or 0)
    if params.logprobs is None:
        return None
    return LogprobQuery(rows.first_row, np.array(result.token_ids, np.int32), params.logprobs, params.logprob_token_ids)


def _reset(observer: StepObserver, exception: Exception) -> None:
    logger.error("the drafting model failed; this step has no drafts", exc_info=exception)
    observer.reset()


def _set_error(result: RequestResult, request: Request, status: RowStatus) -> None:
    """Set why a row could not be sampled, with the reason of the request's constraint if it has one."""
    result.error = ROW_ERRORS[status]
    if status is RowStatus.EMPTY:
        result.error_type = "no_token"
        if request.constraint is not None and request.constraint.error:
            result.error = f"{result.error}: {request.constraint.error}"
