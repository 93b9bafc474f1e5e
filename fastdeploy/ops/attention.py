# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged KV cache: rotate the new rows, write their keys and values, then attend.

One call takes any mix of prefill, decode and verification rows.

An int8 cache holds codes -127..127 and the scale absmax / 127 for the key of each position and KV head, and the same
for the value. Queries stay bfloat16. The scale depends on that position alone, so chunked prefill and rejected drafts
do not change any cached value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import paddle

from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.reference import attention as reference
from fastdeploy.ops.registry import Example, Lookup, OpEntry, cpu_only, register
from fastdeploy.ops.rotary import HeadLayout, RotaryParams


@dataclass(frozen=True)
class KVCache:
    """Keys and values of one layer. A block is one contiguous byte range of each tensor.

    Attributes:
        key, value: [num_blocks, ...]; only the backend that allocated them knows the layout inside a block.
        block_size: positions per block, a multiple of 16.
        is_int8: whether the cache holds codes and scales.
    """

    key: paddle.Tensor
    value: paddle.Tensor
    block_size: int
    is_int8: bool = False

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks."""
        return int(self.key.shape[0])

    @property
    def tensors(self) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return both tensors."""
        return self.key, self.value


@dataclass(frozen=True)
class AttentionMetadata:
    """The rows and sequences of one call, and where their keys and values are in the cache.

    The tensors may be longer than the call needs.

    Attributes:
        num_rows, num_seqs: of this call.
        cu_seqlens_q: [num_seqs + 1] int32: the rows of sequence b are cu_seqlens_q[b]..cu_seqlens_q[b + 1] - 1.
        kv_lens: [num_seqs] int32, number of positions in the cache after this call.
        block_tables: [num_seqs, max_blocks] int32.
        slot_mapping: [num_rows] int32, block_id * block_size + offset of each new row.
        positions: [num_rows] int32, position of each row in its sequence.
        backend_state: what the backend's kernels keep for the calls with this object: those of all layers of a step.
            Other contents of the tensors therefore need a new object.
    """

    num_rows: int
    num_seqs: int
    cu_seqlens_q: paddle.Tensor
    kv_lens: paddle.Tensor
    block_tables: paddle.Tensor
    slot_mapping: paddle.Tensor
    positions: paddle.Tensor
    backend_state: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)


def allocate_kv_cache(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str) -> KVCache:
    """Allocate the cache of one layer for the selected backend, filled with zeros.

    In the host's memory, its pages take memory when they are first written.

    Args:
        dtype: "bfloat16" or "float32", the dtype of the rows, or "int8" for bfloat16 rows.

    Raises:
        ValueError: block_size is not a multiple of 16, head_dim is odd or above 256, or the dtype is not supported.
    """
    cache: KVCache = _ALLOCATE.run(num_blocks, block_size, num_kv_heads, head_dim, dtype)
    return cache


def append_attention(
    qkv: paddle.Tensor,
    cache: KVCache,
    batch: AttentionMetadata,
    out: paddle.Tensor,
    heads: HeadLayout,
    scale: float,
    num_masked_prefix: int = 0,
    rotary: RotaryParams | None = None,
) -> None:
    """Write the keys and values of the new rows to their slots, then attend causally.

    A row at position t attends to positions 0..t. With `rotary`, queries and keys of the new rows are normalised and
    rotated first. Scores and sums are fp32. Attention weights are rounded to bfloat16 before they multiply the values
    only on processors whose instructions multiply pairs of bfloat16. The result of a row depends on the keys and values
    that it attends to and on their positions, but not on the other rows or sequences of the call.

    Args:
        qkv: [capacity, heads.row_size] bfloat16 or float32. With `rotary`, queries and keys are undefined afterwards.
        cache: of the same dtype, or int8 for bfloat16 rows. Slots that no sequence uses may hold anything, including
            NaN. With int8, rows that attend to a key or value that is not finite become NaN.
        batch: the rows of this call. Sequences that share any block share their first one.
        out: [capacity, num_heads * head_dim], dtype of qkv.
        heads: layout of qkv; num_heads must be a multiple of num_kv_heads.
        scale: factor of the scores, usually head_dim ** -0.5.
        num_masked_prefix: number of leading positions, 0 to 16, that are masked for every row but their own, so that
            each row attends to at least one position. Their keys and values must be finite.
        rotary: normalisation and rotation of queries and keys; None leaves them unchanged.

    Raises:
        ValueError: a slot or block outside the cache, a position outside rotary.cos_sin, or an invalid shape or dtype.
    """
    _APPEND_ATTENTION.run(qkv, cache, batch, out, heads, scale, num_masked_prefix, rotary)


