# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square norm."""

from __future__ import annotations

from paddle import Tensor

from fastdeploy.ops.norm import rms_norm


class RMSNorm:
    """y = x / rms(x) * weight, computed in float32."""

    __slots__ = ("eps", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor, out: Tensor, num_rows: int) -> None:
        """Normalise the first num_rows rows of x [capacity, hidden_size] into out of the same shape."""
        rms_norm(x, self.weight, out, num_rows, self.eps)
