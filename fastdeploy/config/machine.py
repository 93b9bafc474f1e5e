# SPDX-License-Identifier: Apache-2.0
"""Memory of the machine."""

from __future__ import annotations

import re
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_memory_bytes() -> int:
    """Return the available memory in bytes: the kernel's MemAvailable, or what the cgroup leaves if that is less."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    if found is None:
        raise OSError("/proc/meminfo has no MemAvailable")
    available = int(found[1]) * 1024
    limit = _read_int(_CGROUP / "memory.max")
    used = _read_int(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def _read_int(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
