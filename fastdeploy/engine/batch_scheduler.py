# SPDX-License-Identifier: Apache-2.0
"""Decides which rows the next step computes.

One rule for every request: compute what is known but not in the cache (`num_pending` tokens and the draft), as much of
it as the step's token budget and the free blocks allow. Long prompts are cut by that rule, drafts never are chunked.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

from fastdeploy.config.engine_config import SchedulerConfig
from fastdeploy.core.length_policy import LengthPolicy
from fastdeploy.core.request import NO_DRAFT, Request, RequestStatus
from fastdeploy.core.step import RequestResult, ScheduledRequest, StepPlan
from fastdeploy.kv_cache.manager import KVCacheManager

MIN_PROMPT_ROWS = 64  # of a step in which others decode; fewer would leave the matrix units waiting for weights
MAX_PAUSE_S = 0.05  # of those that decode, for more prompt rows than that; as long as streams wait for a chunk
PACE_RATE = 0.5  # of the running mean of rows per second


class BatchScheduler:
    """Holds the waiting and the running requests and plans one step at a time.

    `waiting` and `running` are in order of urgency: priority, then arrival. Requests take blocks in that order, those
    that decode before those that still read their prompt; when blocks run out, the least urgent request that has no
    rows in this step yet gives its own back and waits again.
    A step in which some decode reads at most as many prompt rows as it decodes, or `MIN_PROMPT_ROWS`, or what takes
    `MAX_PAUSE_S`: a prompt that arrives makes nobody's next token wait for more than about two steps, or unnoticeably.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, length_policy: LengthPolicy | None = None) -> None:
        self.config = config
        self.kv = kv
        self.length_policy = length_policy or LengthPolicy()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._num_arrivals = 0
        self._rows_per_s = 0.0  # of steps of so many rows that prompts could be among them; 0 before the first

    def add(self, request: Request) -> None:
        """Queue a new request."""
        request.arrival_number = self._num_arrivals
        self._num_arrivals += 1
        insort(self.waiting, request, key=_urgency)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands, and free its blocks."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        self.kv.free(request)

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None if there is nothing to compute."""
        planned: list[ScheduledRequest] = []
        budget, num_preemptions, num_admitted = self.config.max_num_batched_tokens, self.num_preemptions, 0
        decoding = [r for r in self.running if r.num_pending == 1]
        reading = [r for r in self.running if r.num_pending > 1] if len(decoding) < len(self.running) else []
        num_prompt_rows = self._num_prompt_rows(reading) if reading else 0
        self.length_policy.trim_drafts(decoding, num_prompt_rows)
        budget = self._plan_all(planned, decoding, budget)
        if reading or self.waiting:
            if planned and self.config.enable_chunked_prefill:
                num_decode_rows = self.config.max_num_batched_tokens - budget
                budget = min(budget, max(self._max_prompt_rows(), num_decode_rows))
            budget = self._plan_all(planned, reading, budget)
            if self.num_preemptions == num_preemptions:
                num_admitted = self._admit(planned, budget)
        return StepPlan(planned, num_admitted) if planned else None

    def commit(self, scheduled: ScheduledRequest, result: RequestResult, emitted: list[int]) -> None:
        """Enter what a step did for one request: `emitted` is the result's tokens, cut where a stop was found.

        Of the verification rows, only those whose token was sampled count as computed: rejected drafts have to be
        computed again, and the row of an error may hold anything.
        """
        request = scheduled.request
        request.append(emitted)
        num_rejected = scheduled.num_verify_rows - len(result.token_ids)
        computed = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens - num_rejected
        request.num_computed = min(computed, request.num_tokens)
        self.kv.commit(request)

    def learn(self, plan: StepPlan, step_s: float) -> None:
        """Take what a step took as the pace of the prompts to come."""
        num_rows = plan.num_scheduled_tokens
        if num_rows >= MIN_PROMPT_ROWS and step_s > 0:
            rows_per_s = num_rows / step_s
            self._rows_per_s += (rows_per_s - self._rows_per_s) * (PACE_RATE if self._rows_per_s else 1)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is held by exactly the requests that list it."""
        self.kv.check_integrity([*self.running, *self.waiting])

    def _plan_all(self, planned: list[ScheduledRequest], requests: list[Request], budget: int) -> int:
        """Plan the rows of running requests; return what is left of the budget."""
        for request in requests:
            if budget > 0 and request.status is RequestStatus.RUNNING:
                scheduled = self._plan_running(planned, request, budget)
                if scheduled is not None:
                    planned.append(scheduled)
                    budget -= scheduled.num_scheduled_tokens
        return budget

    def _plan_running(self, planned: list[ScheduledRequest], request: Request, budget: int) -> ScheduledRequest | None:
        """Plan a running request; preempt others, or itself, while there are too few free blocks."""
        scheduled = self._fit(request, budget)
        while scheduled and not self.kv.reserve(request, request.num_computed + scheduled.num_scheduled_tokens):
            victim = next(r for r in reversed(self.running) if all(s.request is not r for s in planned))
            self._preempt(victim)
            if victim is request:
                return None
        return scheduled

    def _admit(self, planned: list[ScheduledRequest], budget: int) -> int:
        """Start waiting requests, in order, while there is room for all their known tokens; return their number."""
        num_admitted = 0
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            if self._prompt_is_under_way(request):
                break
            self.kv.match_prefix(request)
            scheduled = self._fit(request, budget)
            if scheduled is None or not self.kv.can_hold(request):
                self.kv.free(request)
                break
            self.kv.reserve(request, request.num_computed + scheduled.num_scheduled_tokens)
            self.waiting.popleft()
            self.kv.count_lookup(request)
            request.status = RequestStatus.RUNNING
            insort(self.running, request, key=_urgency)
            planned.append(scheduled)
            num_admitted += 1
            budget -= scheduled.num_scheduled_tokens
        return num_admitted

    def _num_prompt_rows(self, reading: list[Request]) -> int:
        """Prompt rows that the next step is likely to have beside those that decode."""
        known = sum(r.num_pending for r in reading)
        return min(
            known, self._max_prompt_rows() if self.config.enable_chunked_prefill else self.config.max_num_batched_tokens
        )

    def _max_prompt_rows(self) -> int:
        return max(MIN_PROMPT_ROWS, int(self._rows_per_s * MAX_PAUSE_S))

    def _prompt_is_under_way(self, request: Request) -> bool:
        """True while another choice of the same request computes the blocks that this one can share."""
        if not self.kv.enable_prefix_caching or request.num_prompt_tokens <= self.kv.block_size:
            return False
        return any(r.request_id == request.request_id and r.num_output_tokens == 0 for r in self.running)

    def _fit(self, request: Request, budget: int) -> ScheduledRequest | None:
        """Plan as many rows of a request as the budget has; None if it has to wait.

        A draft is trimmed to what fits and never chunked. A prompt is chunked, or waits where chunks are switched off.
        """
        computed, pending = request.num_computed, request.num_pending
        if pending == 1:
            draft = request.draft
            if len(draft) >= budget:
                draft = draft.cut(budget - 1)
            num_rows = 1 + len(draft)
            return ScheduledRequest(request, num_rows, computed, draft, num_rows)
        if self.config.enable_chunked_prefill:
            num_rows = min(pending, budget, self.config.long_prefill_token_threshold or pending)
        elif pending <= budget:
            num_rows = pending
        else:
            return None
        num_verify_rows = 1 if num_rows == pending else 0
        num_logprob_rows = _num_prompt_logprob_rows(request, num_rows)
        return ScheduledRequest(request, num_rows, computed, NO_DRAFT, num_verify_rows, num_logprob_rows)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        request.status = RequestStatus.WAITING
        request.metrics.num_preemptions += 1
        self.kv.free(request)
        insort(self.waiting, request, key=_urgency)
        self.num_preemptions += 1


def _urgency(request: Request) -> tuple[int, int]:
    """Order requests: the most urgent is the least."""
    return request.priority, request.arrival_number


def _num_prompt_logprob_rows(request: Request, num_rows: int) -> int:
    """Rows of a prefill chunk, its last ones, whose logits give the log-probability of a prompt token that has none."""
    if request.params.prompt_logprobs is None:
        return 0
    first = max(request.num_computed, len(request.prompt_logprobs))
    return max(0, min(request.num_computed + num_rows, request.num_prompt_tokens - 1) - first)
