# SPDX-License-Identifier: Apache-2.0
"""An engine in virtual time: its model emits recorded answers, and a table gives the times of steps and drafting.

Scheduler, proposers and adaptive length are the real ones, so that a test of adaptive length has the same result on
every machine.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fastdeploy.config.engine_config import SchedulerConfig
from fastdeploy.config.speculative_config import MTPConfig, SpeculativeConfig
from fastdeploy.core.length_policy import LengthPolicy
from fastdeploy.core.request import Draft, DraftQuota, Request
from fastdeploy.core.step import RequestResult, ScheduledRequest, StepPlan
from fastdeploy.engine.admission import Admission
from fastdeploy.engine.batch_scheduler import BatchScheduler
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.output_processor import OutputProcessor
from fastdeploy.kv_cache.manager import KVCacheManager
from fastdeploy.spec_decode.adaptive.adaptive_length import AdaptiveLength
from fastdeploy.spec_decode.adaptive.distinct_experts import DistinctExperts
from fastdeploy.spec_decode.adaptive.step_times import DraftPasses, StepTimes
from fastdeploy.spec_decode.proposers.base import Proposer
from fastdeploy.spec_decode.proposers.registry import make_proposer
from tests.spec_decode.adaptive.virtual_experts import Experts, Router

BLOCK_SIZE = 16
VOCAB_SIZE = 1 << 17


class Passes(NamedTuple):
    """Seconds of a draft pass, per request in it, and per token that the drafting model has yet to compute."""

    pass_s: float
    request_s: float
    row_s: float


@dataclass(frozen=True)
class Machine:
    """The times of steps and of drafting on a machine.

    Attributes:
        rows_s: number of rows -> seconds of a step, without `request_s`; interpolated linearly.
        request_s: seconds that each request adds to a step.
        match_s: seconds of a call to a proposer that matches text.
        match_request_s: seconds that each request adds to such a call.
        passes: method -> times of a draft pass.
        experts: of the target; the other times do not include reading them.
    """

    rows_s: Mapping[int, float]
    request_s: float
    match_s: float
    match_request_s: float
    passes: Mapping[str, Passes]
    experts: Experts | None = None

    def step_s(self, num_rows: int, num_requests: int) -> float:
        """Return the seconds of a step without prefill and without experts."""
        return float(np.interp(num_rows, list(self.rows_s), list(self.rows_s.values()))) + self.request_s * num_requests

    def prompt_s(self, num_rows: int) -> float:
        """Return the seconds that prefill rows add: each as much as a row of the largest step in the table."""
        rows, seconds = list(self.rows_s.items())[-1]
        return num_rows * seconds / rows


class Clock:
    """Virtual seconds.

    Attributes:
        slowdown: factor on all times of the machine.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.slowdown = 1.0

    def spend(self, seconds: float) -> float:
        """Advance by `seconds` times the slowdown; return by how much."""
        self.now += self.slowdown * seconds
        return self.slowdown * seconds

    def __call__(self) -> float:
        return self.now


class ReplayRunner:
    """A runner that emits recorded answers; a step takes the time of the machine.

    Attributes:
        answers: request id -> the tokens to emit.
        busy_s: virtual seconds of all steps, prefill rows excluded.
        router: of the machine's experts, if there are any.
    """

    def __init__(self, machine: Machine, clock: Clock) -> None:
        self.answers: dict[str, Sequence[int]] = {}
        self.busy_s = 0.0
        self.router = None if machine.experts is None else Router(machine.experts)
        self._machine, self._clock = machine, clock

    def run(self, plan: StepPlan) -> list[RequestResult]:
        """Accept drafts while they equal the recorded answer."""
        self._advance_clock(plan)
        return [
            self._result(scheduled) if scheduled.num_verify_rows else RequestResult() for scheduled in plan.requests
        ]

    def _advance_clock(self, plan: StepPlan) -> None:
        decoding = [scheduled for scheduled in plan.requests if scheduled.num_verify_rows]
        num_rows = sum(scheduled.num_verify_rows for scheduled in decoding)
        self._clock.spend(self._machine.prompt_s(plan.num_scheduled_tokens - num_rows))
        experts_s = 0.0
        if self.router and decoding:
            experts_s = self.router.route(
                (s.request.request_id, s.request.num_output_tokens, s.num_verify_rows) for s in decoding
            )
        self.busy_s += self._clock.spend(self._machine.step_s(num_rows, len(plan.requests)) + experts_s)

    def _result(self, scheduled: ScheduledRequest) -> RequestResult:
        request, draft = scheduled.request, scheduled.draft.token_ids
        first = request.num_output_tokens
        expected = list(self.answers[request.request_id][first : first + len(draft) + 1])
        num_accepted = next((i for i, token in enumerate(draft) if token != expected[i]), len(draft))
        return RequestResult(expected[: num_accepted + 1], num_accepted)


class TimedProposer:
    """Makes a proposer that matches text take virtual time."""

    def __init__(self, proposer: Proposer, machine: Machine, clock: Clock) -> None:
        self.busy_s = 0.0
        self._propose = proposer.propose
        self._machine, self._clock = machine, clock
        proposer.propose = self.propose  # type: ignore[method-assign]

    def propose(self, requests: Sequence[Request], quotas: Sequence[DraftQuota]) -> list[Draft]:
        """Advance the clock and propose."""
        seconds = self._machine.match_s + self._machine.match_request_s * len(requests)
        self.busy_s += self._clock.spend(seconds)
        return self._propose(requests, quotas)


