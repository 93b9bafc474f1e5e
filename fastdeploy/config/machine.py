# SPDX-License-Identifier: Apache-2.0
"""Memory and processor of the machine, and whether it has a GPU."""

from __future__ import annotations

import ctypes
import platform
import re
from pathlib import Path

from fastdeploy.config.env import read_env
from fastdeploy.config.numa import bound_memory_bytes

_CGROUP = Path("/sys/fs/cgroup")


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

    It is the least of the kernel's MemAvailable, what the cgroup's limit leaves, and what those memory nodes leave to
    which the process is bound. Cached pages of files, such as a checkpoint that was just copied, do not count as used.
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    if found is None:
        raise OSError("/proc/meminfo has no MemAvailable")
    available, bound = int(found[1]) * 1024, bound_memory_bytes()
    if bound is not None:
        available = min(available, bound)
    limit = _read_int(_CGROUP / "memory.max")
    used = _read_int(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used + _cached_file_bytes()))
    return available


def _cached_file_bytes() -> int:
    """Return the bytes of cached files in the cgroup, which the kernel takes back when memory is needed."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counters = dict(line.split() for line in lines)
    return int(counters.get("active_file", 0)) + int(counters.get("inactive_file", 0))


def _read_int(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
