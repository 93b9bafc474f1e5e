# SPDX-License-Identifier: Apache-2.0
"""Decides how many KV blocks there are, and allocates them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.machine import available_memory_bytes
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.ops.caches import LayerCache, allocate_cache
from fastdeploy.ops.registry import selected_backend
from fastdeploy.spec_decode.drafting.drafting_model import DraftingModelConfig
from fastdeploy.worker.block_mover import slot_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """The number of KV blocks and their size in memory.

    Attributes:
        block_bytes: of one block over all layers, including those of the drafting model.
        extra_bytes: of the drafting model's scratch blocks.
        num_slots, slot_bytes: of the arena for blocks that other nodes fetch; 0 without one.
        bound: what decided the number of blocks.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    extra_bytes: int = 0
    num_slots: int = 0
    slot_bytes: int = 0
    bound: str = field(default="", compare=False)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the cache holds."""
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the whole cache."""
        return self.num_blocks * self.block_bytes + self.extra_bytes

    @property
    def arena_bytes(self) -> int:
        """Return the bytes of the arena."""
        return self.num_slots * self.slot_bytes


MeasureStep = Callable[[MemoryPlan], int]
"""Returns the bytes that a device has in use after a step of full size, its KV cache excepted.

The argument is a plan of one block; the step may need more of them.
"""


def plan_memory(
    config: EngineConfig,
    model_config: ModelConfig,
    max_model_len: int,
    drafting: DraftingModelConfig | None,
    measure_step: MeasureStep,
) -> MemoryPlan:
    """Return the configured number of blocks.

    By default, they take what the configured share of a device's own memory leaves, and in the host's memory as much as
    all sequences at full length need, but at most half of what is free.

    Raises:
        ConfigError: the memory does not hold one block, or not as many as are configured; names the maximum.
    """
    cache, total_bytes = config.cache, selected_backend().total_memory_bytes()
    one = _plan_block(config, model_config, drafting)
    free_bytes = free_memory_bytes(config, model_config, drafting)
    if total_bytes is not None and not cache.has_given_size:
        plan = _plan_device(config.gpu.gpu_memory_utilization, one, total_bytes, measure_step(one))
    else:
        plan = _plan_given(config, one, max_model_len, free_bytes)
    if not config.hands_over:
        return plan
    left_bytes = free_bytes - plan.num_bytes if total_bytes is None else available_memory_bytes()
    return _plan_arena(config, plan, max_model_len, drafting, left_bytes)


def _plan_block(config: EngineConfig, model_config: ModelConfig, drafting: DraftingModelConfig | None) -> MemoryPlan:
    """Return the plan of a cache with one block."""
    layer_bytes = selected_backend().kv_bytes_per_token(model_config.cache_spec)
    block_bytes, extra_bytes = model_config.num_layers * layer_bytes * config.cache.block_size, 0
    if drafting is not None:
        block_bytes += drafting.block_bytes
        extra_bytes = drafting.cache_bytes * config.scheduler.max_num_seqs
    return MemoryPlan(1, config.cache.block_size, block_bytes, extra_bytes)


def free_memory_bytes(config: EngineConfig, model_config: ModelConfig, drafting: DraftingModelConfig | None) -> int:
    """Return the memory that caches can still take beside the weights."""
    return max(0, selected_backend().free_memory_bytes() - _mapped_bytes(config, model_config, drafting))


def _mapped_bytes(config: EngineConfig, model_config: ModelConfig, drafting: DraftingModelConfig | None) -> int:
    """Return the bytes of weights that are mapped from files; the system counts such pages as free memory."""
    if config.load_choices == "dummy":
        return 0
    models = [model_config, *([drafting.config] if drafting is not None and drafting.path is not None else [])]
    files = {model.path: model.packed.num_bytes for model in models if model.packed is not None}
    return sum(files.values())


