# SPDX-License-Identifier: Apache-2.0
"""Decides which rows the next step computes.

One rule holds for every request: compute the tokens that are not in the cache yet (`num_pending` tokens and the draft),
as many as the token budget of the step and the free blocks allow. Long prompts are therefore prefilled in chunks.
Drafts are never split over two steps.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

from fastdeploy.config.engine_config import SchedulerConfig
from fastdeploy.core.faults import fault_point
from fastdeploy.core.length_policy import LengthPolicy
from fastdeploy.core.request import NO_DRAFT, Request, RequestStatus
from fastdeploy.core.step import RequestResult, ScheduledRequest, StepPlan
from fastdeploy.engine.fair_share import Client, ClientShares, priority_key
from fastdeploy.kv_cache.manager import KVCacheManager

MIN_PREFILL_ROWS = 64  # beside decoding requests; with fewer rows, the matrix units would wait for the weights
MAX_DECODE_STALL_S = 0.05  # that more prefill rows than this may add to a step; streams are written as often
RATE_WEIGHT = 0.5  # of a step in the running mean of rows per second


@dataclass(slots=True)
class _PartialPlan:
    """The step that is being planned.

    Attributes:
        budget: number of rows that it may still get; negative if drafts of admitted requests have exceeded it.
        num_withheld: number of rows beyond the budget that prompts must not use, but drafts of admitted requests may.
        is_shared: whether there are several clients.
        running: requests that were running before.
        admitted: requests that waited until this step.
        preempted: clients of preempted requests.
    """

    budget: int
    is_shared: bool
    num_withheld: int = 0
    running: list[ScheduledRequest] = field(default_factory=list)
    admitted: list[ScheduledRequest] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)

    def preempt(self, request: Request) -> None:
        """Remove the rows of a request, if it has any."""
        self.preempted.add(request.client_id)
        self.running = [s for s in self.running if s.request is not request]
        self.admitted = [s for s in self.admitted if s.request is not request]


class BatchScheduler:
    """Holds the waiting and the running requests and plans one step at a time.

    The requests of one client are served by priority, then in order of arrival. Decoding requests get rows before those
    that prefill. Between clients, `ClientShares` decides whose prompt is next and who gives up blocks.

    If there are no free blocks, the last running request of the client that holds most blocks by weight is preempted:
    its blocks are freed and it waits again. If that is the client that needs the blocks, those of its requests that
    have rows in this step already are kept, as are requests of clients that hold less.

    In a step with decoding requests, the number of prefill rows is limited to the number of their rows, to
    `min_prefill_rows`, or to what takes MAX_DECODE_STALL_S, whichever is most. A new prompt therefore delays the next
    tokens of other requests by the time of about one more step, or by a time that is not noticeable.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache_manager: KVCacheManager,
        length_policy: LengthPolicy | None = None,
        min_prefill_rows: int = MIN_PREFILL_ROWS,
    ) -> None:
        """Start without requests."""
        self.config = config
        self.kv_cache_manager = kv_cache_manager
        self.length_policy = length_policy or LengthPolicy()
        self.shares = ClientShares(config, kv_cache_manager)
        self.running: list[Request] = []  # sorted by priority, then by arrival
        self.num_preemptions = 0
        self._num_arrivals = 0
        self._min_prefill_rows = min_prefill_rows
        self._rows_per_s = 0.0  # of steps with at least so many rows; 0 before the first

    @property
    def waiting(self) -> list[Request]:
        """The waiting requests: each client's own in order, one client after the other."""
        return self.shares.waiting

    def add(self, request: Request) -> None:
        """Add a new request to the waiting queue."""
        request.arrival_number = self._num_arrivals
        self._num_arrivals += 1
        self.shares.add(request, self.running)

    def finish(self, request: Request) -> None:
        """Remove a waiting or running request and free its blocks."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        if request.status is not RequestStatus.FINISHED:
            self.shares.remove(request)
        request.status = RequestStatus.FINISHED
        self.kv_cache_manager.free(request)

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None if there is nothing to compute."""
        plan = _PartialPlan(self.config.max_num_batched_tokens, self.shares.has_several)
        decoding = [r for r in self.running if r.num_pending == 1]
        prefilling = [r for r in self.running if r.num_pending > 1] if len(decoding) < len(self.running) else []
        self.length_policy.trim_drafts(decoding, self._expected_prefill_rows(prefilling) if prefilling else 0)
        self._schedule_decoding(decoding, plan, bool(prefilling))
        if prefilling or self.shares.num_waiting:
            if plan.running and self.config.enable_chunked_prefill:
                num_decode_rows = self.config.max_num_batched_tokens - plan.budget
                plan.num_withheld = max(0, plan.budget - max(self._prefill_budget(), num_decode_rows))
                plan.budget -= plan.num_withheld
            self._schedule_prompts(prefilling, plan)
        scheduled = plan.running + plan.admitted
        if not scheduled and self._free_imported():  # waiting requests hold the blocks that the first of them needs
            return self.schedule()
        return StepPlan(scheduled, len(plan.admitted)) if scheduled else None

    def oversized(self) -> list[Request]:
        """Return the waiting requests that the whole cache cannot hold, because it has ended for lack of memory."""
        if not self.kv_cache_manager.pool.is_cut:
            return []
        return [request for request in self.waiting if not self.kv_cache_manager.can_ever_hold(request)]

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
        if num_rows >= self._min_prefill_rows and step_s > 0:
            rows_per_s = num_rows / step_s
            self._rows_per_s += (rows_per_s - self._rows_per_s) * (RATE_WEIGHT if self._rows_per_s else 1)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every allocated block belongs to exactly the requests that list it."""
        self.kv_cache_manager.check_integrity([*self.running, *self.waiting])
        self.shares.check_integrity(self.running)

    def _schedule_decoding(self, decoding: list[Request], plan: _PartialPlan, has_begun_prompts: bool) -> None:
        """Schedule decoding requests; if there are several clients, leave some rows for the prompts of others."""
        num_reserved = 0
        if plan.is_shared:
            can_admit = self.shares.num_waiting > 0 and len(self.running) < self.config.max_num_seqs
            if has_begun_prompts or can_admit:
                num_reserved = min(self._min_prefill_rows, plan.budget // 2)
            if sum(1 + len(r.draft) for r in decoding) > plan.budget - num_reserved:
                decoding = self.shares.sort(decoding)
        plan.budget -= num_reserved
        for request in decoding:
            self._schedule_running(request, plan)
        plan.budget += num_reserved

    def _schedule_prompts(self, prefilling: list[Request], plan: _PartialPlan) -> None:
        """Schedule the prompts of one client after the other: those that are begun, then waiting requests, in order.

        If a request waits until others end, other clients may be admitted before it until they have been served as many
        rows more than its client as the request needs. A client of which a request was preempted in this step is not
        admitted another one.
        """
        begun: dict[str, deque[Request]] = {}
        for request in prefilling:
            begun.setdefault(request.client_id, deque()).append(request)
        clients = enumerate(self.shares.clients_with_prompts(begun))
        heap = [(client.served, position, client) for position, client in clients]
        heapify(heap)
        max_served = inf
        while heap and plan.budget > 0:
            _, position, client = heappop(heap)
            if own := begun.get(client.client_id):
                self._schedule_running(own.popleft(), plan)
            else:
                can_admit = len(self.running) < self.config.max_num_seqs and client.client_id not in plan.preempted
                if not (client.waiting and can_admit and client.served <= max_served):
                    continue
                if (limit := self._admit(client, plan)) is not None:
                    max_served = min(max_served, limit)
                    continue
            heappush(heap, (client.served, position, client))

    def _schedule_running(self, request: Request, plan: _PartialPlan) -> None:
        """Schedule a running request if the budget allows, unless it has been preempted in this step."""
        if plan.budget > 0 and request.status is RequestStatus.RUNNING:
            planned = self._plan_rows(request, plan.budget)
            if planned is not None and self._reserve_blocks(planned, plan):
                plan.running.append(planned)
                plan.budget -= planned.num_scheduled_tokens
                if plan.is_shared:
                    self.shares.charge(request, planned.num_scheduled_tokens)

    def _admit(self, client: Client, plan: _PartialPlan) -> float | None:
        """Admit the first waiting request of a client if all its known tokens fit into the cache.

        Returns:
            None if it is admitted, else up to which counter other clients may be admitted before it: any if it waits
            only for requests of its own client.
        """
        request, kv_cache = client.waiting[0], self.kv_cache_manager
        if self._waits_for_choice(request):
            return inf
        has_imported = bool(request.block_ids)
        if not has_imported:
            kv_cache.match_prefix(request)
        # A request that was handed over decodes at once; that prompts are limited must not truncate its draft.
        budget = plan.budget + plan.num_withheld if request.num_pending == 1 else plan.budget
        planned, may_run = self._plan_rows(request, budget), self.shares.may_run(request)
        if planned is None or not may_run or not self._reserve_for_admission(request, planned):
            if not has_imported:
                kv_cache.free(request)
            return client.served + request.num_pending / client.weight if may_run else inf
        self.shares.start(request)
        kv_cache.count_lookup(request)
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=priority_key)
        plan.admitted.append(planned)
        plan.budget -= planned.num_scheduled_tokens
        if plan.is_shared:
            self.shares.charge(request, planned.num_scheduled_tokens)
        return None

    def _reserve_for_admission(self, request: Request, planned: ScheduledRequest) -> bool:
        """Reserve the blocks of the first rows; return False, and reserve none, if the free ones do not hold all."""
        kv_cache, num_tokens = self.kv_cache_manager, request.num_computed + planned.num_scheduled_tokens
        return kv_cache.can_hold(request) and kv_cache.reserve(request, num_tokens)

    def _reserve_blocks(self, planned: ScheduledRequest, plan: _PartialPlan) -> bool:
        """Reserve the blocks of a running request; preempt others, or itself and return False, if none are free."""
        request, num_tokens = planned.request, planned.num_computed_tokens + planned.num_scheduled_tokens
        if self.kv_cache_manager.num_missing(request, num_tokens) <= 0:
            return True
        while True:
            if not self.shares.may_grow(request, num_tokens):
                client_id = request.client_id
            elif self.kv_cache_manager.reserve(request, num_tokens):
                return True
            elif self._free_imported():
                continue
            else:
                client_id = self.shares.heaviest(request)
            last = self._last_request(client_id, request, plan)
            if last is request and not self.kv_cache_manager.can_ever_hold(request):
                request.max_drafts = 0  # with a draft, it would be preempted in every step near the end of the cache
            self._preempt(last)
            plan.preempt(last)
            if last is request:
                return False

    def _free_imported(self) -> bool:
        """Free the imported blocks of the waiting request that is last in order; return False if none has any."""
        waiting = [request for request in self.waiting if request.block_ids]
        if waiting:
            self.kv_cache_manager.free(max(waiting, key=priority_key))
        return bool(waiting)

    def _last_request(self, client_id: str, request: Request, plan: _PartialPlan) -> Request:
        """Return the last running request of a client; if it is the client of `request`, the last without rows."""
        kept = {s.request for s in plan.running + plan.admitted} if client_id == request.client_id else ()
        return next(r for r in reversed(self.running) if r.client_id == client_id and r not in kept)

    def _expected_prefill_rows(self, prefilling: list[Request]) -> int:
        """Return how many prefill rows the next step will probably have beside the rows of decoding requests."""
        num_pending = sum(r.num_pending for r in prefilling)
        if self.config.enable_chunked_prefill:
            return min(num_pending, self._prefill_budget())
        return min(num_pending, self.config.max_num_batched_tokens)

    def _prefill_budget(self) -> int:
        """Return how many prefill rows a step may have beside few rows of decoding requests."""
        return max(self._min_prefill_rows, int(self._rows_per_s * MAX_DECODE_STALL_S))

    def _waits_for_choice(self, request: Request) -> bool:
        """Return whether another choice of the same request still computes something that this one can share."""
        if not request.prompt_logprobs.num_missing:
            kv_cache = self.kv_cache_manager
            if not kv_cache.enable_prefix_caching or request.num_prompt_tokens <= kv_cache.block_size:
                return False
        return any(r.request_id == request.request_id and r.num_computed < r.num_prompt_tokens for r in self.running)

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
        self.shares.preempt(request, self.running)
        self.num_preemptions += 1


def _num_prompt_logprob_rows(request: Request, num_rows: int) -> int:
    """Return how many rows of a prefill chunk, its last ones, predict prompt tokens without a log-probability yet."""
    if not request.prompt_logprobs.num_missing:
        return 0
    first = max(request.num_computed, len(request.prompt_logprobs.entries))
    return max(0, min(request.num_computed + num_rows, request.num_prompt_tokens - 1) - first)
