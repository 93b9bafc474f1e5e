# SPDX-License-Identifier: Apache-2.0
"""Activations of one step."""

from __future__ import annotations

import paddle
from paddle import Tensor

from fastdeploy.ops.experts import ExpertLoad, RoutedRows


class StepBuffers:
    """Activations of one step, which all layers share because one layer runs at a time.

    Attributes:
        max_rows: maximum number of rows in a step.
        dtype: the model's dtype.
        hidden, normed: [max_rows, hidden_size] in this dtype.
        expert_load: what the routers of the layers report; None if nobody reads it.
    """

    def __init__(self, hidden_size: int, max_rows: int, dtype: str, expert_load: ExpertLoad | None = None) -> None:
        """Allocate the hidden states; layers ask for the rest when they are built."""
        self.max_rows, self.dtype, self.expert_load = max_rows, dtype, expert_load
        self._scratch: dict[tuple[str, int], Tensor] = {}
        self._routed: dict[tuple[int, int], RoutedRows] = {}
        self.hidden = self.scratch("hidden", hidden_size)
        self.normed = self.scratch("normed", hidden_size)

    def scratch(self, name: str, width: int, *, rows: int | None = None, dtype: str | None = None) -> Tensor:
        """Return the buffer that layers share under this name and width.

        Args:
            rows: its number of rows; None for max_rows.
            dtype: None for the model's.
        """
        key = (name, width)
        if key not in self._scratch:
            self._scratch[key] = paddle.zeros([rows or self.max_rows, width], dtype or self.dtype)
        return self._scratch[key]

    def routed_rows(self, num_experts: int, num_chosen: int) -> RoutedRows:
        """Return the buffers for rows and their experts that layers of this many experts share."""
        key, hidden_size = (num_experts, num_chosen), int(self.hidden.shape[1])
        if key not in self._routed:
            self._routed[key] = RoutedRows.allocate(self.max_rows, hidden_size, num_experts, num_chosen, self.dtype)
        return self._routed[key]
