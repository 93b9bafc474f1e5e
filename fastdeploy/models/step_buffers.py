# SPDX-License-Identifier: Apache-2.0
"""Activations of one step."""

from __future__ import annotations

import paddle
from paddle import Tensor


class StepBuffers:
    """Activations of one step, which all layers share because one layer runs at a time.

    Attributes:
        max_rows: maximum number of rows in a step.
        dtype: the model's dtype.
        hidden, normed: [max_rows, hidden_size] in this dtype.
    """

    def __init__(self, hidden_size: int, max_rows: int, dtype: str) -> None:
        """Allocate the hidden states; layers ask for the rest when they are built."""
        self.max_rows, self.dtype = max_rows, dtype
        self._scratch: dict[tuple[str, int], Tensor] = {}
        self.hidden = self.scratch("hidden", hidden_size)
        self.normed = self.scratch("normed", hidden_size)

    def scratch(self, name: str, width: int) -> Tensor:
        """Return the buffer [max_rows, width] in the model's dtype that layers share under this name."""
        key = (name, width)
        if key not in self._scratch:
            self._scratch[key] = paddle.zeros([self.max_rows, width], self.dtype)
        return self._scratch[key]
