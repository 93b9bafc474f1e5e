# SPDX-License-Identifier: Apache-2.0
"""Feed-forward block of experts."""

from __future__ import annotations

from paddle import Tensor

from fastdeploy.ops.experts import (
    PackedExperts,
    RoutedRows,
    Router,
    SharedExpert,
    experts_down,
    experts_up,
    route,
)
from fastdeploy.ops.linear import linear


class SparseMLP:
    """hidden + the weighted outputs of each row's experts + the shared expert's output.

    A call takes three operators, and two more if the shared expert's weight format is not that of the experts.
    """

    __slots__ = ("activated", "down", "gate_up", "routed", "router", "shared")

    def __init__(
        self,
        router: Router,
        gate_up: PackedExperts,
        down: PackedExperts,
        shared: SharedExpert | None,
        routed: RoutedRows,
        activated: Tensor,
    ) -> None:
        """Store the weights and the scratch buffers, which all layers share.

        Args:
            router: chooses the experts, after the layer's norm.
            gate_up: gated, hidden_size -> expert width.
            down: expert width -> hidden_size.
            shared: the expert of every row, or None.
            routed: scratch buffers for the rows and their experts.
            activated: scratch buffer [capacity * num_chosen, expert width].
        """
        self.router = router
        self.gate_up = gate_up
        self.down = down
        self.shared = shared
        self.routed = routed
        self.activated = activated

    def __call__(self, hidden: Tensor, num_rows: int) -> None:
        """Add the block's output to hidden [capacity, hidden_size]."""
        routed, shared = self.routed, self.shared
        route(hidden, self.router, routed, num_rows)
        if shared is None or shared.summed is None:
            experts_up(routed, self.gate_up, self.activated, num_rows, shared)
        else:
            experts_up(routed, self.gate_up, self.activated, num_rows, None)
            linear(routed.normed, shared.gate_up, shared.activated, num_rows)
            linear(shared.activated, shared.down, shared.summed, num_rows)
        experts_down(routed, self.activated, self.down, hidden, num_rows, shared)
