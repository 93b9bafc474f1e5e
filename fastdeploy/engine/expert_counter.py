# SPDX-License-Identifier: Apache-2.0
"""Counts how the rows of steps are spread over experts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fastdeploy.core.stats import ExpertStats


class ExpertCounter:
    """Adds up what the routers report of each step."""

    def __init__(self, load: NDArray[np.int32], num_experts: int, num_chosen: int, layers: Sequence[int]) -> None:
        """Start with zeros.

        Args:
            load: [num_sparse, 2], which each step sets: for each sparse layer, how many experts have rows, and the most
                rows of one expert.
            num_experts, num_chosen: experts of a layer, and experts per row.
            layers: [num_sparse] the index of each sparse layer in the decoder.
        """
        self._load, self._layers = load, list(layers)
        self._share = num_chosen / num_experts
        self._mean_load = 0.0
        self._sums = np.zeros(load.shape, np.int64)

    def count(self, num_rows: int) -> float:
        """Count the step that has just run; return the number of experts that have rows, as the mean of the layers."""
        self._mean_load += num_rows * self._share
        np.add(self._sums, self._load, out=self._sums)
        return sum(self._load[:, 0].tolist()) / len(self._layers)  # a list is faster than NumPy for so few numbers

    def stats(self) -> ExpertStats:
        """Return the sums over all steps."""
        return ExpertStats(list(self._layers), self._sums[:, 1].tolist(), self._mean_load)
