# SPDX-License-Identifier: Apache-2.0
"""The heads of a decoder and their rotation, as its config.json describes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastdeploy.config.checkpoint_json import check_heads
from fastdeploy.config.family_defaults import find_defaults
from fastdeploy.config.latent_config import LatentConfig, parse_latent
from fastdeploy.config.rope_config import RopeConfig, parse_rope


@dataclass(frozen=True)
class AttentionSizes:
    """The attributes of `ModelConfig` with these names."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    latent: LatentConfig | None


def parse_attention(
    raw: Mapping[str, Any], architecture: str, count: Callable[[str, int | None], int], where: str
) -> AttentionSizes:
    """Read the keys of grouped-query or latent attention.

    Args:
        raw: the whole config.json.
        count: returns the size of a key; the second argument is the one that follows from others.
        where: the file, as messages begin with it.

    Raises:
        ConfigError: a value is not valid or not supported; names the key.
    """
    num_heads, max_positions = count("num_attention_heads", None), count("max_position_embeddings", None)
    defaults = find_defaults(raw, architecture)
    latent = parse_latent(raw, architecture, where)
    if latent is None:
        head_dim = count("head_dim", count("hidden_size", None) // num_heads)
        num_kv_heads = count("num_key_value_heads", num_heads)
        check_heads(num_heads, num_kv_heads, head_dim)
        rope = parse_rope(raw, head_dim=head_dim, max_position_embeddings=max_positions, defaults=defaults, where=where)
        return AttentionSizes(num_heads, num_kv_heads, head_dim, rope, None)
    rotated = latent.rope_dim
    rope = parse_rope(raw, head_dim=rotated, max_position_embeddings=max_positions, defaults=defaults, where=where)
    return AttentionSizes(num_heads, 1, latent.row_dim, rope, latent.rotated_by(rope))
