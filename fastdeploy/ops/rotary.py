# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding of queries and keys, in place."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import paddle

from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.reference import rotary as reference
from fastdeploy.ops.registry import Lookup, OpEntry, register, run_native


@dataclass(frozen=True)
class HeadLayout:
    """How a row of qkv is divided: num_heads query heads, then num_kv_heads key heads, then as many value heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def row_size(self) -> int:
        """Return the elements of one row of qkv."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def rotary(
    qkv: paddle.Tensor,
    positions: paddle.Tensor,
    cos_sin: paddle.Tensor,
    num_rows: int,
    heads: HeadLayout,
    interleaved: bool,
    q_norm: paddle.Tensor | None = None,
    k_norm: paddle.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Rotate the query and key heads of the first `num_rows` rows in place (Su et al., 2021).

    With q_norm or k_norm each query or key head is first normalised over head_dim (rms_norm). Only the first rotary_dim
    elements of a head are rotated, in fp32, with one rounding.

    Args:
        qkv: [cap, heads.row_size] bfloat16 or float32.
        positions: [cap] int32.
        cos_sin: [max_position, rotary_dim] float32: rotary_dim / 2 cosines, then as many sines.
        num_rows: rows to rotate.
        heads: how a row is divided.
        interleaved: pairs are (0, 1), (2, 3), ...; otherwise (0, rotary_dim / 2), (1, rotary_dim / 2 + 1), ...
        q_norm: [head_dim], dtype of qkv, or None.
        k_norm: [head_dim], dtype of qkv, or None.
        eps: of the two norms.

    Raises:
        ValueError: a position outside cos_sin, head_dim above 256, or a shape or dtype that does not fit.
    """
    _ROTARY.run(qkv, positions, cos_sin, num_rows, heads, interleaved, q_norm, k_norm, eps)


def _cpu(
    qkv: paddle.Tensor,
    positions: paddle.Tensor,
    cos_sin: paddle.Tensor,
    num_rows: int,
    heads: HeadLayout,
    interleaved: bool,
    q_norm: paddle.Tensor | None = None,
    k_norm: paddle.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    h, kv, d = heads.num_heads, heads.num_kv_heads, heads.head_dim
    run_native("fd_rotary", qkv, positions, cos_sin, q_norm, k_norm, num_rows, h, kv, d, interleaved, eps)


def _example(
    dtype: str, heads: HeadLayout, rotary_dim: int, interleaved: bool, norm: bool, lookup: Lookup
) -> Sequence[paddle.Tensor]:
    qkv = random_rows(6, heads.row_size, dtype, 10)
    positions = paddle.to_tensor(np.array([0, 7, 3, 19, 1, 99], np.int32), place=paddle.CPUPlace())
    angles = np.random.default_rng(11).uniform(0, 6.28, (20, rotary_dim // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    q_norm = random_rows(1, heads.head_dim, dtype, 12).reshape([-1]) if norm else None
    k_norm = random_rows(1, heads.head_dim, dtype, 13).reshape([-1]) if norm else None
    cos_sin = paddle.to_tensor(table, place=paddle.CPUPlace())
    lookup("rotary")(qkv, positions, cos_sin, 5, heads, interleaved, q_norm, k_norm, 1e-6)
    return [qkv]


_ROTARY = register(
    OpEntry(
        "rotary",
        reference.rotary,
        {"cpu": _cpu},
        {"float32": 2e-6, "bfloat16": 1.6e-2},
        [
            partial(_example, dtype, *args)
            for dtype in ("float32", "bfloat16")
            for args in (
                (HeadLayout(4, 2, 64), 64, False, False),
                (HeadLayout(4, 2, 64), 64, True, False),
                (HeadLayout(6, 2, 80), 20, False, True),
                (HeadLayout(3, 1, 24), 8, True, True),
                (HeadLayout(2, 2, 128), 128, False, True),
            )
        ],
    )
)
