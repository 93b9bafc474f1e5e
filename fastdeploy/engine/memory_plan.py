# SPDX-License-Identifier: Apache-2.0
"""Decides how many KV blocks there are, and allocates them."""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.ops.attention import KVCache, allocate_kv_cache
from fastdeploy.ops.registry import selected_backend
from fastdeploy.spec_decode.drafting.drafting_model import DraftingModelConfig


@dataclass(frozen=True)
class MemoryPlan:
    """The number of KV blocks and their size in memory.

    Attributes:
        block_bytes: of one block over all layers, including those of the drafting model.
        extra_bytes: of the drafting model's scratch blocks.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    extra_bytes: int = 0

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the cache holds."""
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the whole cache."""
        return self.num_blocks * self.block_bytes + self.extra_bytes


def plan_memory(
    config: EngineConfig, model_config: ModelConfig, max_model_len: int, drafting: DraftingModelConfig | None
) -> MemoryPlan:
    """Return the configured number of blocks; by default, those of all sequences at full length.

    The default takes at most half of the free memory.

    Raises:
        ConfigError: the memory does not hold one block, or not as many as are configured; names the maximum.
    """
    block_size, max_num_seqs = config.cache.block_size, config.scheduler.max_num_seqs
    backend = selected_backend()
    layer_bytes = backend.kv_bytes_per_token(
        model_config.num_kv_heads, model_config.head_dim, model_config.kv_cache_dtype
    )
    block_bytes, extra_bytes = model_config.num_layers * layer_bytes * block_size, 0
    if drafting is not None:
        block_bytes += drafting.block_bytes
        extra_bytes = drafting.cache_bytes * max_num_seqs
    if config.cache.num_blocks is not None:
        num_blocks = config.cache.num_blocks
    elif config.cache.kv_cache_memory is not None:
        num_blocks = (config.cache.kv_cache_memory - extra_bytes) // block_bytes
    else:
        max_blocks_per_seq = -(-max_model_len // block_size)
        num_blocks = min(max_num_seqs * max_blocks_per_seq, backend.free_memory_bytes() // 2 // block_bytes)
    if num_blocks < 1:
        raise ConfigError("kv_cache_memory", f"too little for one block of {block_bytes} bytes")
    plan, free_bytes = MemoryPlan(num_blocks, block_size, block_bytes, extra_bytes), backend.free_memory_bytes()
    if plan.num_bytes > free_bytes:
        flag = "kv_cache_memory" if config.cache.num_blocks is None else "num_gpu_blocks_override"
        most = max(0, (free_bytes - extra_bytes) // block_bytes)
        message = f"{num_blocks} blocks of {block_bytes} bytes do not fit into the free memory, which holds {most}"
        raise ConfigError(flag, message)
    return plan


def allocate_kv_caches(model_config: ModelConfig, memory: MemoryPlan) -> list[KVCache]:
    """Return the KV cache of each layer of the target."""
    shape = (memory.num_blocks, memory.block_size, model_config.num_kv_heads, model_config.head_dim)
    return [allocate_kv_cache(*shape, model_config.kv_cache_dtype) for _ in range(model_config.num_layers)]
