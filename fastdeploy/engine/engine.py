# SPDX-License-Identifier: Apache-2.0
"""The step loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.core.constraint import TokenConstraint
from fastdeploy.core.errors import FastDeployError, QueueFullError, RequestFailedError
from fastdeploy.core.outputs import ErrorInfo, RequestMetrics, SpeculateMetrics, TokenDelta
from fastdeploy.core.request import NO_DRAFT, Draft, GenerationRequest, Request, RequestStatus
from fastdeploy.core.stats import EngineStats
from fastdeploy.core.step import RequestResult, ScheduledRequest, StepPlan
from fastdeploy.engine.admission import Admission
from fastdeploy.engine.batch_scheduler import BatchScheduler
from fastdeploy.engine.output_processor import OutputProcessor
from fastdeploy.engine.statistics import StatsKeeper
from fastdeploy.spec_decode.proposers.base import Proposer

FORCED = "grammar"  # source of drafts that a constraint forces
INTERNAL_ERROR = ErrorInfo("internal_error", "internal error")

logger = logging.getLogger("fastdeploy.engine")


class Runner(Protocol):
    """Computes a step: see worker.model_runner.ModelRunner."""

    def run(self, plan: StepPlan) -> Sequence[RequestResult]:
        """Compute the plan's rows, choose the target's tokens, judge the drafts; one result per request."""


class Engine:
    """Takes requests, advances all of them a step at a time, reports what each step emitted.

    Single-threaded: one caller adds, aborts and steps. `Engine.from_config` builds one.

    An exception in the handling of one request ends that request with an internal error, whose traceback is logged.
    `check_integrity` then decides whether the others may go on; if it raises, so does the call.
    """

    def __init__(
        self,
        admission: Admission,
        scheduler: BatchScheduler,
        runner: Runner,
        proposer: Proposer,
        outputs: OutputProcessor,
        clock: Callable[[], float] = time.monotonic,
        description: dict[str, Any] | None = None,
    ) -> None:
        self.admission = admission
        self.scheduler = scheduler
        self.length_policy = scheduler.length_policy
        self.runner = runner
        self.proposer = proposer
        self.outputs = outputs
        self._clock = clock
        self._description = description or {}
        self._live: dict[str, list[Request]] = {}
        self._timed: list[Request] = []  # those that end at a deadline
        self._stats = StatsKeeper()

    @classmethod
    def from_config(cls, config: EngineConfig, on_progress: Callable[[str, float], None] | None = None) -> Engine:
        """Load the model that `config` names and build the engine around it; raises ConfigError."""
        from fastdeploy.engine.engine_factory import make_engine

        return make_engine(config, on_progress)

    def prepare(self, request: GenerationRequest) -> Future[Any] | None:
        """Begin what takes long of adding a request (its grammar), beside the steps.

        Returns:
            What is done when `add_request` will not wait; None if it would not now.

        Raises:
            RequestFailedError: a fault of the server.
        """
        with self._isolated(request):
            return self.admission.prepare(request)

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a request's n choices; waits for what `prepare` begins.

        Raises:
            InvalidRequestError: the request cannot be served as asked.
            QueueFullError: `max_waiting_requests` are waiting already.
            RequestFailedError: a fault of the server.
        """
        limit = self.scheduler.config.max_waiting_requests
        if limit is not None and len(self.scheduler.waiting) + request.params.n > limit:
            raise QueueFullError(f"{len(self.scheduler.waiting)} requests are waiting; the limit is {limit}")
        with self._isolated(request):
            choices = self.admission.admit(request, self._live.keys(), self._clock())
            self._start(choices)
        self._live[request.request_id] = choices
        self._timed += [choice for choice in choices if choice.deadline_s is not None]
        self._stats.admitted(request)

    def abort(self, request_id: str) -> list[TokenDelta]:
        """End a request's choices now; an unknown id ends nothing."""
        return [self._end(request, "abort") for request in list(self._live.get(request_id, ()))]

    def step(self) -> list[TokenDelta]:
        """Plan, compute, verify, commit, propose; return what was emitted and what ended."""
        deltas = self._end_expired()
        plan = self.scheduler.schedule()
        if plan is None:
            return deltas
        self._note_first_plans(plan)
        began_s = self._clock()
        results = self.runner.run(plan)
        self.scheduler.learn(plan, self._clock() - began_s)
        for scheduled, result in zip(plan.requests, results):
            deltas += self._commit(scheduled, result)
        deltas += self._propose(plan)
        return deltas

    def has_unfinished(self) -> bool:
        """True while a request waits or runs."""
        return bool(self._live)

    def stats(self) -> EngineStats:
        """Return counters and the state now."""
        live = chain.from_iterable(self._live.values())
        return replace(self._stats.snapshot(self.scheduler, live), suffix_cache=self.proposer.suffix_cache_stats())

    def describe(self) -> dict[str, Any]:
        """Return what the engine runs: model, numerics, memory plan, speculation."""
        return self._description

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self.admission.max_model_len

    @property
    def vocab_size(self) -> int:
        """Number of token ids that exist."""
        return self.admission.vocab_size

    @property
    def eos_token_ids(self) -> list[int]:
        """The model's end tokens."""
        return self.admission.eos_token_ids

    def check_integrity(self) -> None:
        """Raise AssertionError if a block leaked or a part holds state of a request that is gone."""
        live = [request for choices in self._live.values() for request in choices]
        assert {r.key for r in live} == {r.key for r in (*self.scheduler.running, *self.scheduler.waiting)}
        self.scheduler.check_integrity()
        self.proposer.check_integrity(live)
        self.outputs.check_integrity(live)
        self.length_policy.check_integrity(live)

    def _start(self, choices: Sequence[Request]) -> None:
        """Introduce new choices to every part; if one fails, withdraw them all."""
        with ExitStack() as withdrawals:
            for choice in choices:
                self.outputs.start(choice)
                withdrawals.callback(self.outputs.finish, choice)
                self.proposer.start(choice)
                withdrawals.callback(self.proposer.finish, choice)
                self.scheduler.add(choice)
                withdrawals.callback(self.scheduler.remove, choice)
            withdrawals.pop_all()

    def _commit(self, scheduled: ScheduledRequest, result: RequestResult) -> list[TokenDelta]:
        """Enter what a step did for one request; return what it emitted, then its error if it failed."""
        request = scheduled.request
        try:
            delta = self._emit(scheduled, result)
        except Exception as fault:
            return [self._fail(request, fault)]
        deltas = [] if delta is None else [delta]
        if delta is not None and delta.finish_reason is not None:
            self._release(request, delta)
        elif result.error:
            deltas.append(self._end(request, "error", ErrorInfo(result.error_type, result.error)))
        return deltas

    def _emit(self, scheduled: ScheduledRequest, result: RequestResult) -> TokenDelta | None:
        """Advance a request by the tokens of a step up to the first stop; return them, None if there are none."""
        if result.fault is not None:
            raise result.fault
        request, draft = scheduled.request, scheduled.draft
        if result.prompt_logprobs:
            request.prompt_logprobs += result.prompt_logprobs
        if not result.token_ids:
            if not result.error:
                self.scheduler.commit(scheduled, result, [])
            return None
        delta = self.outputs.cut(scheduled, result)
        count = len(delta.token_ids)
        if draft is not NO_DRAFT and request.num_output_tokens:
            request.tally.record(draft, min(result.num_accepted, count), count)
        self.scheduler.commit(scheduled, result, delta.token_ids)
        self.outputs.complete(delta, request)
        return delta

    def _propose(self, plan: StepPlan) -> list[TokenDelta]:
        """Draft for the requests whose next step decodes, unless drafting is paused; return what failed."""
        ready = [scheduled.request for scheduled in plan.requests if _is_ready(scheduled.request)]
        quotas = self.length_policy.draft_quotas(plan, ready)
        if quotas:
            for request, draft in zip(ready, self.proposer.propose(ready, quotas)):
                if len(draft):
                    request.set_draft(draft)
        failed: list[TokenDelta] = []
        for request in ready:
            if request.constraint is None:
                continue
            try:
                draft = self._permitted(request, request.constraint)
            except Exception as fault:
                failed.append(self._fail(request, fault))
            else:
                request.set_draft(draft if len(draft) else NO_DRAFT)
        if ready:
            self.length_policy.on_drafts_proposed([r for r in ready if _is_ready(r)] if failed else ready)
        return failed

    def _permitted(self, request: Request, constraint: TokenConstraint) -> Draft:
        """Cut a draft where the request's constraint forbids it; if none is left, take the tokens that must follow."""
        draft = request.draft
        kept = draft.cut(constraint.num_valid_tokens(draft.token_ids))
        self._stats.forbidden(len(draft) - len(kept))
        return kept if len(kept) else Draft(constraint.forced_tokens(request.draft_room), FORCED)

    def _end_expired(self) -> list[TokenDelta]:
        if not self._timed:
            return []
        now = self._clock()
        expired = [r for r in self._timed if r.deadline_s is not None and r.deadline_s <= now]
        return [self._end(r, "error", ErrorInfo("timeout", "the request's time is over")) for r in expired]

    def _end(self, request: Request, finish_reason: str, error: ErrorInfo | None = None) -> TokenDelta:
        """End a request from outside the step: abort, timeout, or a row that could not be computed."""
        delta = TokenDelta(request.request_id, request.index)
        try:
            self.outputs.end(delta, request, finish_reason, error=error)
        except Exception as fault:
            return self._fail(request, fault)
        return self._release(request, delta)

    def _fail(self, request: Request, fault: Exception) -> TokenDelta:
        """End a request whose handling raised `fault`."""
        metrics = RequestMetrics(**vars(request.metrics))
        delta = TokenDelta(request.request_id, request.index, seed=request.seed, metrics=metrics)
        delta.speculate_metrics = SpeculateMetrics()
        return self._release(request, delta, fault)

    def _release(self, request: Request, delta: TokenDelta, fault: Exception | None = None) -> TokenDelta:
        """Let every part drop an ended request; return its last delta, which an exception makes an internal error."""
        faults = [] if fault is None else [fault]
        parts = self.scheduler.remove, self.proposer.finish, self.length_policy.finish_request, self.outputs.finish
        for release in parts:
            try:
                release(request)
            except Exception as other:
                faults.append(other)
        if request.deadline_s is not None:
            self._timed.remove(request)
        choices = self._live[request.request_id]
        choices.remove(request)
        if not choices:
            del self._live[request.request_id]
        if faults:
            delta.finish_reason, delta.stop_reason, delta.error = "error", None, INTERNAL_ERROR
        self._stats.finished(request, delta.finish_reason or "")
        if faults:
            self._check_after(faults, request.request_id)
        return delta

    @contextmanager
    def _isolated(self, request: GenerationRequest) -> Iterator[None]:
        """Turn an exception in the handling of a new request, other than a refusal, into a RequestFailedError."""
        try:
            yield
        except FastDeployError:
            raise
        except Exception as fault:
            self._check_after([fault], request.request_id)
            raise RequestFailedError("internal error") from fault

    def _check_after(self, faults: Sequence[Exception], request_id: str) -> None:
        """Log why a request failed, and raise AssertionError if it left the engine in a state that cannot go on."""
        for fault in faults:
            logger.error("request %s failed", request_id, exc_info=fault)
        self.check_integrity()

    def _note_first_plans(self, plan: StepPlan) -> None:
        for scheduled in plan.requests[len(plan.requests) - plan.num_admitted :]:
            request = scheduled.request
            if request.metrics.queue_s is None:
                request.metrics.queue_s = self._clock() - request.arrival_s


def _is_ready(request: Request) -> bool:
    """True if the request's next step decodes, with room for drafts."""
    return request.num_pending == 1 and request.draft_room > 0 and request.status is RequestStatus.RUNNING
