# SPDX-License-Identifier: Apache-2.0
"""The ERNIE-4.5 decoder, dense or with experts, and its MTP layer, written for training.

Letters in shapes: B sequences, T positions, D hidden size, V vocabulary, H query heads, G key/value heads, E head size.

Parameters are kept in float32; every matrix product runs in `compute_dtype`. Rotary pairs are ERNIE-4.5's: elements
(2i, 2i + 1) of a head are rotated together. Training stores all even elements of a head, then all odd ones, because
that vectorises; `rotary_rows` maps between the two orders when a checkpoint is written or read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demo_model.experts import SparseMLP


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one decoder; defaults are the main demonstration model.

    Attributes:
        num_dense_layers: layers before the first one with experts; only read if there are experts.
    """

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 14
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    num_experts: int = 0
    experts_per_token: int = 2
    expert_width: int = 128
    num_shared_experts: int = 1
    num_dense_layers: int = 1

    def is_sparse(self, layer: int) -> bool:
        """Tells whether a layer has experts."""
        return self.num_experts > 0 and layer >= self.num_dense_layers


MOE_SHAPE = ModelShape(hidden_size=192, intermediate_size=576, num_layers=8, num_experts=16)
DRAFT_SHAPE = ModelShape(hidden_size=128, intermediate_size=384, num_layers=4, num_heads=2, num_kv_heads=1)
MAX_COMPILED_FORMS = 64  # of one function: kinds of layers times shapes of batches


def default_device() -> torch.device:
    """Returns the first GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def rotary_rows(weight: Tensor, head_dim: int, to_interleaved: bool) -> Tensor:
    """Reorders the rows of a query or key projection between split halves and interleaved pairs.

    Args:
        weight: `[num_heads * head_dim, D]`.
        head_dim: rows per head.
        to_interleaved: True when writing a checkpoint, False when reading one.
    """
    half = head_dim // 2
    if to_interleaved:
        split = weight.view(-1, 2, half, weight.shape[-1]).transpose(1, 2)
    else:
        split = weight.view(-1, half, 2, weight.shape[-1]).transpose(1, 2)
    return split.reshape(weight.shape).contiguous()


def rotary_tables(shape: ModelShape, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Returns cosine and sine `[max_positions, E / 2]` float32."""
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
    angle = torch.outer(
        torch.arange(shape.max_positions, dtype=torch.float32, device=device), shape.rope_theta**-exponent
    )
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates `x` `[B, T, heads, E]` by the angles `[T, E / 2]` of its positions."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learnt scale, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight.to(x.dtype)


