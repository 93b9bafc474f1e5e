# SPDX-License-Identifier: Apache-2.0
"""Gated feed-forward block."""

from __future__ import annotations

from paddle import Tensor

from fastdeploy.layers.linear import Linear


class GatedMLP:
    """hidden + down(silu(gate(hidden)) * up(hidden)); gate and up are one gated linear layer."""

    __slots__ = ("activated", "down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear, activated: Tensor) -> None:
        """Store the weights and the scratch buffer, which all layers share.

        Args:
            gate_up: hidden_size -> intermediate_size, after the layer's norm.
            down: intermediate_size -> hidden_size.
            activated: scratch buffer [capacity, intermediate_size].
        """
        self.gate_up = gate_up
        self.down = down
        self.activated = activated

    def __call__(self, hidden: Tensor, num_rows: int) -> None:
        """Add the block's output to hidden [capacity, hidden_size]."""
        self.gate_up(hidden, self.activated, num_rows)
        self.down(self.activated, hidden, num_rows, hidden)
