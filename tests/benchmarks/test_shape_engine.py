# SPDX-License-Identifier: Apache-2.0
"""The steps that benchmarks time have the shape that they report."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.shape_engine import FixedDraft, ShapeEngine, StepShape, tokens
from fastdeploy.core.request import DraftQuota
from fastdeploy.core.step import StepPlan


def spy(loaded: ShapeEngine) -> list[StepPlan]:
    """Return a list to which every computed plan is added."""
    plans: list[StepPlan] = []
    run = loaded.engine.runner._runner.run  # type: ignore[attr-defined]

    def recording(plan: StepPlan) -> Any:
        plans.append(plan)
        return run(plan)

    loaded.engine.runner._runner.run = recording  # type: ignore[attr-defined]
    return plans


@pytest.mark.parametrize("step", [StepShape(4, 1, 300), StepShape(1, 8, 300), StepShape(1, 1, 9)])
def test_a_step_has_its_rows_and_context_and_emits_one_token_per_request(tiny: str, step: StepShape) -> None:
    loaded = ShapeEngine.load(tiny, "none", max_num_seqs=4, max_model_len=320, max_drafts=7)
    loaded.skip_prefill()
    plans = spy(loaded)
    for _ in range(2):
        ids = loaded.start(step, num_steps=3)
        for _ in range(3):
            loaded.engine.step()
        assert len(ids) == step.num_requests
        loaded.stop(ids)
    rows = [[s.num_scheduled_tokens for s in plan.requests] for plan in plans]
    assert rows == 6 * [step.num_requests * [step.rows_each]]
    ends = [[s.num_computed_tokens + s.num_scheduled_tokens for s in plan.requests] for plan in plans]
    assert ends == 2 * [step.num_requests * [step.context + i] for i in range(3)]
    assert not loaded.engine.has_unfinished()


def test_neighbouring_tokens_differ() -> None:
    assert len(set(tokens(100))) == 100
    assert tokens(3, first=2) == tokens(5)[2:]


def test_a_fixed_draft_is_limited_by_the_quota() -> None:
    proposer = FixedDraft()
    proposer.length = 5
    assert [len(draft) for draft in proposer.propose([], [DraftQuota(n, n) for n in (1, 5, 9)])] == [1, 5, 5]