def _plan_device(share: float, one: MemoryPlan, total_bytes: int, used_bytes: int) -> MemoryPlan:
    """Return a plan that fills the share of a device's memory which its engine may use."""
    num_blocks = (int(share * total_bytes) - used_bytes - one.extra_bytes) // one.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            "gpu_memory_utilization",
            f"{share:g} of {total_bytes} bytes do not hold one block of {one.block_bytes} bytes beside the "
            f"{used_bytes + one.extra_bytes} bytes that are in use",
        )
    return replace(one, num_blocks=num_blocks, bound="--gpu-memory-utilization")


def _plan_given(config: EngineConfig, one: MemoryPlan, max_model_len: int, free_bytes: int) -> MemoryPlan:
    """Return a plan of the configured number of blocks, or of the default in the host's memory."""
    if config.cache.num_blocks is not None:
        num_blocks, bound = config.cache.num_blocks, "--num-gpu-blocks-override"
    elif config.cache.kv_cache_memory is not None:
        num_blocks = (config.cache.kv_cache_memory - one.extra_bytes) // one.block_bytes
        bound = "--kv-cache-memory"
    else:
        most, num_blocks = free_bytes // 2 // one.block_bytes, _blocks_of_all_sequences(config, one, max_model_len)
        bound = "half of the free memory" if most < num_blocks else "--max-num-seqs full contexts"
        num_blocks = min(num_blocks, most)
    if num_blocks < 1:
        raise ConfigError("kv_cache_memory", f"too little for one block of {one.block_bytes} bytes")
    plan = replace(one, num_blocks=num_blocks, bound=bound)
    if plan.num_bytes > free_bytes:
        flag = "kv_cache_memory" if config.cache.num_blocks is None else "num_gpu_blocks_override"
        most = max(0, (free_bytes - one.extra_bytes) // one.block_bytes)
        message = f"{num_blocks} blocks of {one.block_bytes} bytes do not fit into the free memory, which holds {most}"
        raise ConfigError(flag, message)
    return plan


def _blocks_of_all_sequences(config: EngineConfig, one: MemoryPlan, max_model_len: int) -> int:
    """Return the blocks that as many sequences as a step can have need at full length."""
    return config.scheduler.max_num_seqs * -(-max_model_len // one.block_size)


def _plan_arena(
    config: EngineConfig, plan: MemoryPlan, max_model_len: int, drafting: DraftingModelConfig | None, left_bytes: int
) -> MemoryPlan:
    """Return the plan with the configured arena.

    By default, it has a quarter of the cache and at least two full contexts, but at most half of what the cache leaves.

    Raises:
        ConfigError: the arena does not hold one block, or the memory does not hold the arena; names the maximum.
    """
    parts = [plan.block_bytes]
    if drafting is not None:
        states_bytes = drafting.state_bytes * plan.block_size
        parts = [plan.block_bytes - drafting.block_bytes, drafting.cache_bytes, states_bytes]
    size, configured = slot_bytes(parts), config.cache.kv_transfer_memory
    if configured is not None:
        num_slots = configured // size
    else:
        wanted = max(plan.num_bytes // 4 // size, 2 * -(-max_model_len // plan.block_size))
        num_slots = min(wanted, max(1, left_bytes // 2 // size))
    if num_slots < 1:
        raise ConfigError("kv_transfer_memory", f"too little for one block of {size} bytes")
    plan = replace(plan, num_slots=num_slots, slot_bytes=size)
    if plan.arena_bytes > left_bytes:
        raise ConfigError(
            "kv_transfer_memory",
            f"{plan.arena_bytes} bytes do not fit into the free memory beside the KV cache, which leaves {left_bytes}",
        )
    return plan


def allocate_kv_caches(model_config: ModelConfig, memory: MemoryPlan) -> list[LayerCache]:
    """Return the KV cache of each layer of the target."""
    num_blocks, block_size, spec = memory.num_blocks, memory.block_size, model_config.cache_spec
    return [allocate_cache(num_blocks, block_size, spec) for _ in range(model_config.num_layers)]
