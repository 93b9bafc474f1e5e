# SPDX-License-Identifier: Apache-2.0
"""Linear layer with a packed weight."""

from __future__ import annotations

from paddle import Tensor

from fastdeploy.ops.linear import PackedLinear, linear
from fastdeploy.ops.norm import NormParams


class Linear:
    """y = norm(x) W^T + bias + residual, rounded once; with a gated weight, y = silu(gate) * up + residual."""

    __slots__ = ("norm", "weight")

    def __init__(self, weight: PackedLinear, norm: NormParams | None = None) -> None:
        self.weight = weight
        self.norm = norm

    def __call__(self, x: Tensor, out: Tensor, num_rows: int, residual: Tensor | None = None) -> None:
        """Compute the first num_rows rows.

        Args:
            x: [capacity, in_features].
            out: [capacity, out_features]; same dtype as x, or float32.
            num_rows: rows to compute.
            residual: [capacity, out_features], added before rounding; may be `out`.
        """
        linear(x, self.weight, out, num_rows, residual, self.norm)
