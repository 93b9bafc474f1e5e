# SPDX-License-Identifier: Apache-2.0
"""The cache of one layer, whatever kind of attention reads it."""

from __future__ import annotations

from typing import Protocol

from paddle import Tensor

from fastdeploy.config.cache_spec import CacheSpec
from fastdeploy.ops.attention import allocate_kv_cache
from fastdeploy.ops.latent_attention import allocate_latent_cache


class LayerCache(Protocol):
    """What one layer has cached. A block is one contiguous byte range of each tensor."""

    @property
    def block_size(self) -> int:
        """Positions per block."""

    @property
    def num_blocks(self) -> int:
        """Blocks of every tensor."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, [num_blocks, ...]; only the backend that allocated them knows the layout inside a block."""


def allocate_cache(num_blocks: int, block_size: int, spec: CacheSpec) -> LayerCache:
    """Allocate the cache of one layer for the selected backend, filled with zeros.

    In the host's memory, its pages take memory when they are first written.

    Raises:
        ValueError: as the operator that allocates caches of this kind.
    """
    if spec.kind == "latent":
        latent_dim = spec.head_dim - spec.rope_dim
        return allocate_latent_cache(num_blocks, block_size, latent_dim, spec.rope_dim, spec.dtype)
    return allocate_kv_cache(num_blocks, block_size, spec.num_heads, spec.head_dim, spec.dtype)
