# SPDX-License-Identifier: Apache-2.0
"""States of several layers of a target, projected to one state per row while the target computes a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import paddle
from paddle import Tensor

from fastdeploy.layers.linear import Linear
from fastdeploy.ops.linear import PackedLinear
from fastdeploy.ops.norm import NormParams


@dataclass(frozen=True)
class TapWeights:
    """What reads one state of the target.

    Attributes:
        layer: the layer whose input it reads; the number of layers for the output of the last one.
        projection: its part of the projection; the first one has the bias, if there is any.
        norm: weight of the norm before it, or None.
    """

    layer: int
    projection: PackedLinear
    norm: Tensor | None


class StateTaps:
    """The sum of projections of a target's states.

    Attributes:
        states: [max_rows, width], the sums of the rows of the last step.
    """

    def __init__(self, weights: Sequence[TapWeights], eps: float, max_rows: int, dtype: str) -> None:
        """Allocate the states.

        Args:
            weights: at least one.
            eps: of the norms.
            max_rows: maximum number of rows in a step.
        """
        self.states: Tensor = paddle.zeros([max_rows, weights[0].projection.out_features], dtype)
        self._projections = dict[int, list[tuple[Linear, Tensor | None]]]()
        earlier: Tensor | None = None
        for tap in sorted(weights, key=lambda tap: tap.layer):
            linear = Linear(tap.projection, None if tap.norm is None else NormParams(tap.norm, eps))
            self._projections.setdefault(tap.layer, []).append((linear, earlier))
            earlier = self.states

    def read(self, layer: int, hidden: Tensor, num_rows: int) -> None:
        """Add the projections of the input of a layer, hidden [max_rows, target's width], in the order of layers."""
        for linear, earlier in self._projections.get(layer, ()):
            linear(hidden, self.states, num_rows, earlier)
