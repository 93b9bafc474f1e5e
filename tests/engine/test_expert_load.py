# SPDX-License-Identifier: Apache-2.0
"""What the routers of a model report of a step, and what adaptive length makes of it at start-up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.engine_factory import _min_prefill_rows, make_engine
from fastdeploy.spec_decode.adaptive.adaptive_length import AdaptiveLength
from fastdeploy.spec_decode.adaptive.distinct_experts import MEAN_WEIGHT
from fastdeploy.worker.model_runner import ModelRunner
from tests.models.model_driver import GOLDEN

FAMILIES = {"qwen3_moe": (2, 8, 2), "ernie4_5_moe": (2, 8, 3), "glm4_moe": (2, 8, 2)}  # sparse layers, E and k


def build(name: str, method: str = "suffix") -> Engine:
    return make_engine(
        EngineConfig(
            model=str(GOLDEN / name),
            max_model_len=48,
            cache=CacheConfig(block_size=16, num_blocks=40),
            scheduler=SchedulerConfig(max_num_seqs=4),
            speculative=parse_speculative_config({"method": method, "num_speculative_tokens": 4}),
        )
    )


def run_step(engine: Engine, prompts: Sequence[list[int]]) -> None:
    """Run some prompts, then one step in which each has one row."""
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        engine.add_request(GenerationRequest(str(i), prompt, params))
    engine.step()
    engine.step()


@pytest.mark.parametrize("name", FAMILIES)
def test_each_sparse_layer_reports_distinct_experts_and_the_largest_load(name: str) -> None:
    num_layers, num_experts, num_chosen = FAMILIES[name]
    engine = build(name)
    assert isinstance(engine.runner, ModelRunner)
    load = engine.runner.model.expert_load
    assert load is not None and (load.num_experts, load.num_chosen) == (num_experts, num_chosen)
    run_step(engine, [[5, 6, 7]])
    assert load.array.tolist() == [[num_chosen, 1]] * num_layers
    engine.abort("0")
    run_step(engine, [[5, 6, 7], [30, 31], [80]])
    for distinct, largest in load.array.tolist():
        assert num_chosen <= distinct <= min(num_experts, 3 * num_chosen)
        assert 1 <= largest <= 3 and distinct * largest >= 3 * num_chosen


def test_experts_are_timed_at_the_start_and_counted_in_steps() -> None:
    engine = build("qwen3_moe")
    assert isinstance(engine.length_policy, AdaptiveLength)
    experts = engine.length_policy._times.experts
    assert experts is not None and experts.expert_s >= 0.0
    assert experts._requests == 1.0
    run_step(engine, [[5, 6, 7]] * 4)
    assert experts._requests == pytest.approx(1 - MEAN_WEIGHT), "equal requests count for one"


@pytest.mark.parametrize(
    ("shape", "rows"), [("qwen3-0.6b", 64), ("qwen3-30b-a3b", 128), ("ernie-4.5-21b-a3b", 85), ("glm-4.5-air", 128)]
)
def test_chunks_of_prompts_have_eight_rows_per_expert_on_average(shape: str, rows: int) -> None:
    folder = Path(__file__).parent.parent.parent / "benchmarks" / "shapes" / shape
    assert _min_prefill_rows(ModelConfig.from_pretrained(str(folder))) == rows


def test_dense_models_have_no_experts() -> None:
    engine = build("qwen3")
    assert isinstance(engine.runner, ModelRunner) and isinstance(engine.length_policy, AdaptiveLength)
    assert engine.runner.model.expert_load is None and engine.length_policy._times.experts is None