class SimulatedModel:
    """A drafting model whose drafts equal the recorded answer with a given probability per passage of 48 tokens.

    As with the real ones, the first call after a pause computes the tokens that the model has missed. Prompt tokens
    advance the clock but do not count in `busy_s`, as in ReplayRunner.
    """

    PASSAGE = 48

    def __init__(self, answers: dict[str, Sequence[int]], passes: Passes, clock: Clock) -> None:
        self.busy_s = 0.0
        self.reliabilities: dict[str, Sequence[float]] = {}
        self._answers, self._passes, self._clock = answers, passes, clock
        self._num_computed: dict[str, int] = {}

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Return `counts[i]` recorded tokens for each request, some of them wrong."""
        drafting = [request for request, count in zip(requests, counts) if count]
        num_missing = sum(map(self._num_missing, drafting))
        num_prompt = sum(self._num_missing(request) for request in drafting if request.num_output_tokens == 1)
        pass_s, request_s, row_s = self._passes
        drafting_s = max(counts) * pass_s + sum(counts) * request_s
        self.busy_s += self._clock.spend(drafting_s + (num_missing - num_prompt) * row_s)
        self._clock.spend(num_prompt * row_s)
        self._num_computed.update((request.request_id, request.num_tokens) for request in drafting)
        return [self._draft(request, count) for request, count in zip(requests, counts)]

    def _num_missing(self, request: Request) -> int:
        return request.num_tokens - self._num_computed.get(request.request_id, 0) - 1

    def _draft(self, request: Request, count: int) -> list[int]:
        begin, answer = request.num_output_tokens, self._answers[request.request_id]
        reliabilities = self.reliabilities[request.request_id]
        tokens = list(answer[begin : begin + count])
        for i in range(len(tokens)):
            reliability = reliabilities[(begin + i) // self.PASSAGE % len(reliabilities)]
            if random.Random(f"{answer} {begin + i}").random() > reliability:
                tokens[i] += 1
        return tokens


@dataclass
class VirtualEngine:
    """An engine in virtual time, with the parts that a test sets or reads."""

    engine: Engine
    runner: ReplayRunner
    drafting: TimedProposer | SimulatedModel
    clock: Clock

    def busy_s(self) -> float:
        """Seconds of all steps and of all drafting."""
        return self.runner.busy_s + self.drafting.busy_s


def make_virtual_engine(
    speculative: SpeculativeConfig,
    machine: Machine,
    max_seqs: int,
    max_model_len: int,
    predicted: Machine | None = None,
) -> VirtualEngine:
    """Build an engine in virtual time.

    Args:
        predicted: the step times that adaptive length starts with, if not those of `machine`.
    """
    clock = Clock()
    runner = ReplayRunner(machine, clock)
    passes = machine.passes.get(speculative.method)
    model = SimulatedModel(runner.answers, passes, clock) if passes else None
    proposer = make_proposer(speculative, model)
    drafting = model or TimedProposer(proposer, machine, clock)
    num_blocks = max_seqs * -(-max_model_len // BLOCK_SIZE) + 1
    admission = Admission(
        max_model_len=max_model_len,
        num_cache_tokens=num_blocks * BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[],
        has_tokenizer=False,
        speculative=speculative,
        server_seed=0,
    )
    policy = LengthPolicy()
    if speculative.adaptive:
        policy = _length_policy(speculative, predicted or machine, clock, runner.router)
    config = SchedulerConfig(
        max_num_seqs=max_seqs, max_num_batched_tokens=max_seqs * max_model_len, enable_chunked_prefill=False
    )
    scheduler = BatchScheduler(config, KVCacheManager(num_blocks, BLOCK_SIZE, False), policy)
    engine = Engine(admission, scheduler, runner, proposer, OutputProcessor([], _no_scanner, clock), clock)
    return VirtualEngine(engine, runner, drafting, clock)


def _length_policy(
    speculative: SpeculativeConfig, predicted: Machine, clock: Clock, router: Router | None
) -> AdaptiveLength:
    passes, experts = predicted.passes.get(speculative.method), None
    if (ours := predicted.experts) is not None and router is not None:
        experts = DistinctExperts(router.load, ours.num_experts, ours.num_chosen, ours.expert_s)
    times = StepTimes(predicted.rows_s, predicted.request_s, experts=experts)
    if passes is None:
        return AdaptiveLength(times, None, True, clock)
    is_mtp = isinstance(speculative, MTPConfig)
    max_passes = speculative.num_model_steps if is_mtp else speculative.num_speculative_tokens
    of_pass = StepTimes({n: passes.pass_s + n * passes.request_s for n in (1, 2)})
    draft_passes = DraftPasses(speculative.method, max_passes, of_pass, of_pass)
    return AdaptiveLength(times, draft_passes, speculative.extension is not None, clock)


def _no_scanner(request: Request) -> object:
    raise AssertionError("these requests have no stop strings")
