# SPDX-License-Identifier: Apache-2.0
"""An engine counts how the rows of its steps are spread over experts."""

from __future__ import annotations

from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.stats import EngineStats
from fastdeploy.engine.engine_factory import make_engine
from tests.models.model_driver import GOLDEN


def stats_after_a_prompt_and_one_token(name: str) -> EngineStats:
    """Return the counters after a step of three rows and one of one row."""
    cache, scheduler = CacheConfig(block_size=16, num_blocks=8), SchedulerConfig(max_num_seqs=2)
    engine = make_engine(EngineConfig(model=str(GOLDEN / name), max_model_len=48, cache=cache, scheduler=scheduler))
    engine.add_request(GenerationRequest("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=2)))
    while engine.has_unfinished():
        engine.step()
    return engine.stats()


def test_steps_of_a_model_with_experts_are_counted() -> None:
    stats = stats_after_a_prompt_and_one_token("glm4_moe")  # eight experts in layers 1 and 2, two per row
    distinct, experts = stats.histograms["moe_distinct_experts"], stats.experts
    assert experts is not None and experts.layers == [1, 2]
    assert experts.mean_load == (3 + 1) * 2 / 8
    assert all(1 + 1 <= load <= 3 + 1 for load in experts.largest_loads)
    assert sum(distinct.counts) == 2 and distinct.counts[1] >= 1 and 2 + 2 <= distinct.total <= 6 + 2


def test_steps_of_a_dense_model_are_not() -> None:
    stats = stats_after_a_prompt_and_one_token("qwen3")
    assert stats.experts is None and sum(stats.histograms["moe_distinct_experts"].counts) == 0
