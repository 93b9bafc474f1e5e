# SPDX-License-Identifier: Apache-2.0
"""Launches captured once per bucket of row counts and replayed by one call."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from weakref import finalize

import paddle
from paddle import Tensor

from fastdeploy.config.gpu_config import MAX_CAPTURED_ROWS
from fastdeploy.ops.backend import StepFunction
from fastdeploy.ops.backends.gpu.library import Address, DeviceCounts, DeviceLibrary

DEFAULT_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, MAX_CAPTURED_ROWS)


class BucketedGraphs:
    """The launches of a function, captured at first use for each bucket; more rows than the last one are not captured.

    A graph covers the rows of its bucket; its kernels read how many there are from the device. A replay writes this
    there, if it is not what the replay before has written.
    """

    def __init__(
        self,
        library: DeviceLibrary,
        function: StepFunction,
        max_rows: int,
        max_seqs: int,
        buckets: Sequence[int] = DEFAULT_BUCKETS,
    ) -> None:
        """Prepare to capture.

        Args:
            max_rows, max_seqs: capacity of the buffers of `function`.
            buckets: numbers of rows, ascending; none means that nothing is captured.
        """
        self._library, self._function = library, function
        self._max_rows, self._max_seqs = max_rows, max_seqs
        self._buckets = [bucket for bucket in buckets if bucket < max_rows]
        if buckets and max_rows <= buckets[-1]:
            self._buckets.append(max_rows)
        self._graphs: dict[int, Address] = {}
        self._counts: Tensor = paddle.zeros([2], "int32")
        address = self._counts.data_ptr()
        self._written_counts: tuple[int, int] | None = None
        self._device_counts = DeviceCounts(Address(address), Address(address + 4))

    def replay(self, num_rows: int, num_seqs: int) -> None:
        """Execute the launches for the first num_rows rows and num_seqs sequences."""
        index = bisect_left(self._buckets, num_rows)
        if index == len(self._buckets):
            self._function(num_rows, num_seqs)
            return
        bucket = self._buckets[index]
        graph = self._graphs.get(bucket)
        if graph is None:
            if not self._graphs:
                self._run_without_rows()
            graph = self._graphs[bucket] = self._capture(bucket)
        self._write_counts(num_rows, num_seqs)
        self._library.call("fd_device_graph_launch", graph, self._library.stream)

    def _write_counts(self, num_rows: int, num_seqs: int) -> None:
        if self._written_counts != (num_rows, num_seqs):
            self._library.launch("fd_write_counts", self._counts, num_rows, num_seqs)
            self._written_counts = num_rows, num_seqs

    def _run_without_rows(self) -> None:
        """Let operators allocate what they keep, for all buckets; nothing can be allocated during a capture."""
        self._write_counts(0, 0)
        self._launch_counted(self._buckets[-1])
        self._library.call("fd_device_sync")

    def _launch_counted(self, num_rows: int) -> None:
        with self._library.counted_by(self._device_counts):
            self._function(num_rows, min(num_rows, self._max_seqs))

    def _capture(self, num_rows: int) -> Address:
        library = self._library
        library.call("fd_device_graph_begin", library.stream)
        try:
            self._launch_counted(num_rows)
        finally:
            graph = library.make("fd_device_graph_end", library.stream)
        finalize(self, library.call, "fd_device_graph_free", graph).atexit = False
        return graph
