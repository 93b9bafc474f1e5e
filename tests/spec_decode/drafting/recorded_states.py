# SPDX-License-Identifier: Apache-2.0
"""The states that a target computes, for the definitions of heads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from paddle import Tensor


@dataclass
class RecordedStates:
    """Records the residual stream before each layer, in place of the taps of a head."""

    inputs: dict[int, NDArray[np.float32]]
    states: Tensor

    def read(self, layer: int, hidden: Tensor, num_rows: int) -> None:
        self.inputs[layer] = hidden[:num_rows].astype("float32").numpy()
