# SPDX-License-Identifier: Apache-2.0
"""A step of full size has all rows and requests that the configuration allows, in blocks of their own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fastdeploy.core.request import Request
from fastdeploy.core.step import StepPlan
from fastdeploy.engine.engine import Engine
from fastdeploy.worker.full_step import num_blocks_of_full_step, run_full_step
from fastdeploy.worker.model_runner import ModelRunner, RunnerConfig

CONFIG = RunnerConfig(
    max_rows=2048,
    max_seqs=64,
    max_model_len=2048,
    block_size=64,
    max_drafts=5,
    hidden_size=64,
    vocab_size=512,
    vocab_limit=512,
    eos_token_ids=(),
    dtype="bfloat16",
)


def plan_of(config: RunnerConfig) -> tuple[StepPlan, list[Request]]:
    """Return the plan that would run, and the requests for which drafts are made."""
    plans, drafting = list[StepPlan](), list[Request]()
    runner = cast(ModelRunner, SimpleNamespace(config=config, run=plans.append))
    run_full_step(runner, lambda requests, counts: drafting.extend(requests))
    [plan] = plans
    return plan, drafting


@pytest.mark.parametrize(
    ("changes", "num_rows", "num_seqs"),
    [
        ({}, 2048, 64),
        ({"max_rows": 384}, 384, 64),
        ({"max_rows": 20}, 20, 4),
        ({"max_model_len": 256}, 2048, 64),
        ({"max_model_len": 64, "max_seqs": 2}, 126, 2),
        ({"max_drafts": 0}, 2048, 64),
        ({"max_seqs": 1}, 2047, 1),
    ],
)
def test_it_is_as_large_as_a_step_can_be(changes: dict[str, Any], num_rows: int, num_seqs: int) -> None:
    config = replace(CONFIG, **changes)
    plan, drafting = plan_of(config)
    assert plan.num_scheduled_tokens == num_rows
    assert len(plan.requests) == num_seqs
    assert len(drafting) == sum(entry.num_verify_rows > 0 for entry in plan.requests)
    blocks = [block for entry in plan.requests for block in entry.request.block_ids]
    assert blocks == list(range(num_blocks_of_full_step(config)))
    for entry in plan.requests:
        capacity = len(entry.request.block_ids) * config.block_size
        assert entry.num_scheduled_tokens <= min(capacity, config.max_model_len)
        assert len(entry.request.block_ids) <= config.max_blocks_per_seq


def test_a_real_runner_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastdeploy.config.args import engine_config_from_kwargs

    speculative = {"method": "mtp", "num_speculative_tokens": 2}
    keys = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 128, "num_gpu_blocks_override": 8}
    config, _ = engine_config_from_kwargs({"model": "demo", "speculative_config": speculative, **keys})
    runner = Engine.from_config(config).runner
    assert isinstance(runner, ModelRunner) and runner.observer is not None
    assert num_blocks_of_full_step(runner.config) <= 8
    run_full_step(runner, cast(Any, runner.observer).draft)
