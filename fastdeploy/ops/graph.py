# SPDX-License-Identifier: Apache-2.0
"""Operators that run in every step, captured once where the backend can do that."""

from __future__ import annotations

from fastdeploy.ops.backend import Graph, StepFunction
from fastdeploy.ops.registry import selected_backend


class CapturedGraph:
    """Operators that run in every step on the same buffers, each time for another number of rows and sequences.

    The first run captures them and every run replays them, if the backend supports that.
    """

    def __init__(self, function: StepFunction, max_rows: int, max_seqs: int) -> None:
        """Prepare to run the operators that function(num_rows, num_seqs) calls.

        Args:
            max_rows, max_seqs: capacity of the buffers.
        """
        self._function, self._max_rows, self._max_seqs = function, max_rows, max_seqs
        self._graph: Graph | None = None

    def run(self, num_rows: int, num_seqs: int) -> None:
        """Execute the operators for the first rows and sequences.

        Raises:
            ValueError: an operator refuses its arguments.
        """
        if self._graph is None:
            self._graph = selected_backend().capture(self._function, self._max_rows, self._max_seqs)
        self._graph.replay(num_rows, num_seqs)

    def invalidate(self) -> None:
        """Capture again at the next run, because a buffer has moved."""
        self._graph = None
