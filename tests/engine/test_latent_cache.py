# SPDX-License-Identifier: Apache-2.0
"""A cache of latent rows has the bytes of these rows and no more, wherever an engine says its size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.speculative_config import AnySpeculativeConfig, MTPConfig, NaiveConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.kv_cache.arena import page_aligned
from fastdeploy.ops.caches import LayerCache
from fastdeploy.ops.registry import selected_backend
from fastdeploy.worker.model_runner import ModelRunner
from tests.exactness.requests import run_all
from tests.models.latent_forms import HIDDEN, config_of

V3_SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
V3_BYTES = 1152  # per token and layer, in bfloat16
NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE, NUM_SEQS = 3, 6, 16, 2
LAYER = MTPConfig(num_speculative_tokens=2, adaptive=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    sizes = {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1, **V3_SIZES}
    (path / "config.json").write_text(json.dumps({**config_of("groups of V3"), **sizes}))
    return path


def engine_of(folder: Path, speculative: AnySpeculativeConfig, dtype: str = "auto", **cache: Any) -> Engine:
    """Return an engine with weights from nowhere, which hands over blocks."""
    return make_engine(
        EngineConfig(
            model=str(folder),
            dtype=dtype,
            load_choices="dummy",
            max_model_len=64,
            hands_over=True,
            cache=CacheConfig(**{"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, **cache}),
            scheduler=SchedulerConfig(max_num_seqs=NUM_SEQS, max_num_batched_tokens=32),
            speculative=speculative,
        )
    )


def bytes_of(caches: Sequence[LayerCache]) -> list[int]:
    """Return the bytes of each cache's tensors."""
    return [sum(int(t.size) * int(t.element_size()) for t in cache.tensors) for cache in caches]


def part_bytes(engine: Engine) -> dict[str, int]:
    """Return the bytes of each part of a slot in the arena of an engine."""
    assert engine.transfer is not None
    return {name: part.num_bytes for name, part in engine.transfer.arena.parts.items()}


@pytest.mark.parametrize(("dtype", "num_bytes"), [("bfloat16", V3_BYTES), ("float32", 2 * V3_BYTES)])
def test_pool_plan_arena_and_description_say_the_bytes_of_latent_rows(folder: Path, dtype: str, num_bytes: int) -> None:
    engine = engine_of(folder, NaiveConfig(), dtype)
    block_bytes = BLOCK_SIZE * num_bytes
    assert isinstance(engine.runner, ModelRunner)
    assert bytes_of(engine.runner.kv_caches) == [NUM_BLOCKS * block_bytes] * NUM_LAYERS
    for cache in engine.runner.kv_caches:
        (region,) = selected_backend().block_regions(cache, NUM_BLOCKS)
        assert (region.num_heads, region.block_bytes) == (1, block_bytes)
    description = engine.describe()
    assert description["kv_cache"]["bytes"] == NUM_BLOCKS * NUM_LAYERS * block_bytes
    assert part_bytes(engine) == {"target": NUM_LAYERS * block_bytes}
    slots = description["cluster"]
    assert slots["slot_bytes"] == page_aligned(NUM_LAYERS * block_bytes)
    assert slots["bytes"] == slots["num_slots"] * slots["slot_bytes"]


def test_a_layer_for_mtp_takes_the_bytes_of_one_more_layer_and_of_the_states_that_it_reads(folder: Path) -> None:
    engine = engine_of(folder, LAYER)
    layer_bytes, states_bytes = BLOCK_SIZE * V3_BYTES, BLOCK_SIZE * 2 * HIDDEN
    scratch_bytes = NUM_SEQS * layer_bytes  # a block of drafts for each request
    block_bytes = (NUM_LAYERS + 1) * layer_bytes + states_bytes
    assert engine.describe()["kv_cache"]["bytes"] == NUM_BLOCKS * block_bytes + scratch_bytes
    assert part_bytes(engine) == {
        "target": NUM_LAYERS * layer_bytes,
        "drafting": layer_bytes,
        "states": states_bytes,
    }


def test_a_given_memory_holds_as_many_blocks_of_latent_rows_as_fit(folder: Path) -> None:
    block_bytes = NUM_LAYERS * BLOCK_SIZE * V3_BYTES
    for given, count in ((5 * block_bytes, 5), (5 * block_bytes - 1, 4)):
        engine = engine_of(folder, NaiveConfig(), num_blocks=None, kv_cache_memory=given)
        assert engine.stats().num_blocks == engine.describe()["kv_cache"]["num_blocks"] == count


def test_a_cache_takes_the_memory_that_was_planned_when_it_is_used(folder: Path) -> None:
    engine = engine_of(folder, NaiveConfig(), num_blocks=None)
    assert engine.stats().resident_cache_bytes == 0
    run_all(engine, [GenerationRequest("r", [5] * 17, SamplingParams(max_tokens=1))])
    assert engine.stats().resident_cache_bytes == engine.describe()["kv_cache"]["bytes"]
    assert engine.describe()["kv_cache"]["bytes"] == 8 * NUM_LAYERS * BLOCK_SIZE * V3_BYTES  # two contexts of 64
