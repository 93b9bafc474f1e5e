# SPDX-License-Identifier: Apache-2.0
"""Scattering of logits in Paddle operators."""

import paddle


def scatter_logits(x: paddle.Tensor, ids: paddle.Tensor, out: paddle.Tensor, num_rows: int) -> None:
    """As fastdeploy.ops.logits.scatter_logits."""
    if int(ids.min()) < 0 or int(ids.max()) >= out.shape[1]:
        raise ValueError(f"scatter_logits: ids: expected 0..{out.shape[1] - 1}, got {ids.tolist()}")
    if num_rows:
        full = paddle.full([out.shape[1], num_rows], -float("inf"), "float32")
        full[ids] = x[:num_rows].t()
        out[:num_rows] = full.t()
