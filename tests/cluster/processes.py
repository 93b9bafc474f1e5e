# SPDX-License-Identifier: Apache-2.0
"""The processes of a server, found in /proc: which there are, and what they keep open."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

MODULES = {"engine": "engine.engine_process", "agent": "scheduler.agent_process", "worker": "openai.api_worker"}
"""Kind of a child process -> part of its command line."""
Identity = tuple[int, str]


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, those that are not yet reaped included."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for one in found:
        found += children(one)
    return found


def kind(pid: int) -> str:
    """Return which kind of MODULES a process is; "" for another one, or one that has ended."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
    return next((name for name, module in MODULES.items() if module in command), "")


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name; [] if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def state(pid: int) -> str:
    """Return the state of a process as in /proc: R, S, D, T (stopped) or Z; "" if it is gone."""
    return (_stat(pid) or [""])[0]


def is_alive(pid: int) -> bool:
    """Return whether a process has not ended."""
    return state(pid) not in ("", "Z", "X")


def identity(pid: int) -> Identity:
    """Return what no other process has, because ids are used again: the id and when the process was started."""
    return pid, (_stat(pid) or [""] * 20)[19]


def still_runs(process: Identity) -> bool:
    """Return whether this very process has not ended."""
    return is_alive(process[0]) and identity(process[0]) == process


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to those processes that still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def num_sockets(pid: int) -> int:
    """Return how many sockets a process has open; 0 if it is gone."""
    try:
        return sum(os.readlink(link).startswith("socket:") for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return 0


def memory_files(pid: int) -> set[str]:
    """Return the shared memory files that a process has open or mapped, each with its inode."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(descriptor).startswith("/memfd:"):
                    found.add(str(descriptor.stat().st_ino))
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/memfd:" in line:
                found.add(line.split()[4])
    return found


def num_descriptors(pid: int) -> int:
    """Return how many files and sockets a process has open; 0 if it has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0
