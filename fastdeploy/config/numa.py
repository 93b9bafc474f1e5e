# SPDX-License-Identifier: Apache-2.0
"""Memory nodes (NUMA) to which a process is bound, and what they have left."""

from __future__ import annotations

import ctypes
import platform
import re
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
_STATUS = Path("/proc/self/status")
_MAX_NODES = 1024  # of the kernel
_BIND = 2  # MPOL_BIND: memory comes from the nodes of the mask or from nowhere; other policies fall back to all nodes
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_AVAILABLE = ("MemFree", r"Active\(file\)", r"Inactive\(file\)", "SReclaimable")


def bound_memory_bytes() -> int | None:
    """Return the available bytes of the memory nodes that the process may use; None if it may use every node.

    A process is bound by `numactl --membind`, or by the memory nodes of its cpuset.
    """
    try:
        online = _node_list((_NODES / "online").read_text())
        cpuset = re.search(r"^Mems_allowed_list:\s*(\S+)", _STATUS.read_text(), re.MULTILINE)
        allowed = online & _node_list(cpuset[1]) if cpuset else online
        allowed &= _policy_nodes() or online
        return None if allowed == online else sum(map(_available_bytes, allowed))
    except OSError:  # a kernel without memory nodes
        return None


def _available_bytes(node: int) -> int:
    text = (_NODES / f"node{node}" / "meminfo").read_text()
    return 1024 * sum(int(found) for key in _AVAILABLE for found in re.findall(rf"{key}:\s+(\d+) kB", text))


def _policy_nodes() -> set[int]:
    """Return the nodes to which `numactl --membind` binds the calling thread; none if it is not bound."""
    number = _GET_MEMPOLICY.get(platform.machine())
    mode, mask = ctypes.c_int(), (ctypes.c_uint64 * (_MAX_NODES // 64))()
    # Containers may forbid the call. They cannot use numactl either, only a cpuset.
    if number is None or ctypes.CDLL(None).syscall(
        number, ctypes.byref(mode), mask, ctypes.c_ulong(_MAX_NODES), None, ctypes.c_ulong(0)
    ):
        return set()
    if mode.value & 0xFF != _BIND:  # the upper bits are flags
        return set()
    return {node for node in range(_MAX_NODES) if mask[node // 64] >> node % 64 & 1}


def _node_list(text: str) -> set[int]:
    """Return the numbers of a list in the notation of the kernel, such as 0-1,3."""
    nodes = set[int]()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        nodes.update(range(int(first), int(last or first) + 1))
    return nodes
