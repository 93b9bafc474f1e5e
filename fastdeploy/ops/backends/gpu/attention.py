# SPDX-License-Identifier: Apache-2.0
"""Kernels of the operators in `fastdeploy.ops.attention`, and the layout of the cache.

A call launches two kernels: one rotates the new rows and writes their keys and values, the other attends. The work of
the second is planned on the device, once for all layers that are called with the same metadata.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import paddle
from paddle import Tensor

from fastdeploy.ops.attention import AttentionMetadata, KVCache
from fastdeploy.ops.backends.gpu.checks import require_dtype, require_length, require_rows
from fastdeploy.ops.backends.gpu.library import DeviceLibrary, active, launch
from fastdeploy.ops.backends.gpu.memory import zeros_on_device
from fastdeploy.ops.rotary import HeadLayout, RotaryParams

HEAD_DIMS = (64, 128, 256)
MAX_SEQS = 2048  # kMaxSeqs of custom_ops/gpu_ops/attention_plan.cu
SMALL_TILE, LARGE_TILE = 32, 64  # query rows of a KV head that a block holds
_LARGE_FROM = 128  # query rows of a KV head and sequence, on average, from which large tiles are used
_MAX_LARGE_HEAD_DIM = 128
_BLOCKS_PER_MULTIPROCESSOR = 2  # as registers allow
_RECORD = 8  # int32 of a record of the plan
_SPLITS_PER_GROUP = 8  # kGroupSplits of custom_ops/gpu_ops/attention_plan.h

_SCALE_BYTES = 4  # of an fp32 scale
_ITEM_BYTES = {"bfloat16": 2, "int8": 1}


def allocate_kv_cache(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str) -> KVCache:
    """Allocate blocks of [num_kv_heads, block_size, head_dim]; in int8 a head's codes are followed by its scales."""
    if block_size <= 0 or block_size % 16:
        raise ValueError(f"allocate_kv_cache: block_size: expected a multiple of 16, got {block_size}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"allocate_kv_cache: head_dim: expected 64, 128 or 256, got {head_dim}")
    if dtype not in _ITEM_BYTES:
        raise ValueError(f"allocate_kv_cache: dtype: expected bfloat16 or int8, got {dtype}")
    shape = [num_blocks, num_kv_heads, block_size, head_dim]
    if dtype == "int8":
        shape = [num_blocks, num_kv_heads, block_size * (head_dim + _SCALE_BYTES)]
    key, value = (zeros_on_device(active(), shape, dtype) for _ in range(2))
    return KVCache(key, value, block_size, dtype == "int8")


def row_bytes(head_dim: int, dtype: str) -> tuple[int, int]:
    """Return the bytes of one head's key and value at one position."""
    size = head_dim * _ITEM_BYTES[dtype] + (_SCALE_BYTES if dtype == "int8" else 0)
    return size, size


def append_attention(
    qkv: Tensor,
    cache: KVCache,
    batch: AttentionMetadata,
    out: Tensor,
    heads: HeadLayout,
    scale: float,
    num_masked_prefix: int,
    rotary: RotaryParams | None = None,
) -> None:
    """Write keys and values in one launch and attend in another; the first call with a batch plans in one more.

    Rows must be bfloat16 and head_dim 64, 128 or 256. Slots, blocks and positions are not checked.
    """
    _check(qkv, cache, batch, out, heads, rotary)
    if batch.num_rows == 0:
        return
    num_rows, (num_blocks, num_kv_heads) = active().row_count(batch.num_rows), cache.key.shape[:2]
    tables: tuple[Tensor | int | None, ...] = (None, 0, 0, None, None)
    is_interleaved, eps = False, 0.0
    if rotary is not None:
        tables = (rotary.cos_sin, *rotary.cos_sin.shape, rotary.q_norm, rotary.k_norm)
        is_interleaved, eps = rotary.is_interleaved, rotary.eps
    sizes = heads.num_heads, num_kv_heads, heads.head_dim, cache.block_size, int(cache.is_int8)
    slots = batch.slot_mapping, batch.positions
    caches = cache.key, cache.value, num_blocks
    launch("fd_write_kv", qkv, *caches, *slots, *tables, *num_rows, *sizes, int(is_interleaved), float(eps))
    tile_rows = _tile_rows(batch, heads)
    plan = _plan(batch, heads, cache.block_size, tile_rows)
    launch(
        "fd_attend",
        qkv,
        *caches,
        batch.block_tables,
        batch.block_tables.shape[1],
        *plan.tensors(),
        out,
        batch.num_rows,
        batch.num_seqs,
        *sizes,
        tile_rows,
        plan.grid,
        num_masked_prefix,
        scale,
    )


def _check(
    qkv: Tensor,
    cache: KVCache,
    batch: AttentionMetadata,
    out: Tensor,
    heads: HeadLayout,
    rotary: RotaryParams | None,
) -> None:
    name, num_rows, num_seqs = "append_attention", batch.num_rows, batch.num_seqs
    require_dtype(name, "bfloat16", qkv=qkv, out=out)
    require_dtype(name, "int8" if cache.is_int8 else "bfloat16", key=cache.key, value=cache.value)
    require_rows(name, num_rows, heads.row_size, qkv=qkv)
    require_rows(name, num_rows, heads.num_heads * heads.head_dim, out=out)
    if cache.key.shape[1] != heads.num_kv_heads:
        raise ValueError(f"{name}: num_kv_heads: expected {cache.key.shape[1]}, got {heads.num_kv_heads}")
    require_length(name, num_rows, slot_mapping=batch.slot_mapping, positions=batch.positions)
    require_length(name, num_seqs, kv_lens=batch.kv_lens)
    require_length(name, num_seqs + 1, cu_seqlens_q=batch.cu_seqlens_q)
    if rotary is None:
        return
    require_dtype(name, "float32", cos_sin=rotary.cos_sin)
    for label, norm in (("q_norm", rotary.q_norm), ("k_norm", rotary.k_norm)):
        if norm is not None:
            require_dtype(name, "bfloat16", **{label: norm})
            require_length(name, heads.head_dim, **{label: norm})


class _PlanKey(NamedTuple):
    """What the memory of a plan depends on."""

    device: str  # that was Paddle's default
    max_rows: int
    max_seqs: int
    heads: HeadLayout
    num_multiprocessors: int


class _Plan:
    """Memory for the plan of a call and for its partial results.

    Attributes:
        grid: blocks of the attention kernel.
        owner: of the plan that the memory holds.
    """

    def __init__(self, key: _PlanKey) -> None:
        heads = key.heads
        heads_per_kv = heads.num_heads // heads.num_kv_heads
        self.grid = key.num_multiprocessors * _BLOCKS_PER_MULTIPROCESSOR
        self.num_slots = _SPLITS_PER_GROUP * self.grid * SMALL_TILE // heads.num_kv_heads
        self.max_tiles = key.max_seqs + -(-key.max_rows * heads_per_kv // SMALL_TILE)
        self.max_items = self.max_tiles + self.num_slots
        self.records: Tensor = paddle.empty([1 + 2 * self.max_tiles + self.max_items, _RECORD], "int32")
        self.arrivals: Tensor = paddle.zeros([self.max_tiles, heads.num_kv_heads], "int32")
        self.values, self.sums = _partial_results(key.device, heads.head_dim, self.grid)
        self.owner: object = None

    def tensors(self) -> tuple[Tensor | int, ...]:
        """Return what the attention kernel takes."""
        sizes = self.max_tiles, self.max_items
        return self.records, *sizes, self.values, self.sums, self.num_slots, self.arrivals


@cache
def _partial_results(device: str, head_dim: int, grid: int) -> tuple[Tensor, Tensor]:
    """Return scratch memory that all calls share: for all splits of a group in each block, and a tile for each."""
    num_slots = grid * (_SPLITS_PER_GROUP * SMALL_TILE + LARGE_TILE)
    return paddle.empty([num_slots, head_dim], "float32"), paddle.empty([num_slots, 2], "float32")


_plans: dict[_PlanKey, _Plan] = {}


def _plan_memory(batch: AttentionMetadata, heads: HeadLayout) -> _Plan:
    """Return memory that is enough for all calls with tensors of these sizes; it is kept for the next ones."""
    library, capacity = active(), (batch.positions.shape[0], batch.kv_lens.shape[0])
    key = _PlanKey(paddle.get_device(), *capacity, heads, _num_multiprocessors(library))
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _Plan(key)
        if library.counts is None:
            library.call("fd_device_sync")  # the zeros are there before our stream reads them
    return plan


def _plan(batch: AttentionMetadata, heads: HeadLayout, block_size: int, tile_rows: int) -> _Plan:
    """Return the plan of a call; the first call with its metadata launches what makes it."""
    library, plan = active(), _plan_memory(batch, heads)
    mark = batch.backend_state.setdefault((id(plan), library.counts), object())
    if plan.owner is not mark:
        plan.owner = mark
        num_seqs = library.seq_count(batch.num_seqs)
        arrays = batch.cu_seqlens_q, batch.kv_lens, batch.block_tables, batch.block_tables.shape[1]
        shape = block_size, heads.num_heads // heads.num_kv_heads, heads.num_kv_heads, tile_rows
        sizes = plan.max_tiles, plan.max_items
        launch("fd_plan_attention", *arrays, *num_seqs, plan.records, *sizes, *shape, plan.grid, plan.num_slots)
    return plan


def _tile_rows(batch: AttentionMetadata, heads: HeadLayout) -> int:
    query_rows = batch.num_rows * heads.num_heads // heads.num_kv_heads
    is_large = query_rows > _LARGE_FROM * batch.num_seqs and heads.head_dim <= _MAX_LARGE_HEAD_DIM
    return LARGE_TILE if is_large else SMALL_TILE


@cache
def _num_multiprocessors(library: DeviceLibrary) -> int:
    return library.properties().num_multiprocessors


KERNELS: dict[str, Callable[..., Any]] = {
    "allocate_kv_cache": allocate_kv_cache,
    "append_attention": append_attention,
}
