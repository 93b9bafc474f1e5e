# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding in Paddle operators (Su et al., 2021, equation 34)."""

from typing import TYPE_CHECKING

import paddle

from fastdeploy.ops.reference.norm import normalise

if TYPE_CHECKING:
    from fastdeploy.ops.rotary import HeadLayout, RotaryParams


def rotate(x: paddle.Tensor, cos_sin: paddle.Tensor, interleaved: bool) -> paddle.Tensor:
    """Return [rows, heads, head_dim] float32 with its first rotary_dim elements rotated; cos_sin [rows, rotary_dim]."""
    rotary_dim = cos_sin.shape[-1]
    cosine, sine = paddle.chunk(cos_sin.unsqueeze(1), 2, axis=-1)
    rotated_part, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        first, second = rotated_part[..., 0::2], rotated_part[..., 1::2]
    else:
        first, second = rotated_part[..., : rotary_dim // 2], rotated_part[..., rotary_dim // 2 :]
    parts = [first * cosine - second * sine, second * cosine + first * sine]
    rotated = paddle.stack(parts, axis=-1).reshape(rotated_part.shape) if interleaved else paddle.concat(parts, axis=-1)
    return paddle.concat([rotated, rest], axis=-1) if rest.shape[-1] else rotated


def prepare(
    qkv: paddle.Tensor, positions: paddle.Tensor, num_rows: int, heads: "HeadLayout", rotary: "RotaryParams"
) -> None:
    """Normalise and rotate the query and key heads of the first `num_rows` rows of qkv in place."""
    if num_rows == 0:
        return
    angles = paddle.gather(rotary.cos_sin, positions[:num_rows])
    rows = qkv[:num_rows].astype("float32").reshape([num_rows, -1, heads.head_dim])
    for start, count, norm in (
        (0, heads.num_heads, rotary.q_norm),
        (heads.num_heads, heads.num_kv_heads, rotary.k_norm),
    ):
        part = rows[:, start : start + count]
        if norm is not None:
            part = normalise(part, norm, rotary.eps).astype(qkv.dtype).astype("float32")
        rows[:, start : start + count] = rotate(part, angles, rotary.is_interleaved)
    qkv[:num_rows] = rows.reshape([num_rows, -1]).astype(qkv.dtype)
