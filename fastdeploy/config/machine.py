# SPDX-License-Identifier: Apache-2.0
"""Memory and processor of the machine, and whether it has a GPU."""

from __future__ import annotations

import ctypes
import platform
import re
from pathlib import Path

from fastdeploy.config.cgroups import cgroup_available_bytes
from fastdeploy.config.env import read_env
from fastdeploy.config.numa import bound_memory_bytes

GPU_LIBRARY = Path(__file__).parents[1] / "ops" / "gpu_library" / "libfd_gpu.so"


def resolve_device(device: str) -> str:
    """Return the device that a value of `--device` names; `auto` is the GPU if there is one and a library for it.

    The emulated GPU is never chosen by itself.
    """
    if device != "auto":
        return device
    return "gpu" if not read_env().gpu_emulated and count_gpus() > 0 else "cpu"


def count_gpus() -> int:
    """Return the number of GPUs that the library for GPUs can use; 0 without a library."""
    count = ctypes.c_int()
    try:
        failed = ctypes.CDLL(str(GPU_LIBRARY)).fd_device_count(ctypes.byref(count))
    except OSError:
        return 0
    return 0 if failed else count.value


def processor_name() -> str:
    """Return the name of the processor, or its architecture where the kernel does not tell the name."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def available_memory_bytes() -> int:
    """Return the available memory in bytes.

    It is the least of the kernel's MemAvailable, what the limits of the process's control groups leave, and what those
    memory nodes leave to which it is bound. Cached pages of files, such as a checkpoint that was just copied, do not
    count as used.
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    if found is None:
        raise OSError("/proc/meminfo has no MemAvailable")
    available, bound = int(found[1]) * 1024, bound_memory_bytes()
    if bound is not None:
        available = min(available, bound)
    left = cgroup_available_bytes()
    return available if left is None else min(available, left)
