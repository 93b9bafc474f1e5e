# SPDX-License-Identifier: Apache-2.0
"""Latent attention over a paged cache (DeepSeek-V2, DeepSeek-AI, 2024), in its absorbed form.

A position has one cached row for all heads: latent_dim values that are the key and the value of every head, and a
rotated part of the key. The matrix that would expand a latent row to the keys of a head is multiplied into the query
instead, and the one for its values is applied to the output, both outside this operator. One call takes any mix of
prefill, decode and verification rows, and computes all of them by the same formula.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import paddle

from fastdeploy.ops.attention import AttentionMetadata, make_attention_metadata
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.norm import NormParams
from fastdeploy.ops.reference import latent_attention as reference
from fastdeploy.ops.registry import Lookup, OpEntry, cpu_only, register


@dataclass(frozen=True)
class LatentLayout:
    """Heads of latent attention and their dimensions, multiples of 8.

    Attributes:
        num_heads: any number.
        latent_dim: 8 to 1,024, of the part of a cached row that is key and value.
        nope_dim: 0 to 256, of the part of a head's query that is not rotated, which `absorbed` stands for.
        rope_dim: 8 to 256, of the part of queries and keys that is rotated.
    """

    num_heads: int
    latent_dim: int
    nope_dim: int
    rope_dim: int


@dataclass(frozen=True)
class LatentCache:
    """The cached rows of one layer. A block is one contiguous byte range.

    Attributes:
        rows: [num_blocks, ...]; only the backend that allocated them knows the layout inside a block.
        block_size: positions per block, a multiple of 16.
    """

    rows: paddle.Tensor
    block_size: int

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks."""
        return int(self.rows.shape[0])

    @property
    def tensors(self) -> tuple[paddle.Tensor, ...]:
        """Return the tensors of the cache, whose first axis is that of blocks."""
        return (self.rows,)


def allocate_latent_cache(num_blocks: int, block_size: int, latent_dim: int, rope_dim: int, dtype: str) -> LatentCache:
    """Allocate the cache of one layer for the selected backend: latent_dim + rope_dim zeros per token.

    In the host's memory, its pages take memory when they are first written.

    Args:
        dtype: "bfloat16" or "float32", the dtype of the rows.

    Raises:
        ValueError: block_size is not a multiple of 16, a dimension is out of range, or the dtype is not supported.
    """
    cache: LatentCache = _ALLOCATE.run(num_blocks, block_size, latent_dim, rope_dim, dtype)
    return cache


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
    num_masked_prefix: int = 0,
) -> None:
    """Normalise and rotate the new rows, write them to their slots, then attend causally.

    The latent part of a new row is normalised as `rms_norm` does, its other part and that of every query are rotated;
    each is rounded once. A row at position t attends to positions 0..t: score = (absorbed . latent + rotated query .
    rotated key) * scale, and the output is the sum of latent parts by the softmax of the scores. Scores and sums are
    fp32. Softmax weights are rounded to bfloat16 before they multiply the values only on processors whose instructions
    multiply pairs of bfloat16. The result of a row depends on the rows that it attends to and on their positions, but
    not on the other rows or sequences of the call.

    Args:
        absorbed: [capacity, num_heads * latent_dim] bfloat16 or float32, per head the query times the matrix of keys.
        query: [capacity, at least num_heads * (nope_dim + rope_dim)], its first columns: per head nope_dim values that
            are not used, then rope_dim values to be rotated.
        latent: [capacity, at least latent_dim + rope_dim], its last columns. It may be the tensor of `query`.
        cache: of the same dtype. Slots that no sequence uses may hold anything, including NaN. A new row with a value
            that is not finite is stored as NaN, and rows that attend to it become NaN.
        batch: the rows of this call. Sequences that share any block share their first one.
        out: [capacity, num_heads * latent_dim].
        layout: heads and dimensions.
        scale: factor of the scores.
        norm: of the latent part, weight [latent_dim].
        cos_sin: [max_position, rope_dim] float32, as in `RotaryParams`.
        is_interleaved: as in `RotaryParams`.
        num_masked_prefix: number of leading positions, 0 to 16, that are masked for every row but their own. Their rows
            must be finite.

    Raises:
        ValueError: a slot or block outside the cache, a position outside cos_sin, or an invalid shape or dtype.
    """
    _APPEND_LATENT_ATTENTION.run(
        absorbed, query, latent, cache, batch, out, layout, scale, norm, cos_sin, is_interleaved, num_masked_prefix
    )


_EXAMPLES = (  # layout, is_interleaved, num_masked_prefix, block_size, then steps: (new rows, positions afterwards)
    (LatentLayout(3, 24, 16, 8), True, 0, 16, (((5, 33), (5, 33)), ((1, 1), (6, 34)))),
    (LatentLayout(3, 24, 16, 8), False, 3, 64, (((70, 1), (70, 1)), ((1, 4), (71, 5)))),
    (LatentLayout(16, 512, 128, 64), True, 0, 32, (((67, 3), (67, 3)), ((1, 4), (68, 7)))),
    (LatentLayout(20, 136, 0, 40), False, 0, 48, (((290,), (290,)), ((1,), (291,)), ((2,), (293,)))),
    (LatentLayout(5, 1024, 256, 256), True, 2, 16, (((1, 18), (1, 18)), ((2, 1), (3, 19)))),
)


def _example(
    dtype: str,
    layout: LatentLayout,
    is_interleaved: bool,
    num_masked_prefix: int,
    block_size: int,
    steps: Sequence[Sequence[Sequence[int]]],
    lookup: Lookup,
) -> Sequence[paddle.Tensor]:
    heads, latent_dim, head_dim = layout.num_heads, layout.latent_dim, layout.nope_dim + layout.rope_dim
    angles = np.random.default_rng(11).uniform(0, 6.28, (300, layout.rope_dim // 2))
    cos_sin = paddle.to_tensor(np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32))
    norm = NormParams(random_rows(1, latent_dim, dtype, 12)[0], 1e-6)
    num_seqs, max_blocks = len(steps[-1][1]), -(-max(steps[-1][1]) // block_size)
    tables = np.random.default_rng(14).permutation(num_seqs * max_blocks).reshape(num_seqs, max_blocks)
    cache = lookup("allocate_latent_cache")(num_seqs * max_blocks + 1, block_size, latent_dim, layout.rope_dim, dtype)
    outs = []
    for seed, (num_new, kv_lens) in enumerate(steps):
        batch = make_attention_metadata(num_new, kv_lens, tables, block_size)
        rows = batch.num_rows + 1
        absorbed = random_rows(rows, heads * latent_dim, dtype, 20 + seed)
        both = random_rows(rows, heads * head_dim + latent_dim + layout.rope_dim, dtype, 30 + seed)
        out = paddle.full([rows, heads * latent_dim], 7.0, dtype)
        scale = (latent_dim + layout.rope_dim) ** -0.5
        lookup("append_latent_attention")(
            absorbed, both, both, cache, batch, out, layout, scale, norm, cos_sin, is_interleaved, num_masked_prefix
        )
        outs.append(out)
    return outs


_ALLOCATE = register(OpEntry("allocate_latent_cache", reference.allocate_latent_cache, has_fallback=False))
_APPEND_LATENT_ATTENTION = register(
    OpEntry(
        "append_latent_attention",
        reference.append_latent_attention,
        {"float32": 1e-5, "bfloat16": 1.6e-2},
        [cpu_only(partial(_example, dtype, *args)) for dtype in ("float32", "bfloat16") for args in _EXAMPLES],
        has_fallback=False,
    )
)
