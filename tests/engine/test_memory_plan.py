# SPDX-License-Identifier: Apache-2.0
"""How many KV blocks there are, and what is refused because the memory does not hold it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastdeploy.config.engine_config import CacheConfig, EngineConfig
from fastdeploy.config.gpu_config import GpuConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.packed_checkpoint import PackedHeader
from fastdeploy.config.quantization import UNQUANTIZED
from fastdeploy.core.errors import ConfigError
from fastdeploy.engine import memory_plan
from fastdeploy.engine.memory_plan import MemoryPlan, plan_memory
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.ops.registry import select_backend

BLOCK_BYTES = 458752  # of the demonstration model


def cannot_measure(one: MemoryPlan) -> int:
    raise AssertionError("the size of a cache in the host's memory needs no step")


def plan(monkeypatch: pytest.MonkeyPatch, free_bytes: int, hands_over: bool = False, **cache: Any) -> MemoryPlan:
    monkeypatch.setattr(type(select_backend("cpu")), "free_memory_bytes", lambda self: free_bytes)
    config = EngineConfig(model="demo", hands_over=hands_over, cache=CacheConfig(**cache))
    return plan_memory(config, ModelConfig.from_pretrained(resolve_model_path("demo")), 2048, None, cannot_measure)


def test_by_default_the_cache_takes_at_most_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(monkeypatch, 100 * BLOCK_BYTES) == MemoryPlan(50, 64, BLOCK_BYTES)
    assert plan(monkeypatch, 10**12).num_blocks == 2048, "enough for all sequences"


@pytest.mark.parametrize(
    ("free_bytes", "cache", "bound"),
    [
        (100 * BLOCK_BYTES, {}, "half of the free memory"),
        (10**12, {}, "--max-num-seqs full contexts"),
        (10**12, {"num_blocks": 9}, "--num-gpu-blocks-override"),
        (10**12, {"kv_cache_memory": 9 * BLOCK_BYTES}, "--kv-cache-memory"),
    ],
)
def test_the_plan_says_what_decided_it(
    monkeypatch: pytest.MonkeyPatch, free_bytes: int, cache: dict[str, int], bound: str
) -> None:
    assert plan(monkeypatch, free_bytes, **cache).bound == bound


def test_pages_of_mapped_weights_are_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    header = PackedHeader("", "bfloat16", UNQUANTIZED, "", 60 * BLOCK_BYTES, 0, (), UNQUANTIZED, {})
    model = replace(ModelConfig.from_pretrained(resolve_model_path("demo")), packed=header)
    monkeypatch.setattr(type(select_backend("cpu")), "free_memory_bytes", lambda self: 100 * BLOCK_BYTES)
    for load_choices, num_blocks in (("default_v1", 20), ("dummy", 50)):
        config = EngineConfig(model="demo", load_choices=load_choices)
        assert plan_memory(config, model, 2048, None, cannot_measure).num_blocks == num_blocks


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
        ({"num_blocks": 1000 - 40}, 20),  # half of what is left for 40
        ({"num_blocks": 999}, 1),
    ],
)
def test_the_arena_takes_a_quarter_of_the_cache_two_contexts_half_of_the_rest_or_what_is_configured(
    monkeypatch: pytest.MonkeyPatch, cache: dict[str, int], num_slots: int
) -> None:
    found = plan(monkeypatch, 1000 * BLOCK_BYTES, hands_over=True, **cache)
    assert (found.num_slots, found.slot_bytes) == (num_slots, BLOCK_BYTES)
    assert found.arena_bytes == num_slots * BLOCK_BYTES
    assert plan(monkeypatch, 1000 * BLOCK_BYTES, **cache).num_slots == 0


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (
            {"num_blocks": 90, "kv_transfer_memory": 64 * BLOCK_BYTES},
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


def device_plan(monkeypatch: pytest.MonkeyPatch, used_bytes: int, utilization: float = 0.9, **keys: Any) -> MemoryPlan:
    """Return the plan on a device with memory for 1,000 blocks, of which a step has so much in use."""
    backend = type(select_backend("cpu"))
    monkeypatch.setattr(backend, "total_memory_bytes", lambda self: 1000 * BLOCK_BYTES)
    monkeypatch.setattr(backend, "free_memory_bytes", lambda self: 900 * BLOCK_BYTES)
    config = EngineConfig(model="demo", gpu=GpuConfig(gpu_memory_utilization=utilization), **keys)
    model_config = ModelConfig.from_pretrained(resolve_model_path("demo"))
    return plan_memory(config, model_config, 2048, None, lambda one: used_bytes)


def test_on_a_device_the_cache_takes_what_the_engine_may_use_and_a_step_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_plan(monkeypatch, 300 * BLOCK_BYTES).num_blocks == 600
    assert device_plan(monkeypatch, 300 * BLOCK_BYTES, utilization=1.0).num_blocks == 700
    assert device_plan(monkeypatch, 300 * BLOCK_BYTES + 1).num_blocks == 599


def test_a_configured_cache_on_a_device_needs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_plan(monkeypatch, 10**15, cache=CacheConfig(num_blocks=900)).num_blocks == 900
    with pytest.raises(ConfigError, match=r"901 blocks of 458752 bytes do not fit into the free memory, .* holds 900"):
        device_plan(monkeypatch, 0, cache=CacheConfig(num_blocks=901))


def test_a_device_without_room_for_a_block_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    message = (
        "gpu_memory_utilization: 0.3 of 458752000 bytes do not hold one block of 458752 bytes beside the 137625600 "
    )
    with pytest.raises(ConfigError, match=message):
        device_plan(monkeypatch, 300 * BLOCK_BYTES, utilization=0.3)


def test_the_arena_on_a_device_lies_in_the_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "available_memory_bytes", lambda: 0)
    with pytest.raises(ConfigError, match=r"kv_transfer_memory: .* which leaves 0"):
        device_plan(monkeypatch, 0, hands_over=True)
