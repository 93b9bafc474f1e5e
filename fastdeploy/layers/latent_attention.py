# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention over the paged cache, in its absorbed form.

The cache holds one latent row per token, which is the keys and values of all heads at once. Queries are multiplied by
the part of the up-projection that makes keys, and what is attended by the part that makes values, so that nothing per
head is ever stored. (DeepSeek-V2, Appendix B)
"""

from __future__ import annotations

from dataclasses import dataclass

from paddle import Tensor

from fastdeploy.layers.linear import Linear
from fastdeploy.ops.attention import AttentionMetadata
from fastdeploy.ops.caches import LayerCache
from fastdeploy.ops.head_products import PackedHeads, project_heads
from fastdeploy.ops.latent_attention import LatentCache, LatentLayout, append_latent_attention
from fastdeploy.ops.norm import NormParams


@dataclass(frozen=True)
class LatentProjections:
    """What a layer of latent attention multiplies by.

    Attributes:
        down: hidden_size -> rank of the queries + latent row, after the layer's norm.
        query: rank of the queries -> heads of queries, after a norm; or hidden_size -> heads of queries, after the
            layer's norm, if queries have no rank.
        has_query_rank: which of the two.
        key_up, value_up: the two parts of the up-projection, by heads.
        output: num_heads * value size -> hidden_size.
    """

    down: Linear
    query: Linear
    has_query_rank: bool
    key_up: PackedHeads
    value_up: PackedHeads
    output: Linear


@dataclass(frozen=True)
class LatentScratch:
    """Scratch buffers that all layers share, each [max_rows, ...]; the names are those of the steps that write them."""

    down: Tensor
    query: Tensor
    absorbed: Tensor
    attended: Tensor
    values: Tensor


class LatentAttention:
    """hidden + o(values(attention(absorbed queries, latent rows)))."""

    __slots__ = (
        "cos_sin",
        "is_interleaved",
        "layout",
        "norm",
        "num_masked_prefix",
        "projections",
        "scale",
        "scratch",
    )

    def __init__(
        self,
        projections: LatentProjections,
        scratch: LatentScratch,
        layout: LatentLayout,
        scale: float,
        norm: NormParams,
        cos_sin: Tensor,
        is_interleaved: bool,
        num_masked_prefix: int = 0,
    ) -> None:
        """Store the weights and the scratch buffers.

        Args:
            layout: sizes of a head and of a latent row.
            scale: of the scores.
            norm: of the latent rows.
            cos_sin: the table of `layers.rotary`.
            is_interleaved: which dimensions are rotated together.
            num_masked_prefix: number of leading positions that are masked for every row but their own.
        """
        self.projections, self.scratch, self.layout, self.scale = projections, scratch, layout, scale
        self.norm, self.cos_sin, self.is_interleaved = norm, cos_sin, is_interleaved
        self.num_masked_prefix = num_masked_prefix

    def __call__(self, hidden: Tensor, metadata: AttentionMetadata, cache: LayerCache) -> None:
        """Write the latent rows to the cache, and add the attention output to `hidden` [capacity, hidden_size]."""
        assert isinstance(cache, LatentCache), "latent rows are keys and values at once"
        parts, scratch, layout, num_rows = self.projections, self.scratch, self.layout, metadata.num_rows
        parts.down(hidden, scratch.down, num_rows)
        parts.query(scratch.down if parts.has_query_rank else hidden, scratch.query, num_rows)
        head_stride = layout.nope_dim + layout.rope_dim
        project_heads(scratch.query, parts.key_up, scratch.absorbed, num_rows, head_stride)
        append_latent_attention(
            scratch.absorbed,
            scratch.query,
            scratch.down,
            cache,
            metadata,
            scratch.attended,
            layout,
            self.scale,
            self.norm,
            self.cos_sin,
            self.is_interleaved,
            self.num_masked_prefix,
        )
        project_heads(scratch.attended, parts.value_up, scratch.values, num_rows)
        parts.output(scratch.values, hidden, num_rows, hidden)
