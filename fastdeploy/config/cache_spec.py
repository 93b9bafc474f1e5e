# SPDX-License-Identifier: Apache-2.0
"""What the cache of a layer holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CacheSpec:
    """What the cache of one layer holds per token.

    Attributes:
        kind: `grouped`, a key and a value for each KV head, or `latent`, one row that stands for both.
        num_heads: number of KV heads; 1 for latent rows.
        head_dim: size of a key or a value; of a latent row, its rotary part included.
        dtype: "bfloat16", "float32" or "int8".
        rope_dim: size of the rotary part that ends a latent row; 0 for other kinds.
    """

    kind: Literal["grouped", "latent"]
    num_heads: int
    head_dim: int
    dtype: str
    rope_dim: int = 0
