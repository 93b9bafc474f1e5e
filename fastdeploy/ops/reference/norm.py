# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalisation in Paddle operators (Zhang and Sennrich, 2019)."""

import paddle


def normalise(x: paddle.Tensor, weight: paddle.Tensor, eps: float) -> paddle.Tensor:
    """Return x normalised over its last axis and multiplied by `weight`, float32."""
    wide = x.astype("float32")
    factor = paddle.rsqrt((wide * wide).mean(axis=-1, keepdim=True) + eps)
    return wide * factor * weight.astype("float32")


def rms_norm(x: paddle.Tensor, weight: paddle.Tensor, out: paddle.Tensor, num_rows: int, eps: float) -> None:
    """As fastdeploy.ops.norm.rms_norm."""
    out[:num_rows] = normalise(x[:num_rows], weight, eps).astype(out.dtype)


def norm_gelu(
    x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor, out: paddle.Tensor, num_rows: int, eps: float
) -> None:
    """As fastdeploy.ops.norm.norm_gelu."""
    normed = normalise(x[:num_rows], weight, eps) + bias.astype("float32")
    out[:num_rows] = paddle.nn.functional.gelu(normed).astype(out.dtype)
