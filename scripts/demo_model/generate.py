# SPDX-License-Identifier: Apache-2.0
"""Greedy continuations of many prompts at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from demo_model.model import Decoder, DecoderLayer, KeyValues


class ContinuationCache:
    """Keys and values of a batch, preallocated: `[B, G, capacity, E]` per layer, filled up to `length`."""

    def __init__(self, past: KeyValues, capacity: int) -> None:
        self.length = past[0][0].shape[2]
        self.layers = []
        for key, value in past:
            grown = [tensor.new_zeros(*tensor.shape[:2], capacity, tensor.shape[3]) for tensor in (key, value)]
            grown[0][:, :, : self.length], grown[1][:, :, : self.length] = key, value
            self.layers.append(grown)


@torch.inference_mode()
def greedy_continuations(decoder: Decoder, prompts: Tensor, num_new: int, dtype: torch.dtype) -> Tensor:
    """Continues prompts of one length, `[B, P]`, by `num_new` most probable tokens; returns `[B, num_new]`."""
    hidden, past = decoder.extend(prompts, None, dtype)
    cache = ContinuationCache(past, prompts.shape[1] + num_new)
    new_tokens = [decoder.logits(hidden[:, -1]).float().argmax(-1)]
    for _ in range(num_new - 1):
        hidden_row = _decode_row(decoder, new_tokens[-1], cache, dtype)
        new_tokens.append(decoder.logits(hidden_row).float().argmax(-1))
    return torch.stack(new_tokens, dim=1)


def _decode_row(decoder: Decoder, tokens: Tensor, cache: ContinuationCache, dtype: torch.dtype) -> Tensor:
    """Runs one token per sequence, `[B]`; returns states `[B, D]`."""
    position = cache.length
    cos, sin = decoder.cos[position : position + 1], decoder.sin[position : position + 1]
    x = decoder.embed(tokens[:, None], dtype)
    shape = decoder.shape
    for layer, (keys, values) in zip(decoder.layers, cache.layers, strict=True):
        assert isinstance(layer, DecoderLayer)
        normed = layer.input_layernorm(x)
        keys[:, :, position : position + 1], values[:, :, position : position + 1] = layer.self_attn.keys_values(
            normed, cos, sin
        )
        query = layer.self_attn.queries(normed, cos, sin)
        grouped = query.view(len(tokens), shape.num_kv_heads, -1, shape.head_dim)
        attended = F.scaled_dot_product_attention(
            grouped, keys[:, :, : position + 1], values[:, :, : position + 1]
        ).view(query.shape)
        x = x + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    cache.length += 1
    return decoder.norm(x)[:, 0]
