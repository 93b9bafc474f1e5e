# SPDX-License-Identifier: Apache-2.0
"""Native kernels of the operators in `fastdeploy.ops.latent_attention`, and the layout of the cache."""

from __future__ import annotations

import paddle

from fastdeploy.ops.attention import AttentionMetadata
from fastdeploy.ops.backends.cpu.library import run_native
from fastdeploy.ops.backends.cpu.memory import allocate_untouched
from fastdeploy.ops.latent_attention import LatentCache, LatentLayout
from fastdeploy.ops.norm import NormParams

_MAX_LATENT_DIM, _MAX_ROPE_DIM, _STEP = 1024, 256, 8  # of custom_ops/cpu_ops/latent_attention.h


def allocate_latent_cache(num_blocks: int, block_size: int, latent_dim: int, rope_dim: int, dtype: str) -> LatentCache:
    """Allocate [num_blocks, block_size, latent_dim + rope_dim]: the rows of a block in the order of positions."""
    operator = "allocate_latent_cache"
    if block_size <= 0 or block_size % 16:
        raise ValueError(f"{operator}: block_size: expected a multiple of 16, got {block_size}")
    for name, dim, most in (("latent_dim", latent_dim, _MAX_LATENT_DIM), ("rope_dim", rope_dim, _MAX_ROPE_DIM)):
        if not _STEP <= dim <= most or dim % _STEP:
            raise ValueError(f"{operator}: {name}: expected a multiple of {_STEP} from {_STEP} to {most}, got {dim}")
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"{operator}: dtype: expected bfloat16 or float32, got {dtype}")
    return LatentCache(allocate_untouched([num_blocks, block_size, latent_dim + rope_dim], dtype), block_size)


def append_latent_attention(
    absorbed: paddle.Tensor,
    query: paddle.Tensor,
    latent: paddle.Tensor,
    cache: LatentCache,
    batch: AttentionMetadata,
    out: paddle.Tensor,
    layout: LatentLayout,
    scale: float,
    norm: NormParams,
    cos_sin: paddle.Tensor,
    is_interleaved: bool,
    num_masked_prefix: int,
) -> None:
    """Normalise, rotate, write and attend in one native call."""
    run_native(
        "fd_append_latent_attention",
        absorbed,
        query,
        latent,
        cache.rows,
        batch.cu_seqlens_q,
        batch.kv_lens,
        batch.block_tables,
        batch.slot_mapping,
        batch.positions,
        cos_sin,
        norm.weight,
        out,
        batch.num_rows,
        batch.num_seqs,
        [layout.num_heads, layout.latent_dim, layout.nope_dim, layout.rope_dim],
        scale,
        num_masked_prefix,
        is_interleaved,
        norm.eps,
    )