def make_attention_metadata(
    num_new: Sequence[int], kv_lens: Sequence[int], tables: np.ndarray, block_size: int
) -> AttentionMetadata:
    """Describe a call by plain numbers, for examples, tests and benchmarks.

    Args:
        num_new: number of new rows of each sequence.
        kv_lens: positions of each sequence after the call, whose last num_new are the new rows.
        tables: [num_seqs, max_blocks] block ids.
    """
    cu = np.concatenate([[0], np.cumsum(num_new)]).astype(np.int32)
    rows = [(b, t) for b, (new, end) in enumerate(zip(num_new, kv_lens, strict=True)) for t in range(end - new, end)]
    slots = [tables[b, t // block_size] * block_size + t % block_size for b, t in rows]
    arrays = cu, kv_lens, tables, slots, [t for _, t in rows]
    tensors = [paddle.to_tensor(np.asarray(a, np.int32)) for a in arrays]
    return AttentionMetadata(int(cu[-1]), len(num_new), *tensors)


_EXAMPLES = (  # heads, rotary_dim, is_interleaved, has_norm, block_size, then steps: (new rows, positions afterwards)
    (HeadLayout(4, 2, 64), 64, False, False, 16, (((5, 33), (5, 33)), ((1, 1), (6, 34)))),
    (HeadLayout(4, 2, 64), 64, True, False, 16, (((5, 33), (5, 33)), ((1, 1), (6, 34)))),
    (HeadLayout(3, 3, 20), 0, False, False, 64, (((70, 1), (70, 1)), ((1, 4), (71, 5)))),
    (HeadLayout(3, 1, 24), 8, True, True, 16, (((5, 33), (5, 33)), ((1, 1), (6, 34)))),
    (HeadLayout(7, 1, 128), 128, False, True, 32, (((130,), (130,)), ((3,), (133,)))),
    (HeadLayout(4, 1, 80), 20, False, True, 48, (((1090,), (1090,)), ((1,), (1091,)), ((2,), (1093,)))),
    (HeadLayout(6, 2, 256), 64, True, True, 16, (((21, 3), (21, 3)), ((1, 2), (22, 5)))),
    (HeadLayout(2, 1, 64), 20, False, False, 48, (((290,), (290,)), ((2,), (292,)))),
)
_GPU_HEAD_DIMS = (64, 128, 256)


def _example_rotary(
    heads: HeadLayout, rotary_dim: int, is_interleaved: bool, has_norm: bool, dtype: str
) -> RotaryParams:
    angles = np.random.default_rng(11).uniform(0, 6.28, (1100, rotary_dim // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    q_norm, k_norm = (random_rows(1, heads.head_dim, dtype, seed).reshape([-1]) for seed in (12, 13))
    cos_sin = paddle.to_tensor(table)
    return RotaryParams(cos_sin, is_interleaved, q_norm if has_norm else None, k_norm if has_norm else None)


def _example(
    dtype: str,
    cache_dtype: str,
    num_masked_prefix: int,
    heads: HeadLayout,
    rotary_dim: int,
    is_interleaved: bool,
    has_norm: bool,
    block_size: int,
    steps: Sequence[Sequence[Sequence[int]]],
    lookup: Lookup,
) -> Sequence[paddle.Tensor]:
    rotary = _example_rotary(heads, rotary_dim, is_interleaved, has_norm, dtype) if rotary_dim else None
    num_seqs, max_blocks = len(steps[-1][1]), -(-max(steps[-1][1]) // block_size)
    tables = np.random.default_rng(14).permutation(num_seqs * max_blocks).reshape(num_seqs, max_blocks)
    cache = lookup("allocate_kv_cache")(
        num_seqs * max_blocks + 1, block_size, heads.num_kv_heads, heads.head_dim, cache_dtype
    )
    outs = []
    for seed, (num_new, kv_lens) in enumerate(steps):
        batch = make_attention_metadata(num_new, kv_lens, tables, block_size)
        qkv = random_rows(batch.num_rows + 1, heads.row_size, dtype, 15 + seed)
        out = paddle.full([batch.num_rows + 1, heads.num_heads * heads.head_dim], 7.0, dtype)
        lookup("append_attention")(qkv, cache, batch, out, heads, heads.head_dim**-0.5, num_masked_prefix, rotary)
        outs += [out, qkv[batch.num_rows :]]
    return outs


def _for_backends(example: Example, dtype: str, heads: HeadLayout) -> Example:
    return example if dtype == "bfloat16" and heads.head_dim in _GPU_HEAD_DIMS else cpu_only(example)


_ALLOCATE = register(OpEntry("allocate_kv_cache", reference.allocate_kv_cache))
_APPEND_ATTENTION = register(
    OpEntry(
        "append_attention",
        reference.append_attention,
        {"float32": 1e-5, "bfloat16": 1.6e-2},
        [
            _for_backends(partial(_example, dtype, cache_dtype, num_masked_prefix, *args), dtype, args[0])
            for dtype, cache_dtype in (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "int8"))
            for num_masked_prefix in (0, 3)
            for args in _EXAMPLES
        ],
    )
)
