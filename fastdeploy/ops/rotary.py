# SPDX-License-Identifier: Apache-2.0
"""The layout of heads in a row of qkv, and the normalisation and rotation of queries and keys before attention."""

from dataclasses import dataclass

import paddle


@dataclass(frozen=True)
class HeadLayout:
    """Heads of a row of qkv: num_heads query heads, then num_kv_heads key heads, then num_kv_heads value heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def row_size(self) -> int:
        """Return the number of elements of a row of qkv."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True)
class RotaryParams:
    """Normalisation and rotation of query and key heads (Su et al., 2021).

    With q_norm or k_norm, each query or key head is first normalised over head_dim as rms_norm does. Then its first
    rotary_dim elements are rotated. Both are computed in fp32 and rounded once.

    Attributes:
        cos_sin: [max_position, rotary_dim] float32: rotary_dim / 2 cosines, then as many sines.
        is_interleaved: pairs are (0, 1), (2, 3), ...; otherwise (0, rotary_dim / 2), (1, rotary_dim / 2 + 1), ...
        q_norm: [head_dim], dtype of qkv, or None.
        k_norm: [head_dim], dtype of qkv, or None.
        eps: term added to the mean square in both norms.
    """

    cos_sin: paddle.Tensor
    is_interleaved: bool
    q_norm: paddle.Tensor | None = None
    k_norm: paddle.Tensor | None = None
    eps: float = 1e-6
