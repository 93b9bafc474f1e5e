# SPDX-License-Identifier: Apache-2.0
"""Memory limits of the control groups (cgroups) that a process is in, of versions 1 and 2 of the interface."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class _Interface:
    """The files of a version of the memory controller.

    Attributes:
        limits: files with limits in bytes; the smallest one counts.
        usage: file with the bytes that the group and its descendants use.
        cached: counters of memory.stat for cached files of the group and its descendants.
    """

    limits: tuple[str, ...]
    usage: str
    cached: tuple[str, ...]


_V1 = _Interface(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_V2 = _Interface(("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file"))


def cgroup_available_bytes(root: Path = Path("/")) -> int | None:
    """Return what the memory limits of the process's groups and of all their parents leave; None without a limit.

    Cached files, which the kernel takes back when memory is needed, count as available.

    Args:
        root: where /proc and the mounted hierarchies are found.
    """
    left = [_left_bytes(group, interface) for group, interface in _groups(root)]
    return min((num_bytes for num_bytes in left if num_bytes is not None), default=None)


def _groups(root: Path) -> Iterator[tuple[Path, _Interface]]:
    """Yield the folder of each memory group of the process and of its parents, as far as they are mounted."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:  # a kernel without control groups
        return
    paths = dict[_Interface, PurePosixPath]()
    for line in memberships:
        _, controllers, group = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            paths[_V1 if controllers else _V2] = PurePosixPath(group.removesuffix(" (deleted)"))
    for line in mounts:
        interface, mounted_group, point = _read_mount(line)
        if interface is not None and (path := paths.get(interface)) is not None:
            for relative in _lineage(path, mounted_group):
                yield root / point.relative_to("/") / relative, interface


def _read_mount(line: str) -> tuple[_Interface | None, PurePosixPath, PurePosixPath]:
    """Return the interface of a mounted hierarchy, the group at its root, and its mount point; no interface if other.

    Args:
        line: of /proc/self/mountinfo, see proc(5).
    """
    before, _, after = line.partition(" - ")
    mounted_group, point = map(_unescape, before.split()[3:5])
    kind, _, options = after.split()[:3]
    is_v1 = kind == "cgroup" and "memory" in options.split(",")
    interface = _V1 if is_v1 else _V2 if kind == "cgroup2" else None
    return interface, PurePosixPath(mounted_group), PurePosixPath(point)


def _unescape(field: str) -> str:
    """Return a path of mountinfo, which writes spaces and backslashes as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def _lineage(path: PurePosixPath, mounted_group: PurePosixPath) -> list[PurePosixPath]:
    """Return a group and its parents, relative to the mount point.

    A container may see its own group at the mount point, whatever the path says that the kernel shows.
    """
    is_inside = path.is_relative_to(mounted_group) and ".." not in path.parts
    group = path.relative_to(mounted_group) if is_inside else PurePosixPath()
    return [group, *group.parents]


def _left_bytes(group: Path, interface: _Interface) -> int | None:
    """Return what the limit of one group leaves; None if it has none."""
    limits = [limit for name in interface.limits if (limit := _read_int(group / name)) is not None]
    used = _read_int(group / interface.usage)
    if not limits or used is None:
        return None
    return max(0, min(limits) - used + _cached_bytes(group, interface))


def _cached_bytes(group: Path, interface: _Interface) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counters = dict(line.split(" ", 1) for line in lines)
    return sum(int(counters.get(name, 0)) for name in interface.cached)


def _read_int(file: Path) -> int | None:
    """Return a number from a file; None without the file, or if it says `max`."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
