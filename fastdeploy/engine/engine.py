# SPDX-License-Identifier: Apache-2.0
"""The step loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Protocol

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.core.errors import FastDeployError, RequestFailedError
from fastdeploy.core.faults import fault_point
from fastdeploy.core.handover import Handover
from fastdeploy.core.outputs import ErrorInfo, RequestMetrics, SpeculateMetrics, TokenDelta
from fastdeploy.core.request import NO_DRAFT, GenerationRequest, Request, RequestStatus
from fastdeploy.core.stats import EngineStats
from fastdeploy.core.step import RequestResult, ScheduledRequest, StepPlan
from fastdeploy.engine.admission import Admission
from fastdeploy.engine.batch_scheduler import BatchScheduler
from fastdeploy.engine.drafts import QuotaFunction, constrain_drafts, may_draft, propose_drafts
from fastdeploy.engine.expert_counter import ExpertCounter
from fastdeploy.engine.futures import all_done
from fastdeploy.engine.kv_transfer import KVTransfer, make_handover
from fastdeploy.engine.output_processor import OutputProcessor
from fastdeploy.engine.stats_collector import StatsCollector
from fastdeploy.spec_decode.proposers.base import Proposer

INTERNAL_ERROR = ErrorInfo("internal_error", "internal error")
OUT_OF_MEMORY = ErrorInfo("out_of_memory", "the machine lacks memory for a KV cache that holds the request alone")

logger = logging.getLogger("fastdeploy.engine")


class Runner(Protocol):
    """Computes a step: see worker.model_runner.ModelRunner."""

    def run(self, plan: StepPlan) -> Sequence[RequestResult]:
        """Compute the rows, sample the target's tokens and verify the drafts; one result per scheduled request."""


