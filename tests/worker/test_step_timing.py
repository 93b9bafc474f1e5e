# SPDX-License-Identifier: Apache-2.0
"""Steps of all sizes are timed at start-up, even with the smallest cache."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.length_policy import LengthPolicy
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.step import StepPlan
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.spec_decode.adaptive.adaptive_length import AdaptiveLength
from fastdeploy.spec_decode.drafting.drafter import Drafter
from fastdeploy.worker import step_timing
from fastdeploy.worker.model_runner import ModelRunner
from fastdeploy.worker.step_timing import time_draft_passes, time_steps
from tests.doubles import run

SUFFIX = {"method": "suffix", "num_speculative_tokens": 16}
MTP = {"method": "mtp", "num_speculative_tokens": 3}
CONTEXT, LONG = 32, 56  # tokens, in a cache of 64
FIRST_STEPS = [(CONTEXT, (1,) * 4), (CONTEXT, (4,)), (CONTEXT, (1,)), (CONTEXT, (9,)), (LONG, (1,)), (LONG, (9,))]
"""The context of the first steps that are timed, and their rows by request."""


def build(adaptive: bool = True, num_blocks: int | None = 40, method: dict[str, Any] = SUFFIX) -> Engine:
    return make_engine(
        EngineConfig(
            model="demo",
            max_model_len=64,
            cache=CacheConfig(block_size=16, num_blocks=num_blocks, enable_prefix_caching=False),
            scheduler=SchedulerConfig(max_num_seqs=4),
            speculative=parse_speculative_config(method | {"adaptive": adaptive}),
        )
    )


def runner_of(engine: Engine) -> ModelRunner:
    assert isinstance(engine.runner, ModelRunner)
    return engine.runner


def test_steps_of_more_rows_never_take_less_time() -> None:
    times = time_steps(runner_of(build(adaptive=False)), 20, 5, num_cache_tokens=64, clock=time.thread_time)
    seconds = [times.rows_s(rows) for rows in range(1, 21)]
    assert seconds[0] > 0.0
    assert seconds == sorted(seconds)
    assert times.requests_s(4, 128) >= times.requests_s(1, 32) >= 0.0


def record_plans(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Return a list that gets the plan of each step that the runner runs from now on."""
    run, plans = runner.run, list[StepPlan]()

    def spy(plan: StepPlan) -> Any:
        plans.append(plan)
        return run(plan)

    monkeypatch.setattr(runner, "run", spy)
    return plans


def test_single_rows_and_full_drafts_are_timed_even_if_steps_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_timing, "TIME_LIMIT_S", 0.0)
    runner = runner_of(build(adaptive=False))
    plans = record_plans(runner, monkeypatch)
    time_steps(runner, 36, 8, num_cache_tokens=64, clock=time.thread_time)
    assert Counter(
        (plan.requests[0].num_computed_tokens + 1, *(s.num_scheduled_tokens for s in plan.requests)) for plan in plans
    ) == {(context, *rows): 2 for context, rows in FIRST_STEPS}


def test_all_row_counts_are_timed_if_steps_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_timing, "TIME_LIMIT_S", 1000.0)
    runner = runner_of(build(adaptive=False))
    plans = record_plans(runner, monkeypatch)
    time_steps(runner, 20, 5, num_cache_tokens=64, clock=time.thread_time)
    usual = [plan for plan in plans if plan.requests[0].num_computed_tokens == CONTEXT - 1]
    assert {plan.num_scheduled_tokens for plan in usual} == {1, 2, 3, 4, 6, 8, 12, 16}


def test_requests_that_are_timed_together_have_separate_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(build(adaptive=False))
    plans = record_plans(runner, monkeypatch)
    time_steps(runner, 4, 8, num_cache_tokens=64, clock=time.thread_time)
    plan = next(plan for plan in plans if len(plan.requests) == 4)
    assert [scheduled.request.block_ids for scheduled in plan.requests] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9, 10, 11],
    ]


def test_what_contexts_add_to_rows_of_a_request_is_told_apart_from_what_they_add_to_it() -> None:
    """In virtual time a request's context of 32 tokens costs 3 s, and that of each of its rows 2 s more."""
    runner, now = runner_of(build(adaptive=False)), 0.0

    def run_virtually(plan: StepPlan) -> None:
        nonlocal now
        now += 50.0 + plan.num_scheduled_tokens
        now += sum((3.0 + 2.0 * s.num_scheduled_tokens) * (s.num_computed_tokens + 1) / CONTEXT for s in plan.requests)

    runner.run = run_virtually  # type: ignore[method-assign, assignment]
    times = time_steps(runner, 20, 4, num_cache_tokens=64, clock=lambda: now)
    num_tokens = CONTEXT
    assert times.requests_s(4, 4 * num_tokens) == pytest.approx(4 * (3.0 + 2.0))
    assert times.drafts_s(2, 2 * num_tokens, ["mtp"] * 2, 3) == pytest.approx(3 * (1.0 + 2.0))
    assert times.drafts_s(2, num_tokens, ["mtp"] * 2, 3) == pytest.approx(3 * (1.0 + 1.0))
    assert times.rows_s(4) == pytest.approx(54.0)


@pytest.mark.parametrize("num_cache_tokens", [1, 16, 64])
def test_draft_passes_are_timed(num_cache_tokens: int) -> None:
    drafter = runner_of(build(False, method=MTP)).observer
    assert isinstance(drafter, Drafter)
    first, other = time_draft_passes(drafter.draft, drafter.config, num_cache_tokens, time.thread_time)
    assert 0.0 < first.rows_s(1) <= first.rows_s(4) <= first.rows_s(100)
    assert 0.0 <= other.rows_s(1) <= other.rows_s(4) <= other.rows_s(100)


@pytest.mark.parametrize("num_blocks", [1, 2, 40])
@pytest.mark.parametrize("method", [SUFFIX, MTP])
def test_timing_fits_in_the_cache_and_leaves_no_state(num_blocks: int, method: dict[str, Any]) -> None:
    requests = [GenerationRequest("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))]
    plain, adaptive = build(False, num_blocks, method), build(True, num_blocks, method)
    assert type(plain.length_policy) is LengthPolicy and isinstance(adaptive.length_policy, AdaptiveLength)
    assert run(adaptive, requests) == run(plain, requests)
    adaptive.check_integrity()
    assert adaptive.stats().num_free_blocks == num_blocks
