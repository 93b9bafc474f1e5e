# SPDX-License-Identifier: Apache-2.0
"""The timing of steps separates the time of reading experts from that of rows and contexts, in virtual time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fastdeploy.core.step import RequestResult, StepPlan
from fastdeploy.spec_decode.adaptive.distinct_experts import INITIAL_EXPONENT
from fastdeploy.worker import step_timing
from fastdeploy.worker.step_timing import time_steps
from tests.spec_decode.adaptive.virtual_experts import Experts, Router

MAX_DRAFTS = 8
EXPERTS = Experts(4, 64, 6, expert_s=0.002)


class VirtualRunner:
    """A runner whose steps take a fixed time, and more for each row, request and distinct expert."""

    def __init__(self, experts: Experts, max_seqs: int, step_s: float = 0.1) -> None:
        self.now, self.step_s = 0.0, step_s
        self.num_steps = 0
        self.router = Router(experts)
        self.config = SimpleNamespace(max_seqs=max_seqs, block_size=16, vocab_limit=50_000)
        self.kv_caches = [SimpleNamespace(num_blocks=4000)]
        load = SimpleNamespace(array=self.router.load, num_experts=experts.num_experts, num_chosen=experts.num_chosen)
        self.model = SimpleNamespace(expert_load=load)

    def run(self, plan: StepPlan) -> list[RequestResult]:
        """Route equal tokens alike."""
        tokens = [
            token
            for s in plan.requests
            for token in s.request.tokens_of_rows(s.num_computed_tokens, s.num_scheduled_tokens)
        ]
        self.num_steps += 1
        self.now += self.step_s * (1 + 0.02 * len(tokens) + 0.01 * len(plan.requests))
        self.now += self.router.route((str(token), 0, 1) for token in tokens)
        return []


def time_virtual(runner: VirtualRunner) -> Any:
    return time_steps(runner, 256, MAX_DRAFTS, 8192, lambda: runner.now)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_seqs", [1, 4, 64])
@pytest.mark.parametrize("time_limit_s", [0.0, 1000.0])
def test_a_step_is_predicted_from_its_rows_requests_and_experts(
    monkeypatch: pytest.MonkeyPatch, max_seqs: int, time_limit_s: float
) -> None:
    monkeypatch.setattr(step_timing, "TIME_LIMIT_S", time_limit_s)
    runner = VirtualRunner(EXPERTS, max_seqs)
    times = time_virtual(runner)
    assert times.experts is not None
    assert times.experts.expert_s == pytest.approx(EXPERTS.expert_s, rel=0.01)
    for num_requests, num_drafts in ((1, 0), (1, 4), (1, 8), (min(4, max_seqs), 8), (min(16, max_seqs), 16)):
        num_rows = num_requests + num_drafts
        independent_rows = num_requests - 1 + (1 + num_drafts) ** INITIAL_EXPONENT
        experts_s = EXPERTS.expert_s * 4 * 64 * (1 - (1 - 6 / 64) ** independent_rows)
        expected_s = 0.1 * (1 + 0.02 * num_rows + 0.01 * num_requests) + experts_s
        predicted_s = times.rows_s(num_requests) + times.requests_s(num_requests, 512 * num_requests)
        predicted_s += times.drafts_s(num_requests, 512 * num_requests, ["mtp"], num_drafts)
        assert predicted_s == pytest.approx(expected_s, rel=0.05)


def test_slow_steps_are_timed_twice_in_seven_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_timing, "TIME_LIMIT_S", 0.0)
    runner = VirtualRunner(EXPERTS, 4)
    time_virtual(runner)
    assert runner.num_steps == 14


def test_experts_that_take_no_time_add_none() -> None:
    times = time_virtual(VirtualRunner(Experts(4, 64, 6, expert_s=0.0), 4))
    assert times.experts is not None and times.experts.expert_s == pytest.approx(0.0, abs=1e-9)
    assert times.rows_s(1) == pytest.approx(0.1 * 1.02, rel=0.02)
