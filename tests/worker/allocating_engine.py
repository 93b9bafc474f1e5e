# SPDX-License-Identifier: Apache-2.0
"""Runs the engine with count_allocations.cc preloaded; prints kind and number of large allocations of each step.

LD_PRELOAD=... FD_NUM_THREADS=1 python -m tests.worker.allocating_engine
"""

from __future__ import annotations

import ctypes
import json

from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.speculative_config import NgramConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.step import StepPlan
from fastdeploy.engine.engine import Engine

PERIOD = 20  # tokens after which the prompt repeats itself, so that n-grams match
Step = tuple[str, int]


def make_engine() -> Engine:
    """Return the demonstration model with n-gram drafts, chunks of 64 rows and without prefix caching."""
    return Engine.from_config(
        EngineConfig(
            model="demo",
            max_model_len=512,
            cache=CacheConfig(enable_prefix_caching=False),
            scheduler=SchedulerConfig(max_num_batched_tokens=64),
            speculative=NgramConfig(num_speculative_tokens=5, adaptive=False),
        )
    )


def kind_of(plan: StepPlan) -> str:
    """Return what the step does: prefill, verify drafts, or decode only."""
    if any(s.num_scheduled_tokens != s.num_verify_rows for s in plan.requests):
        return "prefill"
    return "verification" if any(s.num_verify_rows > 1 for s in plan.requests) else "decode"


def run(engine: Engine, name: str) -> list[Step]:
    """Serve a greedy and a sampled request together; return (kind, large allocations) of every step."""
    count_large = ctypes.CDLL(None).num_large_allocations
    prompt = [100 + i * 7 % 50 for i in range(PERIOD)] * 8
    for index, temperature in enumerate((0.0, 1.0)):
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
        engine.add_request(GenerationRequest(f"{name}-{index}", prompt, params))
    steps: list[Step] = []
    compute = engine.runner.run

    def run_and_record(plan: StepPlan) -> object:
        steps.append((kind_of(plan), 0))
        return compute(plan)

    engine.runner.run = run_and_record  # type: ignore[method-assign]
    while engine.has_unfinished():
        before = count_large()
        engine.step()
        steps[-1] = steps[-1][0], count_large() - before
    engine.runner.run = compute  # type: ignore[method-assign]
    return steps


if __name__ == "__main__":
    engine = make_engine()
    first = run(engine, "warm-up")
    print(json.dumps({"first": first, "warm": run(engine, "warm")}))
