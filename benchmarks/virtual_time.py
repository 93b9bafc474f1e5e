# SPDX-License-Identifier: Apache-2.0
"""An engine in virtual time: its model emits recorded answers, and a table says how long steps and drafting take.

Scheduler, proposers and adaptive length are the real ones, so that policies are compared exactly on any machine.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fastdeploy.config.engine_config import SchedulerConfig
from fastdeploy.config.speculative_config import SpeculativeConfig
from fastdeploy.core.length_policy import LengthPolicy
from fastdeploy.core.request import Draft, DraftQuota, Request
from fastdeploy.core.step import RequestResult, StepPlan
from fastdeploy.engine.admission import Admission
from fastdeploy.engine.batch_scheduler import BatchScheduler
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.output_processor import OutputProcessor
from fastdeploy.kv_cache.manager import KVCacheManager
from fastdeploy.spec_decode.adaptive.adaptive_length import AdaptiveLength
from fastdeploy.spec_decode.adaptive.step_times import DraftPasses, StepTimes
from fastdeploy.spec_decode.proposers.base import Proposer
from fastdeploy.spec_decode.proposers.registry import make_proposer

BLOCK_SIZE = 16
VOCAB_SIZE = 1 << 17


class Passes(NamedTuple):
    """Seconds of a draft pass, of each request in it, and of each token that the drafting model has missed."""

    pass_s: float
    request_s: float
    row_s: float


@dataclass(frozen=True)
class Machine:
    """What steps take on a machine, in seconds.

    Attributes:
        rows_s: rows: seconds without what the requests cost; joined by lines.
        request_s: that each request adds.
        match_s, match_request_s: of a proposer that matches text, and of each of its requests.
        passes: method: what draft passes take.
    """

    rows_s: Mapping[int, float]
    request_s: float
    match_s: float
    match_request_s: float
    passes: Mapping[str, Passes]

    def step_s(self, num_rows: int, num_requests: int) -> float:
        """Return the time of a step."""
        return float(np.interp(num_rows, list(self.rows_s), list(self.rows_s.values()))) + self.request_s * num_requests

    def prompt_s(self, num_rows: int) -> float:
        """Return what rows of prompts take: each as much as the last row of the table."""
        rows, seconds = list(self.rows_s.items())[-1]
        return num_rows * seconds / rows


def _machine(step_s: float, rows: Mapping[int, float], request: float, **passes: tuple[float, float, float]) -> Machine:
    """Make one of parts of the time of a step of one row."""
    rows_s = {count: step_s * share for count, share in rows.items()}
    passes_s = {method: Passes(*(step_s * share for share in shares)) for method, shares in passes.items()}
    return Machine(rows_s, step_s * request, 25e-6, 5e-6, passes_s)


MACHINES = {  # about what two cores of an Intel Xeon without AVX-512 BF16 take, at 400 tokens of context
    "demo": _machine(
        1.5e-3,
        {1: 0.95, 2: 1.1, 4: 1.4, 8: 1.6, 9: 1.7, 16: 2.1, 36: 4.0, 64: 6.6, 144: 14, 1088: 105},
        request=0.05,
        mtp=(0.17, 0.008, 0.0065),
        draft_model=(0.2, 0.02, 0.008),
    ),
    "0.6b": _machine(
        50e-3,
        {1: 0.98, 4: 1.1, 8: 1.25, 9: 1.35, 16: 1.65, 64: 3.75, 144: 8.0, 1088: 60},
        request=0.02,
        mtp=(0.09, 0.006, 0.003),
        draft_model=(0.2, 0.012, 0.006),
    ),
    "0.6b-w4a8": _machine(
        20e-3,
        {1: 0.93, 4: 1.13, 8: 1.3, 9: 1.4, 16: 1.75, 36: 2.8, 64: 4.2, 144: 9.0, 1088: 68},
        request=0.07,
        mtp=(0.19, 0.01, 0.0025),
        draft_model=(0.3, 0.015, 0.006),
    ),
}


class Clock:
    """Virtual seconds.

    Attributes:
        slowdown: factor by which everything takes longer than the machine's table says.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.slowdown = 1.0

    def spend(self, seconds: float) -> float:
        """Let time pass; return how much it was with the slowdown."""
        self.now += self.slowdown * seconds
        return self.slowdown * seconds

    def __call__(self) -> float:
        return self.now


class BusyClock(Clock):
    """Virtual seconds, and those that the calling thread really takes between them."""

    def __call__(self) -> float:
        return self.now + time.thread_time()


class Reciter:
    """Emits what is recorded; a step takes the time of the machine, times a seeded noise."""

    def __init__(self, machine: Machine, clock: Clock, noise: float = 0.0) -> None:
        self.answers: dict[str, Sequence[int]] = {}
        self.busy_s = 0.0  # without the noise
        self._machine, self._clock, self._noise = machine, clock, noise
        self._dice = random.Random(0)

    def run(self, plan: StepPlan) -> list[RequestResult]:
        """Accept drafts while they say what is recorded."""
        self._pass_time(plan)
        verified = zip(plan.requests, plan.num_verify_rows)
        return [self._result(request) if rows else RequestResult() for request, rows in verified]

    def _pass_time(self, plan: StepPlan) -> None:
        """Let the time of the step go by; what prompts take passes too, but is not counted."""
        num_rows = sum(plan.num_verify_rows)
        step_s = self._machine.step_s(num_rows, len(plan.requests))
        self._clock.spend(self._machine.prompt_s(sum(plan.num_scheduled) - num_rows))
        noise = math.exp(self._noise * self._dice.gauss(0, 1))
        self.busy_s += self._clock.spend(step_s * noise) / noise

    def _result(self, request: Request) -> RequestResult:
        first, draft = request.num_output_tokens, request.draft.token_ids
        right = list(self.answers[request.request_id][first : first + len(draft) + 1])
        kept = next((i for i, token in enumerate(draft) if token != right[i]), len(draft))
        return RequestResult(right[: kept + 1], kept)


