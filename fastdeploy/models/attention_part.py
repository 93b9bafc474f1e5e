# SPDX-License-Identifier: Apache-2.0
"""The attention of a decoder layer: its tensors in a checkpoint, its weights, and the layer that they make."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import paddle
from paddle import Tensor

from fastdeploy.layers.attention import Attention
from fastdeploy.layers.linear import Linear
from fastdeploy.models.balanced_keys import (
    Factors,
    choose_exponents,
    pairs_of_channels,
    powers_of_two,
    squared_lengths,
)
from fastdeploy.models.expected_weights import ExpectedTensor
from fastdeploy.models.step_buffers import StepBuffers
from fastdeploy.models.weight_loader import LinearSpec, Shapes, StoredLinear, WeightLoader
from fastdeploy.ops.linear import PackedLinear
from fastdeploy.ops.norm import NormParams
from fastdeploy.ops.rotary import HeadLayout, RotaryParams


@dataclass(frozen=True)
class AttentionNames:
    """Names of the tensors of one layer's attention; those of linear layers omit .weight and .bias."""

    norm: str
    q: str
    k: str
    v: str
    output: str
    q_norm: str
    k_norm: str

    @classmethod
    def of_layer(cls, prefix: str) -> AttentionNames:
        """Return the usual names in a layer whose names begin with `prefix`."""
        attention = f"{prefix}self_attn."
        return cls(
            norm=f"{prefix}input_layernorm.weight",
            q=f"{attention}q_proj",
            k=f"{attention}k_proj",
            v=f"{attention}v_proj",
            output=f"{attention}o_proj",
            q_norm=f"{attention}q_norm.weight",
            k_norm=f"{attention}k_norm.weight",
        )


@dataclass(frozen=True)
class AttentionContext:
    """What all attention layers of a model share, of whatever kind they are.

    Attributes:
        cos_sin: the table of `layers.rotary`.
        interleaved_rotary: which dimensions of a head are rotated together.
        eps: of every norm.
    """

    cos_sin: Tensor
    interleaved_rotary: bool
    eps: float


@dataclass(frozen=True)
class AttentionWeights:
    """Weights of one layer's attention; qkv holds q | k | v.

    Attributes:
        heads: layout of the attention heads.
        key_exponents: [num_kv_heads or 1, head_dim] int8: keys are divided by 2^exponent, queries multiplied; None if
            keys are not balanced.
    """

    heads: HeadLayout
    norm: Tensor
    qkv: PackedLinear
    output: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    key_exponents: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed layers."""
        return self.qkv.num_bytes + self.output.num_bytes

    def make_layer(self, context: AttentionContext, buffers: StepBuffers, num_masked_prefix: int) -> Attention:
        """Return the layer.

        Args:
            num_masked_prefix: number of leading positions that are masked for every row but their own.
        """
        eps = context.eps
        rotary = RotaryParams(context.cos_sin, context.interleaved_rotary, self.q_norm, self.k_norm, eps)
        return Attention(
            Linear(self.qkv, NormParams(self.norm, eps)),
            self.heads,
            rotary,
            Linear(self.output),
            buffers.scratch("qkv", self.qkv.out_features),
            buffers.scratch("attended", self.output.in_features),
            num_masked_prefix,
        )


@dataclass(frozen=True)
class AttentionPart:
    """Attention with grouped queries, as a checkpoint stores it.

    Attributes:
        names: the names of its tensors.
        hidden_size: width of its input and output.
        heads: layout of the attention heads.
        rotary_dim, interleaved_rotary: which channels of a head are rotated together, as `RotaryParams` has them.
        qkv_bias, output_bias: whether these linear layers have a bias.
        qk_norm: whether q and k heads are normalised before the rotation.
    """

    names: AttentionNames
    hidden_size: int
    heads: HeadLayout
    rotary_dim: int
    interleaved_rotary: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool

    @property
    def qkv(self) -> LinearSpec:
        """Return the layer q | k | v."""
        names, heads = self.names, self.heads
        query, key_value = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        stored = (StoredLinear(names.q, query), StoredLinear(names.k, key_value), StoredLinear(names.v, key_value))
        return LinearSpec("qkv", stored, self.hidden_size, self.qkv_bias)

    @property
    def output(self) -> LinearSpec:
        """Return the layer after the attention."""
        stored = (StoredLinear(self.names.output, self.hidden_size),)
        return LinearSpec("output", stored, self.heads.num_heads * self.heads.head_dim, self.output_bias)

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Return all linear layers."""
        return self.qkv, self.output

    @property
    def shapes(self) -> Shapes:
        """Return the name and shape of every tensor."""
        shapes: Shapes = {self.names.norm: (self.hidden_size,)}
        if self.qk_norm:
            shapes[self.names.q_norm] = shapes[self.names.k_norm] = (self.heads.head_dim,)
        return shapes | self.qkv.shapes | self.output.shapes

    def load(self, loader: WeightLoader) -> AttentionWeights:
        """Return the weights, in the weight format of attention."""
        names, quantization = self.names, loader.quantization.attention
        exponents = self._key_exponents(loader) if loader.balances_keys else None
        factors = {} if exponents is None else self._factors(exponents)
        return AttentionWeights(
            heads=self.heads,
            norm=loader.copy(names.norm),
            qkv=loader.linear(self.qkv, quantization, factors),
            output=loader.linear(self.output, quantization),
            q_norm=loader.copy(names.q_norm, factors) if self.qk_norm else None,
            k_norm=loader.copy(names.k_norm, factors) if self.qk_norm else None,
            key_exponents=exponents,
        )

    def _key_exponents(self, loader: WeightLoader) -> Tensor:
        """Return the exponents that balance the keys, as `AttentionWeights` has them."""
        names, head_dim = self.names, self.heads.head_dim

        def make() -> Tensor:
            if self.qk_norm:
                squares = np.square(loader.peek(names.k_norm).astype("float64").numpy())
            else:
                bias = loader.peek(f"{names.k}.bias") if self.qkv_bias else None
                pieces = loader.source.pieces(f"{names.k}.weight", loader.dtype)
                squares = squared_lengths(pieces, loader.peek(names.norm), bias)
            pairs = pairs_of_channels(head_dim, self.rotary_dim, self.interleaved_rotary)
            return paddle.to_tensor(choose_exponents(squares.reshape(-1, head_dim), pairs))

        shape = (1 if self.qk_norm else self.heads.num_kv_heads, head_dim)
        return loader.store.keep(f"{names.k}.exponents", make, ExpectedTensor(shape, "int8"))

    def _factors(self, exponents: Tensor) -> dict[str, Factors]:
        """Return by what the outputs of q and k are multiplied, or the weights of their norms, by tensor names."""
        of_keys = exponents.numpy()
        if self.qk_norm:
            return {self.names.q_norm: powers_of_two(of_keys), self.names.k_norm: powers_of_two(-of_keys)}
        of_queries = np.repeat(of_keys, self.heads.num_heads // self.heads.num_kv_heads, axis=0)
        return {self.names.q: powers_of_two(of_queries), self.names.k: powers_of_two(-of_keys)}
