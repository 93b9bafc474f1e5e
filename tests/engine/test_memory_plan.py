# SPDX-License-Identifier: Apache-2.0
"""How many KV blocks there are, and what is refused because the memory does not hold it."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy.config.engine_config import CacheConfig, EngineConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.engine.memory_plan import MemoryPlan, plan_memory
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.ops.registry import select_backend

BLOCK_BYTES = 458752  # of the demonstration model


def plan(monkeypatch: pytest.MonkeyPatch, free_bytes: int, hands_over: bool = False, **cache: Any) -> MemoryPlan:
    monkeypatch.setattr(type(select_backend("cpu")), "free_memory_bytes", lambda self: free_bytes)
    config = EngineConfig(model="demo", hands_over=hands_over, cache=CacheConfig(**cache))
    return plan_memory(config, ModelConfig.from_pretrained(resolve_model_path("demo")), 2048, None)


def test_by_default_the_cache_takes_at_most_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(monkeypatch, 100 * BLOCK_BYTES) == MemoryPlan(50, 64, BLOCK_BYTES)
    assert plan(monkeypatch, 10**12).num_blocks == 2048, "enough for all sequences"


def test_configured_blocks_may_take_all_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(monkeypatch, 100 * BLOCK_BYTES, num_blocks=100).num_blocks == 100
    assert plan(monkeypatch, 100 * BLOCK_BYTES, kv_cache_memory=100 * BLOCK_BYTES).num_blocks == 100


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (
            {"num_blocks": 101},
            "num_gpu_blocks_override: 101 blocks of 458752 bytes do not fit into the free memory, which holds 100",
        ),
        (
            {"kv_cache_memory": 150 * BLOCK_BYTES},
            "kv_cache_memory: 150 blocks of 458752 bytes do not fit into the free memory, which holds 100",
        ),
        ({"kv_cache_memory": BLOCK_BYTES - 1}, "kv_cache_memory: too little for one block of 458752 bytes"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused_with_the_maximum(
    monkeypatch: pytest.MonkeyPatch, cache: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(monkeypatch, 100 * BLOCK_BYTES, **cache)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("cache", "num_slots"),
    [
        ({"num_blocks": 400}, 100),
        ({"num_blocks": 100}, 64),  # two contexts of 32 blocks
        ({"num_blocks": 100, "kv_transfer_memory": 7 * BLOCK_BYTES + 1}, 7),
    ],
)
def test_the_arena_takes_a_quarter_of_the_cache_two_contexts_or_what_is_configured(
    monkeypatch: pytest.MonkeyPatch, cache: dict[str, int], num_slots: int
) -> None:
    found = plan(monkeypatch, 10**12, hands_over=True, **cache)
    assert (found.num_slots, found.slot_bytes) == (num_slots, BLOCK_BYTES)
    assert found.arena_bytes == num_slots * BLOCK_BYTES
    assert plan(monkeypatch, 10**12, **cache).num_slots == 0


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (
            {"num_blocks": 90},
            "kv_transfer_memory: 29360128 bytes do not fit into the free memory beside the KV cache, which leaves "
            "4587520",
        ),
        ({"num_blocks": 9, "kv_transfer_memory": 4096}, "kv_transfer_memory: too little for one block of 458752 bytes"),
    ],
)
def test_an_arena_that_does_not_fit_is_refused_with_the_maximum(
    monkeypatch: pytest.MonkeyPatch, cache: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(monkeypatch, 100 * BLOCK_BYTES, hands_over=True, **cache)
    assert str(caught.value) == message
