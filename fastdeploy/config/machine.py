# SPDX-License-Identifier: Apache-2.0
"""What the machine has to give."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_memory_bytes() -> int:
    """Return the memory that can still be taken: the kernel's MemAvailable, or what the cgroup leaves if less."""
    available = _meminfo("MemAvailable")
    limit = _read_int(_CGROUP / "memory.max")
    used = _read_int(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, rest = line.partition(":")
        if key == name:
            return int(rest.split()[0]) * 1024
    raise OSError(f"/proc/meminfo has no {name}")


def _read_int(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