class Charged:
    """A proposer that matches text, and takes time for it."""

    def __init__(self, proposer: Proposer, machine: Machine, clock: Clock) -> None:
        self.busy_s = 0.0
        self._propose = proposer.propose
        self._machine, self._clock = machine, clock
        proposer.propose = self.propose  # type: ignore[method-assign]

    def propose(self, requests: Sequence[Request], quotas: Sequence[DraftQuota]) -> list[Draft]:
        """Let the time pass, and the proposer propose."""
        seconds = self._machine.match_s + self._machine.match_request_s * len(requests)
        self.busy_s += self._clock.spend(seconds)
        return self._propose(requests, quotas)


class SimulatedModel:
    """Drafts the recorded answer with the reliability of the passage, in passages of 48 tokens.

    The fill is lazy: the first call after a pause computes the rows that are missing. What a prompt's rows take beside
    the request's first token passes but is not counted, as with the prompt itself.
    """

    PASSAGE = 48

    def __init__(self, answers: dict[str, Sequence[int]], passes: Passes, clock: Clock) -> None:
        self.busy_s = 0.0
        self.reliabilities: dict[str, Sequence[float]] = {}
        self._answers, self._passes, self._clock = answers, passes, clock
        self._filled: dict[str, int] = {}

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Return recorded tokens, some of them wrong."""
        asked = [request for request, count in zip(requests, counts) if count]
        beside_prompts = [request for request in asked if request.num_output_tokens == 1]
        num_missing = sum(map(self._num_missing, asked))
        num_hidden = sum(map(self._num_missing, beside_prompts))
        pass_s, request_s, row_s = self._passes
        drafting_s = max(counts) * pass_s + sum(counts) * request_s
        self.busy_s += self._clock.spend(drafting_s + (num_missing - num_hidden) * row_s)
        self._clock.spend(num_hidden * row_s)
        self._filled.update((request.request_id, request.num_tokens) for request in asked)
        return [self._draft(request, count) for request, count in zip(requests, counts)]

    def _num_missing(self, request: Request) -> int:
        return request.num_tokens - self._filled.get(request.request_id, 0) - 1

    def _draft(self, request: Request, count: int) -> list[int]:
        at, answer = request.num_output_tokens, self._answers[request.request_id]
        reliabilities = self.reliabilities[request.request_id]
        tokens = list(answer[at : at + count])
        for i in range(len(tokens)):
            reliability = reliabilities[(at + i) // self.PASSAGE % len(reliabilities)]
            if random.Random(f"{answer} {at + i}").random() > reliability:
                tokens[i] += 1
        return tokens


@dataclass
class VirtualEngine:
    """An engine, and the virtual time that it has spent."""

    engine: Engine
    reciter: Reciter
    drafting: Charged | SimulatedModel
    clock: Clock

    def busy_s(self) -> float:
        """Seconds of all steps and of all drafting."""
        return self.reciter.busy_s + self.drafting.busy_s


def make_virtual_engine(
    speculative: SpeculativeConfig,
    machine: Machine,
    max_seqs: int,
    max_model_len: int,
    believed: Machine | None = None,
    noise: float = 0.0,
    clock: Clock | None = None,
) -> VirtualEngine:
    """Build it.

    Args:
        clock: by default one of virtual seconds alone.
        believed: what the choice of draft lengths is told of the machine before the first step.
        noise: standard deviation of the logarithm of a step's time, as the engine sees it.
    """
    clock = clock or Clock()
    reciter = Reciter(machine, clock, noise)
    passes = machine.passes.get(speculative.method)
    model = SimulatedModel(reciter.answers, passes, clock) if passes else None
    proposer = make_proposer(speculative, model)
    drafting = model or Charged(proposer, machine, clock)
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
    policy = _length_policy(speculative, believed or machine, clock) if speculative.adaptive else LengthPolicy()
    config = SchedulerConfig(
        max_num_seqs=max_seqs, max_num_batched_tokens=max_seqs * max_model_len, enable_chunked_prefill=False
    )
    scheduler = BatchScheduler(config, KVCacheManager(num_blocks, BLOCK_SIZE, False), policy)
    engine = Engine(admission, scheduler, reciter, proposer, OutputProcessor([], _no_scanner, clock), clock)
    return VirtualEngine(engine, reciter, drafting, clock)


def _length_policy(speculative: SpeculativeConfig, believed: Machine, clock: Clock) -> AdaptiveLength:
    times, passes = StepTimes(believed.rows_s, believed.request_s), believed.passes.get(speculative.method)
    if passes is None:
        return AdaptiveLength(times, None, True, clock)
    is_layer = speculative.method == "mtp"
    max_passes = speculative.num_model_steps if is_layer else speculative.num_speculative_tokens
    draft_passes = DraftPasses(speculative.method, max_passes, passes.pass_s, passes.request_s)
    return AdaptiveLength(times, draft_passes, speculative.extension is not None, clock)


def _no_scanner(request: Request) -> object:
    raise AssertionError("no stop strings here")
