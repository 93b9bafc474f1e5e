# SPDX-License-Identifier: Apache-2.0
"""Paged causal attention in Paddle operators; the cache is [num_blocks, block_size, num_kv_heads, head_dim]."""

from typing import TYPE_CHECKING

import paddle

from fastdeploy.ops.reference.rotary import prepare

if TYPE_CHECKING:
    from fastdeploy.ops.attention import AttentionMetadata, KVCache
    from fastdeploy.ops.rotary import HeadLayout, RotaryParams


def allocate_kv_cache(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str) -> "KVCache":
    """As fastdeploy.ops.attention.allocate_kv_cache; an int8 cache holds the values of its codes as float32."""
    from fastdeploy.ops.attention import KVCache

    shape, stored = [num_blocks, block_size, num_kv_heads, head_dim], "float32" if dtype == "int8" else dtype
    return KVCache(paddle.zeros(shape, stored), paddle.zeros(shape, stored), block_size, dtype == "int8")


def append_attention(
    qkv: paddle.Tensor,
    cache: "KVCache",
    batch: "AttentionMetadata",
    out: paddle.Tensor,
    heads: "HeadLayout",
    scale: float,
    num_masked_prefix: int,
    rotary: "RotaryParams | None" = None,
) -> None:
    """As fastdeploy.ops.attention.append_attention, one sequence at a time."""
    if rotary is not None:
        prepare(qkv, batch.positions, batch.num_rows, heads, rotary)
    kv, dim = heads.num_kv_heads, heads.head_dim
    rows = qkv[: batch.num_rows].reshape([batch.num_rows, -1, dim])
    query, key, value = rows[:, : heads.num_heads], rows[:, -2 * kv : -kv], rows[:, -kv:]
    slots = batch.slot_mapping[: batch.num_rows]
    for store, new in ((cache.key, key), (cache.value, value)):
        store[slots // cache.block_size, slots % cache.block_size] = round_to_codes(new) if cache.is_int8 else new
    cu, lens = batch.cu_seqlens_q.tolist(), batch.kv_lens.tolist()
    for b in range(batch.num_seqs):
        if cu[b + 1] == cu[b]:
            continue
        blocks = batch.block_tables[b, : -(-lens[b] // cache.block_size)]
        keys, values = (
            paddle.gather(store, blocks).reshape([-1, kv, dim])[: lens[b]] for store in (cache.key, cache.value)
        )
        attended = causal_attention(query[cu[b] : cu[b + 1]], keys, values, scale, num_masked_prefix)
        out[cu[b] : cu[b + 1]] = attended.reshape([cu[b + 1] - cu[b], -1]).astype(out.dtype)


def round_to_codes(rows: paddle.Tensor) -> paddle.Tensor:
    """Round rows to codes -127..127 times the scale absmax / 127 of their last axis; the result is float32."""
    wide = rows.astype("float32")
    absmax = wide.abs().max(axis=-1, keepdim=True).clip(min=1e-30)
    return paddle.round(wide * (127.0 / absmax)) * (absmax / 127.0)


def causal_attention(
    query: paddle.Tensor, keys: paddle.Tensor, values: paddle.Tensor, scale: float, num_masked_prefix: int = 0
) -> paddle.Tensor:
    """Return [rows, num_heads, V] float32: the last `rows` positions attend to themselves and those before.

    Args:
        query: [rows, num_heads, D].
        keys: [positions, num_kv_heads, D].
        values: [positions, num_kv_heads, V].
        scale: factor of the scores.
        num_masked_prefix: number of leading positions that are masked for every row but their own.
    """
    (rows, num_heads, dim), (positions, num_kv_heads, _) = query.shape, keys.shape
    grouped = query.astype("float32").reshape([rows, num_kv_heads, num_heads // num_kv_heads, dim])
    scores = paddle.einsum("rkgd,pkd->rkgp", grouped, keys.astype("float32")) * scale
    visible = paddle.arange(positions)[None, :] <= paddle.arange(positions - rows, positions)[:, None]
    for masked in range(min(num_masked_prefix, positions - 1)):
        visible[max(0, rows - positions + masked + 1) :, masked] = False
    scores = paddle.where(visible[:, None, None, :], scores, paddle.full_like(scores, float("-inf")))
    weights = paddle.nn.functional.softmax(scores, axis=-1)
    return paddle.einsum("rkgp,pkd->rkgd", weights, values.astype("float32")).reshape(
        [rows, num_heads, values.shape[-1]]
    )
