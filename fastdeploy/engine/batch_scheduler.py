# SPDX-License-Identifier: Apache-2.0
"""Decides which rows the next step computes.

One rule holds for every request: compute the tokens that are not in the cache yet (`num_pending` tokens and the draft),
as many as the token budget of the step and the free blocks allow. Long prompts are therefore prefilled in chunks.
Drafts are never split over two steps.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

from fastdeploy.config.engine_config import SchedulerConfig
from fastdeploy.core.faults import fault_point
from fastdeploy.core.length_policy import LengthPolicy
from fastdeploy.core.request import NO_DRAFT, Request, RequestStatus
from fastdeploy.core.step import RequestResult, ScheduledRequest, StepPlan
from fastdeploy.kv_cache.manager import KVCacheManager

MIN_PREFILL_ROWS = 64  # beside decoding requests; with fewer rows, the matrix units would wait for the weights
MAX_DECODE_STALL_S = 0.05  # that more prefill rows than this may add to a step; streams are written as often
RATE_WEIGHT = 0.5  # of a step in the running mean of rows per second


class BatchScheduler:
    """Holds the waiting and the running requests and plans one step at a time.

    `waiting` and `running` are sorted by priority, then by arrival. Requests get blocks in that order, decoding
    requests before those that prefill. If there are no free blocks, the last running request that is not scheduled in
    this step yet is preempted: its blocks are freed and it waits again.

    In a step with decoding requests, the number of prefill rows is limited to the number of their rows, to
    MIN_PREFILL_ROWS, or to what takes MAX_DECODE_STALL_S, whichever is most. A new prompt therefore delays the next
    tokens of other requests by the time of about one more step, or by a time that is not noticeable.
    """

    def __init__(
        self, config: SchedulerConfig, kv_cache_manager: KVCacheManager, length_policy: LengthPolicy | None = None
    ) -> None:
        self.config = config
        self.kv_cache_manager = kv_cache_manager
        self.length_policy = length_policy or LengthPolicy()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._num_arrivals = 0
        self._rows_per_s = 0.0  # of steps with at least MIN_PREFILL_ROWS rows; 0 before the first

    def add(self, request: Request) -> None:
        """Add a new request to the waiting queue."""
        request.arrival_number = self._num_arrivals
        self._num_arrivals += 1
        insort(self.waiting, request, key=_priority_key)

    def finish(self, request: Request) -> None:
        """Remove a waiting or running request and free its blocks."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        self.kv_cache_manager.free(request)

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None if there is nothing to compute."""
        scheduled: list[ScheduledRequest] = []
        budget, num_preemptions, num_admitted = self.config.max_num_batched_tokens, self.num_preemptions, 0
        decoding = [r for r in self.running if r.num_pending == 1]
        prefilling = [r for r in self.running if r.num_pending > 1] if len(decoding) < len(self.running) else []
        self.length_policy.trim_drafts(decoding, self._expected_prefill_rows(prefilling) if prefilling else 0)
        budget = self._schedule_running(scheduled, decoding, budget)
        if prefilling or self.waiting:
            if scheduled and self.config.enable_chunked_prefill:
                num_decode_rows = self.config.max_num_batched_tokens - budget
                budget = min(budget, max(self._prefill_budget(), num_decode_rows))
            budget = self._schedule_running(scheduled, prefilling, budget)
            if self.num_preemptions == num_preemptions:
                num_admitted = self._schedule_waiting(scheduled, budget)
        return StepPlan(scheduled, num_admitted) if scheduled else None

    def commit(self, scheduled: ScheduledRequest, result: RequestResult, emitted: list[int]) -> None:
        """Update a request after a step; `emitted` is the result's tokens, truncated at the first stop.

        Of the verification rows, only those count as computed whose sampled token is part of the result: a rejected
        draft is not part of the text, and the keys and values of a row with an error may be NaN.
        """
        request = scheduled.request
        request.append(emitted)
        fault_point("commit", request.request_id)
        num_rejected = scheduled.num_verify_rows - len(result.token_ids)
        num_computed = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens - num_rejected
        request.num_computed = min(num_computed, request.num_tokens)
        self.kv_cache_manager.commit(request)

    def record_step_time(self, plan: StepPlan, step_s: float) -> None:
        """Update the rate at which prompts are expected to be prefilled."""
        num_rows = plan.num_scheduled_tokens
        if num_rows >= MIN_PREFILL_ROWS and step_s > 0:
            rows_per_s = num_rows / step_s
            self._rows_per_s += (rows_per_s - self._rows_per_s) * (RATE_WEIGHT if self._rows_per_s else 1)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every allocated block belongs to exactly the requests that list it."""
        self.kv_cache_manager.check_integrity([*self.running, *self.waiting])

    def _schedule_running(self, scheduled: list[ScheduledRequest], requests: list[Request], budget: int) -> int:
        """Schedule running requests; return the rest of the budget."""
        for request in requests:
            if budget > 0 and request.status is RequestStatus.RUNNING:
                planned = self._plan_rows(request, budget)
                if planned is not None and self._reserve_blocks(planned, scheduled):
                    scheduled.append(planned)
                    budget -= planned.num_scheduled_tokens
        return budget

    def _reserve_blocks(self, planned: ScheduledRequest, scheduled: list[ScheduledRequest]) -> bool:
        """Reserve the blocks of a running request; preempt others, or itself and return False, if none are free."""
        request, num_tokens = planned.request, planned.num_computed_tokens + planned.num_scheduled_tokens
        while not self.kv_cache_manager.reserve(request, num_tokens):
            last = next(r for r in reversed(self.running) if all(s.request is not r for s in scheduled))
            self._preempt(last)
            if last is request:
                return False
        return True

    def _schedule_waiting(self, scheduled: list[ScheduledRequest], budget: int) -> int:
        """Admit waiting requests, in order, while all their known tokens fit into the cache; return their number."""
        num_admitted = 0
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            if self._prefix_is_being_computed(request):
                break
            self.kv_cache_manager.match_prefix(request)
            planned = self._plan_rows(request, budget)
            if planned is None or not self.kv_cache_manager.can_hold(request):
                self.kv_cache_manager.free(request)
                break
            self.kv_cache_manager.reserve(request, request.num_computed + planned.num_scheduled_tokens)
            self.waiting.popleft()
            self.kv_cache_manager.count_lookup(request)
            request.status = RequestStatus.RUNNING
            insort(self.running, request, key=_priority_key)
            scheduled.append(planned)
            num_admitted += 1
            budget -= planned.num_scheduled_tokens
        return num_admitted

    def _expected_prefill_rows(self, prefilling: list[Request]) -> int:
        """Return how many prefill rows the next step will probably have beside the rows of decoding requests."""
        num_pending = sum(r.num_pending for r in prefilling)
        if self.config.enable_chunked_prefill:
            return min(num_pending, self._prefill_budget())
        return min(num_pending, self.config.max_num_batched_tokens)

    def _prefill_budget(self) -> int:
        """Return how many prefill rows a step may have beside few rows of decoding requests."""
        return max(MIN_PREFILL_ROWS, int(self._rows_per_s * MAX_DECODE_STALL_S))

    def _prefix_is_being_computed(self, request: Request) -> bool:
        """Return whether another choice of the same request still computes the blocks that this one can share."""
        if not self.kv_cache_manager.enable_prefix_caching:
            return False
        if request.num_prompt_tokens <= self.kv_cache_manager.block_size:
            return False
        return any(r.request_id == request.request_id and r.num_output_tokens == 0 for r in self.running)

    def _plan_rows(self, request: Request, budget: int) -> ScheduledRequest | None:
        """Plan at most `budget` rows of a request; None if it has to wait.

        A draft is truncated. A prompt is split into chunks, or has to wait if chunked prefill is disabled.
        """
        num_computed, num_pending = request.num_computed, request.num_pending
        if num_pending == 1:
            draft = request.draft
            if len(draft) >= budget:
                draft = draft.cut(budget - 1)
            num_rows = 1 + len(draft)
            return ScheduledRequest(request, num_rows, num_computed, draft, num_rows)
        if self.config.enable_chunked_prefill:
            num_rows = min(num_pending, budget, self.config.long_prefill_token_threshold or num_pending)
        elif num_pending <= budget:
            num_rows = num_pending
        else:
            return None
        num_verify_rows = 1 if num_rows == num_pending else 0
        num_logprob_rows = _num_prompt_logprob_rows(request, num_rows)
        return ScheduledRequest(request, num_rows, num_computed, NO_DRAFT, num_verify_rows, num_logprob_rows)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        request.status = RequestStatus.WAITING
        request.metrics.num_preemptions += 1
        self.kv_cache_manager.free(request)
        insort(self.waiting, request, key=_priority_key)
        self.num_preemptions += 1


def _priority_key(request: Request) -> tuple[int, int]:
    """Return the sort key of the queues: lower values are scheduled first."""
    return request.priority, request.arrival_number


def _num_prompt_logprob_rows(request: Request, num_rows: int) -> int:
    """Return how many rows of a prefill chunk, its last ones, predict prompt tokens without a log-probability yet."""
    if request.params.prompt_logprobs is None:
        return 0
    first = max(request.num_computed, len(request.prompt_logprobs))
    return max(0, min(request.num_computed + num_rows, request.num_prompt_tokens - 1) - first)
