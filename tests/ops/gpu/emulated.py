# SPDX-License-Identifier: Apache-2.0
"""Calls GPU operators in the test process, on host memory: the emulated library, with checks or fast."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import paddle

from fastdeploy.ops import registry
from fastdeploy.ops.backends.gpu import plugin
from fastdeploy.ops.backends.gpu.backend import GpuBackend
from fastdeploy.ops.backends.gpu.library import Address, DeviceCounts, DeviceLibrary, activate, active

SEEDS = range(4)  # orders of blocks and threads; a result has the same bits in all of them
COUNTERS = (
    *("launches", "blocks", "barriers", "mma", "global_read_bytes", "global_written_bytes"),
    *("read_sectors", "written_sectors", "matrix_wavefronts", "least_matrix_wavefronts"),
    *("shared_wavefronts", "least_shared_wavefronts"),
)


@cache
def load(has_checks: bool) -> DeviceLibrary:
    """Build, if needed, and load a library."""
    return DeviceLibrary(plugin.build_emulated(has_checks))


def emulate(seed: int = 0, has_checks: bool = True) -> Callable[[str], Callable[..., Any]]:
    """Let the operators that are called next run in an order; return how to find operators, as examples take it.

    Those without a kernel are references, as in the engine.

    Args:
        has_checks: compare every access with those before it; without, large inputs take a quarter of the time.
    """
    library = load(has_checks)
    activate(library)
    library.call_void("fd_emulation_configure", seed, has_checks)
    return lambda name: GpuBackend.kernels.get(name) or registry.entries()[name].reference


@contextmanager
def counts_on_device(num_rows: int, num_seqs: int) -> Iterator[None]:
    """Let operators read how many rows and sequences there are from memory, as in a graph captured for more."""
    counts = paddle.to_tensor([num_rows, num_seqs], dtype="int32")
    address = counts.data_ptr()
    with active().counted_by(DeviceCounts(Address(address), Address(address + 4))):
        yield


def count(call: Callable[[], object]) -> dict[str, int]:
    """Return what the emulator counts during a call, with checks."""
    library = load(True)
    library.call_void("fd_emulation_reset_counters")
    library.call_void("fd_emulation_count_accesses", 1)
    try:
        call()
    finally:
        library.call_void("fd_emulation_count_accesses", 0)
    return read_counters(library)


def read_counters(library: DeviceLibrary) -> dict[str, int]:
    """Return what the emulator has counted since its counters were reset."""
    values = (ctypes.c_int64 * len(COUNTERS))()
    library.call_void("fd_emulation_counters", values, len(values))
    return dict(zip(COUNTERS, values))
