# SPDX-License-Identifier: Apache-2.0
"""Paged latent attention in Paddle operators; the cache is [num_blocks, block_size, latent_dim + rope_dim]."""

from typing import TYPE_CHECKING

import paddle

from fastdeploy.ops.reference.attention import causal_attention
from fastdeploy.ops.reference.norm import normalise
from fastdeploy.ops.reference.rotary import rotate

if TYPE_CHECKING:
    from fastdeploy.ops.attention import AttentionMetadata
    from fastdeploy.ops.latent_attention import LatentCache, LatentLayout
    from fastdeploy.ops.norm import NormParams


def allocate_latent_cache(
    num_blocks: int, block_size: int, latent_dim: int, rope_dim: int, dtype: str
) -> "LatentCache":
    """As fastdeploy.ops.latent_attention.allocate_latent_cache."""
    from fastdeploy.ops.latent_attention import LatentCache

    return LatentCache(paddle.zeros([num_blocks, block_size, latent_dim + rope_dim], dtype), block_size)


def append_latent_attention(
    absorbed: paddle.Tensor,
    query: paddle.Tensor,
    latent: paddle.Tensor,
    cache: "LatentCache",
    batch: "AttentionMetadata",
    out: paddle.Tensor,
    layout: "LatentLayout",
    scale: float,
    norm: "NormParams",
    cos_sin: paddle.Tensor,
    is_interleaved: bool,
    num_masked_prefix: int,
) -> None:
    """As fastdeploy.ops.latent_attention.append_latent_attention, one sequence at a time."""
    rows, heads, latent_dim, rope_dim = batch.num_rows, layout.num_heads, layout.latent_dim, layout.rope_dim
    if rows == 0:
        return
    angles = paddle.gather(cos_sin, batch.positions[:rows])

    def rotated(part: paddle.Tensor) -> paddle.Tensor:
        return rotate(part.astype("float32"), angles, is_interleaved).astype(part.dtype)

    width = latent_dim + rope_dim
    new = latent[:rows, latent.shape[1] - width :]
    key = rotated(new[:, latent_dim:].unsqueeze(1)).squeeze(1)
    normed = normalise(new[:, :latent_dim], norm.weight, norm.eps).astype(new.dtype)
    slots = batch.slot_mapping[:rows]
    cache.rows[slots // cache.block_size, slots % cache.block_size] = paddle.concat([normed, key], axis=-1)
    head_dim = layout.nope_dim + rope_dim
    rope = query[:rows, : heads * head_dim].reshape([rows, heads, head_dim])[:, :, layout.nope_dim :]
    whole = paddle.concat([absorbed[:rows].reshape([rows, heads, latent_dim]), rotated(rope)], axis=-1)
    cu, lens = batch.cu_seqlens_q.tolist(), batch.kv_lens.tolist()
    for b in range(batch.num_seqs):
        if cu[b + 1] == cu[b]:
            continue
        blocks = batch.block_tables[b, : -(-lens[b] // cache.block_size)]
        keys = paddle.gather(cache.rows, blocks).reshape([-1, 1, width])[: lens[b]]
        attended = causal_attention(whole[cu[b] : cu[b + 1]], keys, keys[:, :, :latent_dim], scale, num_masked_prefix)
        out[cu[b] : cu[b + 1]] = attended.reshape([cu[b + 1] - cu[b], -1]).astype(out.dtype)
