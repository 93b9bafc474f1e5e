# SPDX-License-Identifier: Apache-2.0
"""Native kernels of the operators in `fastdeploy.ops.attention`, and the layout of the cache."""

from __future__ import annotations

import paddle

from fastdeploy.ops.attention import AttentionMetadata, KVCache
from fastdeploy.ops.backends.cpu.library import run_native
from fastdeploy.ops.backends.cpu.memory import allocate_untouched
from fastdeploy.ops.rotary import HeadLayout, RotaryParams

_SCALE_BYTES = 4  # bytes of an fp32 scale, KvCacheView::scale_width of custom_ops/cpu_ops/kernels.h
ITEM_BYTES = {"bfloat16": 2, "float32": 4, "int8": 1}


def allocate_kv_cache(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str) -> KVCache:
    """Allocate blocks of [num_kv_heads, block_size, width]; in int8 a row's scale follows its codes."""
    if block_size <= 0 or block_size % 16:
        raise ValueError(f"allocate_kv_cache: block_size: expected a multiple of 16, got {block_size}")
    if head_dim <= 0 or head_dim % 2 or head_dim > 256:
        raise ValueError(f"allocate_kv_cache: head_dim: expected an even number up to 256, got {head_dim}")
    if dtype not in ITEM_BYTES:
        raise ValueError(f"allocate_kv_cache: dtype: expected bfloat16, float32 or int8, got {dtype}")
    key, value = (
        allocate_untouched([num_blocks, num_kv_heads, block_size, width // ITEM_BYTES[dtype]], dtype)
        for width in row_bytes(head_dim, dtype)
    )
    return KVCache(key, value, block_size, dtype == "int8")


def row_bytes(head_dim: int, dtype: str) -> tuple[int, int]:
    """Return the bytes of one head's key and value at one position; values are padded to a multiple of 16 elements."""
    scale_bytes = _SCALE_BYTES if dtype == "int8" else 0
    padded_dim = (head_dim + 15) // 16 * 16
    return head_dim * ITEM_BYTES[dtype] + scale_bytes, padded_dim * ITEM_BYTES[dtype] + scale_bytes


def append_attention(
    qkv: paddle.Tensor,
    cache: KVCache,
    batch: AttentionMetadata,
    out: paddle.Tensor,
    heads: HeadLayout,
    scale: float,
    num_masked_prefix: int,
    rotary: RotaryParams | None = None,
) -> None:
    """Rotate, write and attend in one native call."""
    tables = (None, None, None) if rotary is None else (rotary.cos_sin, rotary.q_norm, rotary.k_norm)
    is_interleaved, eps = (False, 0.0) if rotary is None else (rotary.is_interleaved, rotary.eps)
    run_native(
        "fd_append_attention",
        qkv,
        cache.key,
        cache.value,
        batch.cu_seqlens_q,
        batch.kv_lens,
        batch.block_tables,
        batch.slot_mapping,
        batch.positions,
        *tables,
        out,
        batch.num_rows,
        batch.num_seqs,
        heads.num_heads,
        scale,
        num_masked_prefix,
        is_interleaved,
        eps,
    )