class Engine:
    """Accepts requests, advances all of them by steps, and returns what each step emitted.

    It is single-threaded: one caller adds and aborts requests and runs steps. `Engine.from_config` builds one.

    An exception in the handling of one request ends that request with an internal error; the traceback is logged. Then
    `check_integrity` decides whether the engine may continue: if it raises AssertionError, so does the caller's call.
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
        transfer: KVTransfer | None = None,
        experts: ExpertCounter | None = None,
    ) -> None:
        self.admission = admission
        self.scheduler = scheduler
        self.length_policy = scheduler.length_policy
        self.runner = runner
        self.proposer = proposer
        self.outputs = outputs
        self.transfer = transfer
        self._clock = clock
        self._description = description or {}
        self._choices: dict[str, list[Request]] = {}  # the unfinished choices of each request
        self._with_deadline: list[Request] = []
        self._leaving: list[str] = []  # requests to be given up
        self._handovers: list[Handover] = []  # those given up, without a transfer
        self._stats = StatsCollector(experts)

    @classmethod
    def from_config(cls, config: EngineConfig, on_progress: Callable[[str, float], None] | None = None) -> Engine:
        """Load the model that `config` names and build the engine around it; raises ConfigError."""
        from fastdeploy.engine.engine_factory import make_engine

        return make_engine(config, on_progress)

    def prepare(self, request: GenerationRequest) -> Future[Any] | None:
        """Start to compile the request's grammar, and to import its blocks, beside the steps.

        Returns:
            A future; once it is done, `add_request` does not wait. None if it would not wait now.

        Raises:
            RequestFailedError: an internal error.
        """
        with self._isolate_failure(request):
            fault_point("prepare", request.request_id)
            grammar = self.admission.prepare(request)
            imported = None if self.transfer is None else self.transfer.begin_import(request)
        return all_done([future for future in (grammar, imported) if future is not None])

    def add_request(self, request: GenerationRequest) -> list[TokenDelta]:
        """Add the choices of a request to the waiting queue; wait for its grammar.

        Returns:
            The ends of choices whose resumed tokens end them already.

        Raises:
            InvalidRequestError: the request cannot be served.
            QueueFullError: `max_waiting_requests` requests are waiting already, or a limit of the client is reached.
            RequestFailedError: an internal error.
        """
        with self._isolate_failure(request):
            self.scheduler.shares.check_room(request)
            fault_point("admit", request.request_id)
            choices = self.admission.admit(request, self._choices.keys(), self._clock())
            ended = self._start(request, choices)
        self._choices[request.request_id] = choices
        self._with_deadline += [choice for choice in choices if choice.deadline_s is not None]
        self._stats.count_admitted(request)
        deltas = [self._finish(choice, delta) for choice, delta in ended]
        ready = [choice for choice in choices if may_draft(choice)]
        if not ready or self.length_policy.is_adaptive:
            return deltas
        return deltas + self._draft(ready, partial(self.length_policy.draft_quotas, StepPlan([])))

    def abort(self, request_id: str) -> list[TokenDelta]:
        """End the unfinished choices of a request; an unknown id is ignored."""
        return [self._end(choice, "abort") for choice in list(self._choices.get(request_id, ()))]

    def cancel(self, request_id: str) -> None:
        """Release what `prepare` has imported for a request that will not be added."""
        if self.transfer is not None:
            self.transfer.cancel(request_id)

    def hand_over(self, request_id: str, export_slots: Sequence[int] = ()) -> bool:
        """Give up a request, to be continued elsewhere; it emits nothing more.

        Args:
            export_slots: for the blocks that are computed, unless the request has slots already.

        Returns:
            Whether there is such a request; `pop_handovers` will return it.
        """
        choices = list(self._choices.get(request_id, ()))
        if not choices:
            return False
        handover = make_handover(choices)
        if self.transfer is None:
            self._handovers.append(handover)
        else:
            self.transfer.begin_export(choices[0], export_slots)
            self.transfer.hand_over(choices[0], handover)
        exceptions = [exception for choice in choices for exception in self._remove(choice)]
        if exceptions:
            self._check_after(exceptions, request_id)
        return True

    def pop_handovers(self) -> list[Handover]:
        """Give up the requests whose time for it has come; return those that are given up and copied."""
        for request_id in self._leaving:
            self.hand_over(request_id)
        self._leaving.clear()
        handovers, self._handovers = self._handovers, []
        return handovers if self.transfer is None else self.transfer.pop_handovers()

    @property
    def is_moving(self) -> bool:
        """Whether requests are being handed over, or blocks copied, so that `pop_handovers` has to be called again."""
        return bool(self._leaving or self._handovers) or (self.transfer is not None and self.transfer.is_moving)

    def step(self) -> list[TokenDelta]:
        """Schedule, compute, verify, commit, propose; return the emitted tokens and the ends of requests."""
        deltas = self._end_expired()
        plan = self.scheduler.schedule()
        deltas += [self._end(request, "error", OUT_OF_MEMORY) for request in self.scheduler.oversized()]
        if plan is None:
            return deltas
        start_s = self._clock()
        self._stats.record_queue_times(plan, start_s)
        results = self.runner.run(plan)
        end_s = self._clock()
        self.scheduler.record_step_time(plan, end_s - start_s)
        self._stats.count_step(plan, results, end_s)
        for scheduled, result in zip(plan.requests, results):
            deltas += self._commit(scheduled, result)
        deltas += self._propose(plan)
        return deltas

    def has_unfinished(self) -> bool:
        """Return whether any request is waiting or running."""
        return bool(self._choices)

    def stats(self) -> EngineStats:
        """Return counters and the current state."""
        stats = self._stats.collect(self.scheduler, chain.from_iterable(self._choices.values()))
        if "cluster" in self._description:  # agents claim requests by it
            pending = (choice.num_pending for choice in chain.from_iterable(self._choices.values()))
            stats.num_waiting_tokens = sum(count for count in pending if count > 1)
        if self.transfer is not None:
            stats.num_failed_blocks = dict(self.transfer.num_failed_blocks)
            stats.num_imported_tokens = self.transfer.num_imported_tokens
        return replace(stats, suffix_cache=self.proposer.suffix_cache_stats())

    def describe(self) -> dict[str, Any]:
        """Return what the engine runs: model, numerics, KV cache, speculation."""
        return self._description

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and output together."""
        return self.admission.max_model_len

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.admission.vocab_size

    @property
    def eos_token_ids(self) -> list[int]:
        """The model's end tokens."""
        return self.admission.eos_token_ids

    def check_integrity(self) -> None:
        """Raise AssertionError if a block leaked or any component holds state of other than the unfinished requests."""
        requests = list(chain.from_iterable(self._choices.values()))
        assert {r.key for r in requests} == {r.key for r in (*self.scheduler.running, *self.scheduler.waiting)}
        self.scheduler.check_integrity()
        self.proposer.check_integrity(requests)
        self.outputs.check_integrity(requests)
        self.length_policy.check_integrity(requests)
        if self.transfer is not None:
            self.transfer.check_integrity(requests)

    def _start(self, source: GenerationRequest, choices: Sequence[Request]) -> list[tuple[Request, TokenDelta]]:
        """Add new choices to every component; if one raises, remove them all again.

        Returns:
            The choices that have ended already, with their last deltas.
        """
        ended = []
        with ExitStack() as undo:
            for choice in choices:
                self.outputs.start(choice)
                undo.callback(self.outputs.finish, choice)
                if choice.num_resumed_tokens and (delta := self.outputs.resume(choice)) is not None:
                    ended.append((choice, delta))
                fault_point("proposer_start", choice.request_id)
                self.proposer.start(choice)
                undo.callback(self.proposer.finish, choice)
                self.scheduler.add(choice)
                undo.callback(self.scheduler.finish, choice)
            if self.transfer is not None:
                self.transfer.adopt(choices)
                self.transfer.begin_export(choices[0], source.export_slots)
            undo.pop_all()
        return ended

    def _commit(self, scheduled: ScheduledRequest, result: RequestResult) -> list[TokenDelta]:
        """Update a request after a step; return its emitted tokens, then its error if it failed."""
        request = scheduled.request
        try:
            delta = self._emit(scheduled, result)
        except Exception as exception:
            return [self._fail(request, exception)]
        deltas = [] if delta is None else [delta]
        if delta is not None and delta.finish_reason is not None:
            self._finish(request, delta)
        elif result.error:
            deltas.append(self._end(request, "error", ErrorInfo(result.error_type, result.error)))
        else:
            if self.transfer is not None:
                self.transfer.advance(request)
            if request.hands_over and request.num_output_tokens > request.num_resumed_tokens:
                self._leaving.append(request.request_id)
        return deltas

    def _emit(self, scheduled: ScheduledRequest, result: RequestResult) -> TokenDelta | None:
        """Append the tokens of a step, up to the first stop, to their request; return them, None if there are none."""
        if result.exception is not None:
            raise result.exception
        request, draft = scheduled.request, scheduled.draft
        if result.prompt_logprobs:
            request.prompt_logprobs.entries += result.prompt_logprobs
        if request.is_prefill_only and scheduled.num_verify_rows:
            self.scheduler.commit(scheduled, result, [])  # without the token of the last row
            return self.outputs.end_of_prefill(request)
        if not result.token_ids:
            if not result.error:
                self.scheduler.commit(scheduled, result, [])
            return None
        delta = self.outputs.truncate_at_stop(scheduled, result)
        num_emitted = len(delta.token_ids)
        if draft is not NO_DRAFT and request.num_output_tokens:
            request.speculation.record_step(draft, min(result.num_accepted, num_emitted), num_emitted)
        self.scheduler.commit(scheduled, result, delta.token_ids)
        fault_point("delta", request.request_id)
        self.outputs.complete(delta, request)
        return delta

    def _propose(self, plan: StepPlan) -> list[TokenDelta]:
        """Draft for the requests that decode in the next step, unless drafting is paused; return those that failed."""
        requests = [scheduled.request for scheduled in plan.requests if may_draft(scheduled.request)]
        return self._draft(requests, partial(self.length_policy.draft_quotas, plan))

    def _draft(self, requests: list[Request], make_quotas: QuotaFunction) -> list[TokenDelta]:
        """Draft for requests of which all tokens but the last are computed; return those that failed."""
        failures = propose_drafts(self.proposer, requests, make_quotas)
        if failures:
            requests = [request for request in requests if all(request is not failed for failed, _ in failures)]
        failures += constrain_drafts(requests, self._stats)
        deltas = [self._fail(request, exception) for request, exception in failures]
        if deltas:
            requests = [request for request in requests if request.status is not RequestStatus.FINISHED]
        if requests:
            self.length_policy.on_drafts_proposed(requests)
        return deltas

    def _end_expired(self) -> list[TokenDelta]:
        if not self._with_deadline:
            return []
        now_s = self._clock()
        expired = [r for r in self._with_deadline if r.deadline_s is not None and r.deadline_s <= now_s]
        return [self._end(r, "error", ErrorInfo("timeout", "the request's time is over")) for r in expired]

    def _end(self, request: Request, finish_reason: str, error: ErrorInfo | None = None) -> TokenDelta:
        """End a request for a reason other than its tokens: abort, timeout, or a row that could not be sampled."""
        delta = TokenDelta(request.request_id, request.index, first_index=request.num_output_tokens)
        try:
            self.outputs.end(delta, request, finish_reason, error=error)
        except Exception as exception:
            return self._fail(request, exception)
        return self._finish(request, delta)

    def _fail(self, request: Request, exception: Exception) -> TokenDelta:
        """End a request with an internal error because of `exception`."""
        metrics = RequestMetrics(**vars(request.metrics))
        delta = TokenDelta(request.request_id, request.index, seed=request.seed, metrics=metrics)
        delta.speculate_metrics = SpeculateMetrics()
        return self._finish(request, delta, exception)

    def _finish(self, request: Request, delta: TokenDelta, exception: Exception | None = None) -> TokenDelta:
        """Remove an ended request from every component; return its last delta.

        If there is an exception, or a component raises one, the delta becomes an internal error.
        """
        exceptions = [] if exception is None else [exception]
        exceptions += self._remove(request)
        if exceptions:
            delta.finish_reason, delta.stop_reason, delta.error = "error", None, INTERNAL_ERROR
        self._stats.count_finished(request, delta.finish_reason or "")
        if exceptions:
            self._check_after(exceptions, request.request_id)
        return delta

    def _remove(self, request: Request) -> list[Exception]:
        """Remove a request from every component; return the exceptions that they raised."""
        exceptions = []
        for finish in (
            *(() if self.transfer is None else (self.transfer.finish,)),
            self.scheduler.finish,
            self.proposer.finish,
            self.length_policy.finish_request,
            self.outputs.finish,
        ):
            try:
                finish(request)
                fault_point("finish", request.request_id)
            except Exception as exception:
                exceptions.append(exception)
        if request.deadline_s is not None:
            self._with_deadline.remove(request)
        choices = self._choices[request.request_id]
        choices.remove(request)
        if not choices:
            del self._choices[request.request_id]
        return exceptions

    @contextmanager
    def _isolate_failure(self, request: GenerationRequest) -> Iterator[None]:
        """Replace an unexpected exception in the handling of a new request by RequestFailedError."""
        try:
            yield
        except FastDeployError:
            self.cancel(request.request_id)
            raise
        except Exception as exception:
            self.cancel(request.request_id)
            self._check_after([exception], request.request_id)
            raise RequestFailedError("internal error") from exception

    def _check_after(self, exceptions: Sequence[Exception], request_id: str) -> None:
        """Log why a request failed; raise AssertionError if the engine cannot continue."""
        for exception in exceptions:
            logger.error("request %s failed", request_id, exc_info=exception)
        self.check_integrity()
