# SPDX-License-Identifier: Apache-2.0
"""What a GPU can do at most, measured with kernels of their own: copies, and products of matrices in registers."""

from __future__ import annotations

import time

import paddle

from fastdeploy.ops.backends.gpu.library import Argument, DeviceLibrary

_OPS_PER_STEP = 8 * 8 * 2 * 16 * 8 * 16  # of a block of fd_multiply_registers: warps, products, additions and sizes
_THREADS = 256  # of a block
_NUM_RUNS = 5


def copied_bytes_per_second(library: DeviceLibrary, num_bytes: int) -> float:
    """Return how many bytes are read, and as many written, per second: twice the bytes of a copy."""
    source, target = paddle.zeros([num_bytes], "uint8"), paddle.zeros([num_bytes], "uint8")
    num_blocks = library.properties().num_multiprocessors * 8
    library.call("fd_device_sync")
    return 2 * num_bytes / _best_time(library, "fd_copy_chunks", source, target, num_bytes // 16, num_blocks)


def products_per_second(library: DeviceLibrary, num_steps: int) -> float:
    """Return how many operations on bfloat16 matrices are done per second; a multiplication and an addition are two."""
    num_blocks = library.properties().num_multiprocessors * 4
    sums = paddle.zeros([num_blocks * _THREADS], "float32")
    library.call("fd_device_sync")
    seconds = _best_time(library, "fd_multiply_registers", sums, num_blocks, num_steps)
    return num_blocks * num_steps * _OPS_PER_STEP / seconds


def _best_time(library: DeviceLibrary, name: str, *arguments: Argument) -> float:
    """Return the seconds of the fastest of some calls of an operator, the first of which does not count."""
    seconds = []
    for _ in range(1 + _NUM_RUNS):
        begin = time.perf_counter()
        library.launch(name, *arguments)
        library.call("fd_device_stream_sync", library.stream)
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])
