# SPDX-License-Identifier: Apache-2.0
"""Linear layer over a prepacked weight."""

from __future__ import annotations

from paddle import Tensor

from fastdeploy.ops.linear import PackedLinear, linear


class Linear:
    """y = x W^T + bias (+ residual), one rounding at the end."""

    __slots__ = ("weight",)

    def __init__(self, weight: PackedLinear) -> None:
        self.weight = weight

    def __call__(self, x: Tensor, out: Tensor, num_rows: int, residual: Tensor | None = None) -> None:
        """Write the first num_rows rows.

        Args:
            x: [capacity, in_features].
            out: [capacity, out_features]; same dtype as x, or float32.
            num_rows: rows to compute.
            residual: [capacity, out_features], added before rounding; may be `out` itself.
        """
        linear(x, self.weight, out, num_rows, residual)
