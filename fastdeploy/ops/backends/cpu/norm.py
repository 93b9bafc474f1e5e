# SPDX-License-Identifier: Apache-2.0
"""Native kernels of the operators in `fastdeploy.ops.norm`."""

from __future__ import annotations

import paddle

from fastdeploy.ops.backends.cpu.library import run_native


def rms_norm(x: paddle.Tensor, weight: paddle.Tensor, out: paddle.Tensor, num_rows: int, eps: float) -> None:
    """Normalise rows in fp32 and round once."""
    run_native("fd_rms_norm", x, weight, out, num_rows, eps)


def norm_gelu(
    x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor, out: paddle.Tensor, num_rows: int, eps: float
) -> None:
    """Normalise rows, add a bias and apply GELU in fp32, and round once."""
    run_native("fd_norm_gelu", x, weight, bias, out, num_rows, eps)
