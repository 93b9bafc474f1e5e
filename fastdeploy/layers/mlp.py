# SPDX-License-Identifier: Apache-2.0
"""Gated feed-forward block."""

from __future__ import annotations

from paddle import Tensor

from fastdeploy.layers.linear import Linear
from fastdeploy.ops.swiglu import swiglu


class GatedMLP:
    """down(silu(gate(x)) * up(x)); gate and up are one linear layer."""

    __slots__ = ("activated", "down", "gate_up", "gate_up_out")

    def __init__(self, gate_up: Linear, down: Linear, gate_up_out: Tensor, activated: Tensor) -> None:
        """Bind the weights to scratch buffers that all layers share.

        Args:
            gate_up: hidden_size -> 2 * intermediate_size (gate | up).
            down: intermediate_size -> hidden_size.
            gate_up_out: scratch [capacity, 2 * intermediate_size].
            activated: scratch [capacity, intermediate_size].
        """
        self.gate_up = gate_up
        self.down = down
        self.gate_up_out = gate_up_out
        self.activated = activated

    def __call__(self, x: Tensor, hidden: Tensor, num_rows: int) -> None:
        """Add the block's output for x to hidden, both [capacity, hidden_size]."""
        gate_up_out, activated = self.gate_up_out, self.activated
        self.gate_up(x, gate_up_out, num_rows)
        swiglu(gate_up_out, activated, num_rows)
        self.down(activated, hidden, num_rows, hidden)
