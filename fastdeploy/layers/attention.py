# SPDX-License-Identifier: Apache-2.0
"""Self-attention over the paged KV cache."""

from __future__ import annotations

from typing import Protocol

from paddle import Tensor

from fastdeploy.layers.linear import Linear
from fastdeploy.ops.attention import AttentionMetadata, KVCache, append_attention
from fastdeploy.ops.caches import LayerCache
from fastdeploy.ops.rotary import HeadLayout, RotaryParams


class Projection(Protocol):
    """What computes q | k | v."""

    def __call__(self, x: Tensor, out: Tensor, num_rows: int) -> None:
        """Write the first num_rows rows of x [capacity, hidden_size] to out [capacity, width of q | k | v]."""


class SelfAttention(Protocol):
    """The attention of a decoder layer, with queries in groups or of another kind."""

    def __call__(self, hidden: Tensor, metadata: AttentionMetadata, cache: LayerCache) -> None:
        """Write what the rows add to the layer's cache, and add the attention output to `hidden`."""


class Attention:
    """hidden + o(attention(rotary(qkv(hidden)))); q, k and v are one projection."""

    __slots__ = ("attended", "heads", "num_masked_prefix", "output", "qkv", "qkv_out", "rotary", "scale")

    def __init__(
        self,
        qkv: Projection,
        heads: HeadLayout,
        rotary: RotaryParams,
        output: Linear,
        qkv_out: Tensor,
        attended: Tensor,
        num_masked_prefix: int = 0,
    ) -> None:
        """Store the weights and the scratch buffers, which all layers share.

        Args:
            qkv: hidden_size -> (num_heads + 2 * num_kv_heads) * head_dim (q | k | v), after the layer's norm.
            heads: layout of a row of q | k | v.
            rotary: normalisation and rotation of q and k.
            output: num_heads * head_dim -> hidden_size.
            qkv_out: scratch buffer [capacity, (num_heads + 2 * num_kv_heads) * head_dim].
            attended: scratch buffer [capacity, num_heads * head_dim].
            num_masked_prefix: number of leading positions that are masked for every row but their own.
        """
        self.qkv = qkv
        self.rotary = rotary
        self.output = output
        self.qkv_out = qkv_out
        self.attended = attended
        self.num_masked_prefix = num_masked_prefix
        self.heads = heads
        self.scale = float(heads.head_dim) ** -0.5

    def __call__(
        self, hidden: Tensor, metadata: AttentionMetadata, cache: LayerCache, inputs: Tensor | None = None
    ) -> None:
        """Write the keys and values of the rows to the cache, and to `hidden` the inputs plus the attention output.

        Args:
            hidden: [capacity, hidden_size].
            metadata: the rows and where their keys and values are in the cache.
            cache: of this layer, a KVCache.
            inputs: [capacity, hidden_size]; None if they are in `hidden`.
        """
        assert isinstance(cache, KVCache), "queries in groups have keys and values of their own"
        qkv_out, attended, num_rows = self.qkv_out, self.attended, metadata.num_rows
        inputs = hidden if inputs is None else inputs
        self.qkv(inputs, qkv_out, num_rows)
        append_attention(
            qkv_out, cache, metadata, attended, self.heads, self.scale, self.num_masked_prefix, self.rotary
        )
        self.output(attended, hidden, num_rows, inputs)
