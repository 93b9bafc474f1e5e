# SPDX-License-Identifier: Apache-2.0
"""Kernels of the operators in `fastdeploy.ops.norm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle import Tensor

from fastdeploy.ops.backends.gpu.checks import require_dtype, require_length, require_rows
from fastdeploy.ops.backends.gpu.library import active, launch


def rms_norm(x: Tensor, weight: Tensor, out: Tensor, num_rows: int, eps: float) -> None:
    """Normalise rows in fp32 and round once; the size of a row must be a multiple of 8."""
    size = weight.shape[0]
    require_dtype("rms_norm", "bfloat16", x=x, weight=weight, out=out)
    require_rows("rms_norm", num_rows, size, x=x, out=out)
    launch("fd_rms_norm", x, weight, out, *active().row_count(num_rows), size, eps)


def norm_gelu(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, num_rows: int, eps: float) -> None:
    """Normalise rows, add a bias and apply GELU in fp32, and round once; a row must have a multiple of 8 elements."""
    size = weight.shape[0]
    require_dtype("norm_gelu", "bfloat16", x=x, weight=weight, bias=bias, out=out)
    require_length("norm_gelu", size, bias=bias)
    require_rows("norm_gelu", num_rows, size, x=x, out=out)
    launch("fd_norm_gelu", x, weight, bias, out, *active().row_count(num_rows), size, eps)


KERNELS: dict[str, Callable[..., Any]] = {"norm_gelu": norm_gelu, "rms_norm": rms_norm}