class Linear(nn.Module):
    """A matrix without bias, `[out, in]`, cast to its input's type at use."""

    def __init__(self, num_in: int, num_out: int, zero: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_out, num_in))
        if not zero:
            nn.init.normal_(self.weight, std=0.5 * num_in**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def causal_attention(query: Tensor, key: Tensor, value: Tensor, block: int = 512) -> Tensor:
    """Attends causally with plain matrix products, which compile to faster CPU code than the fused operator.

    Args:
        query: `[B, H, T, E]`.
        key: `[B, G, T, E]`, shared by H / G query heads each.
        value: `[B, G, T, E]`.
        block: queries handled at once; keys after a block's last query are never touched.
    """
    size, num_heads, length, width = query.shape
    num_groups = key.shape[1]
    blocks = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        folded = query[:, :, start:stop].reshape(size * num_groups, -1, width)
        keys = key[:, :, :stop].reshape(size * num_groups, stop, width)
        values = value[:, :, :stop].reshape(size * num_groups, stop, width)
        scores = torch.bmm(folded, keys.transpose(1, 2)).float() * width**-0.5
        rows = torch.arange(start, stop, device=query.device).repeat(num_heads // num_groups)
        hidden = torch.arange(stop, device=query.device)[None, :] > rows[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(query.dtype)
        blocks.append(torch.bmm(weights, values).view(size, num_heads, stop - start, width))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


class Attention(nn.Module):
    """Grouped-query causal self-attention."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = Linear(shape.hidden_size, shape.num_heads * shape.head_dim)
        self.k_proj = Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim)
        self.v_proj = Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim)
        self.o_proj = Linear(shape.num_heads * shape.head_dim, shape.hidden_size, zero=True)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Returns rotated keys and values, both `[B, G, T, E]`."""
        heads = (*x.shape[:2], self.shape.num_kv_heads, self.shape.head_dim)
        key = rotate(self.k_proj(x).view(heads), cos, sin)
        return key.transpose(1, 2), self.v_proj(x).view(heads).transpose(1, 2)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns rotated queries `[B, H, T, E]`."""
        heads = (*x.shape[:2], self.shape.num_heads, self.shape.head_dim)
        return rotate(self.q_proj(x).view(heads), cos, sin).transpose(1, 2)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Attends from `x` `[B, T, D]` to `past` keys and values and to itself.

        Args:
            past: keys and values `[B, G, P, E]` that precede this call's.
            mask: `[T, P + T]` or broadcastable, True where attention is allowed; None means causal without a past.
        """
        key, value = self.keys_values(x, cos, sin)
        if past is not None:
            key, value = torch.cat((past[0], key), dim=2), torch.cat((past[1], value), dim=2)
        query = self.queries(x, cos, sin)
        if past is None and mask is None and x.device.type == "cpu":
            out = causal_attention(query, key, value)
        else:
            repeats = self.shape.num_heads // self.shape.num_kv_heads
            key_heads, value_heads = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
            is_causal = mask is None and x.shape[1] > 1
            out = F.scaled_dot_product_attention(query, key_heads, value_heads, attn_mask=mask, is_causal=is_causal)
        return self.o_proj(out.transpose(1, 2).flatten(2)), (key, value)


class MLP(nn.Module):
    """SwiGLU feed-forward block."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, width)
        self.up_proj = Linear(hidden_size, width)
        self.down_proj = Linear(width, hidden_size, zero=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def make_mlp(shape: ModelShape, sparse: bool) -> nn.Module:
    """Returns a layer's feed-forward block."""
    if not sparse:
        return MLP(shape.hidden_size, shape.intermediate_size)
    shared = MLP(shape.hidden_size, shape.num_shared_experts * shape.expert_width) if shape.num_shared_experts else None
    return SparseMLP(shape.hidden_size, shape.num_experts, shape.experts_per_token, shape.expert_width, shared)


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward block with residual connections."""

    def __init__(self, shape: ModelShape, sparse: bool = False) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = make_mlp(shape, sparse)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        attended, key_value = self.self_attn(self.input_layernorm(x), cos, sin, past, mask)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), key_value


def layer_output(layer: DecoderLayer, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Runs one layer over whole sequences `[B, T, D]`."""
    return layer(x, cos, sin)[0]


@functools.cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compiles `function` once per process; every layer of a decoder then shares that code."""
    torch._dynamo.config.recompile_limit = MAX_COMPILED_FORMS
    return torch.compile(function, dynamic=False)


KeyValues = list[tuple[Tensor, Tensor]]


class Decoder(nn.Module):
    """A decoder whose head is its embedding transposed."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList([DecoderLayer(shape, shape.is_sparse(i)) for i in range(shape.num_layers)])
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        cos, sin = rotary_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Looks up `tokens` `[B, T]`; returns `[B, T, D]`."""
        return self.embed_tokens(tokens).to(dtype)

    def hidden(self, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the states after the final norm, `[B, T, D]`, for whole sequences `[B, T]`."""
        num_positions = tokens.shape[1]
        cos, sin = self.cos[:num_positions], self.sin[:num_positions]
        x = self.embed(tokens, dtype)
        for layer in self.layers:
            x = compiled(layer_output)(layer, x, cos, sin)
        return self.norm(x)

    def extend(
        self, tokens: Tensor, past: KeyValues | None, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, KeyValues]:
        """Continues sequences that share one length: returns states `[B, T, D]` and the grown keys and values."""
        num_past = 0 if past is None else past[0][0].shape[2]
        positions = slice(num_past, num_past + tokens.shape[1])
        mask = None
        if past is not None and tokens.shape[1] > 1:
            allowed = torch.ones(tokens.shape[1], num_past + tokens.shape[1], dtype=torch.bool, device=tokens.device)
            mask = allowed.tril(num_past)
        x, grown = self.embed(tokens, dtype), []
        for index, layer in enumerate(self.layers):
            x, key_value = layer(x, self.cos[positions], self.sin[positions], past[index] if past else None, mask)
            grown.append(key_value)
        return self.norm(x), grown

    def logits(self, hidden: Tensor) -> Tensor:
        """Maps states `[..., D]` to logits `[..., V]`."""
        return F.linear(hidden, self.embed_tokens.weight.to(hidden.dtype))


class MTPLayer(nn.Module):
    """One ERNIE-form multi-token-prediction layer; embedding, final norm and head are the target's.

    At slot t + 1 it reads the target's final-norm state h_t and the embedding of token x_{t+1}, and its output, after
    the target's final norm, predicts x_{t+2}. Used recursively, that normed output takes the place of h.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.emb_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.linear_proj = Linear(2 * shape.hidden_size, shape.hidden_size)
        self.block = DecoderLayer(shape)

    def mix(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Joins token embeddings and hidden states, both `[B, T, D]`, embedding first."""
        return self.linear_proj(torch.cat((self.emb_norm(embedded), self.hidden_norm(hidden)), dim=-1))
