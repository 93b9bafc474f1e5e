# SPDX-License-Identifier: Apache-2.0
"""The steps that benchmarks time have the shape that they report."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.shape_engine import FixedDraft, ShapeEngine, StepShape, Work
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.core.request import DraftQuota
from fastdeploy.core.step import StepPlan
from fastdeploy.ops.backends.cpu import library


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


@pytest.mark.parametrize(("quantization", "least", "most"), [("none", 2, 2), ("wint8", 1, 1.2), ("w4a8", 0.5, 1.2)])
def test_a_step_reads_the_packed_layers_the_head_and_the_keys_and_values(
    tiny: str, quantization: str, least: float, most: float
) -> None:
    work = ShapeEngine.load(tiny, quantization, max_num_seqs=1, max_model_len=64).work
    assert work.layer_parameters == 98_304
    assert least <= work.streamed_bytes / (98_304 + 4096 * 64) <= most
    assert work.num_bytes(StepShape(3, 1, 10)) == work.streamed_bytes + 3 * 10 * 256


def test_operations_are_those_of_weights_and_visible_positions(tiny: str) -> None:
    config = ModelConfig.from_pretrained(tiny)
    weights = 2.0 * (8 * 98_304 + 8 * 4096 * 64)
    visible = 93 + 94 + 95 + 96 + 97 + 98 + 99 + 100
    attention = 4.0 * 2 * 4 * 16 * visible
    assert Work(config, "none", 0, 0).operations(StepShape(1, 8, 100), 8) == (weights + attention, 0.0)
    assert Work(config, "w8a8", 0, 0).operations(StepShape(1, 8, 100), 8) == (attention, weights)
    products = 2 if library.isa().startswith("avx512") else 1  # of bytes by the two bytes of an input, or of words
    assert Work(config, "wint4", 0, 0).operations(StepShape(1, 8, 100), 8) == (attention, products * weights)
    prompt = StepShape(1, 100, 100)
    assert Work(config, "none", 0, 0).operations(prompt, 1)[0] == (
        2.0 * (100 * 98_304 + 4096 * 64) + 4.0 * 2 * 4 * 16 * 100 * 101 / 2
    ), "the causal half, and the head for one row"


def test_a_fixed_draft_is_limited_by_the_quota() -> None:
    proposer = FixedDraft()
    proposer.length = 5
    assert [len(draft) for draft in proposer.propose([], [DraftQuota(n, n) for n in (1, 5, 9)])] == [1, 5, 5]
