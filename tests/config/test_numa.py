# SPDX-License-Identifier: Apache-2.0
"""The free memory of a process that is bound to memory nodes is that of these nodes."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from fastdeploy.config import machine, numa

KIB = 1024
MEMINFO = """Node {node} MemTotal:  9999999 kB
Node {node} MemFree:   {free} kB
Node {node} Active(anon):   5000 kB
Node {node} Active(file):    300 kB
Node {node} Inactive(file):   20 kB
Node {node} SReclaimable:      1 kB
"""


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "online").write_text("0-1\n")
    for node, free in enumerate([7000, 80000]):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "meminfo").write_text(MEMINFO.format(node=node, free=free))
    (tmp_path / "status").write_text("Name:\tpython\nMems_allowed:\t3\nMems_allowed_list:\t0-1\n")
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    monkeypatch.setattr(numa, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(numa, "_policy_nodes", set)
    return tmp_path


def test_process_that_may_use_every_node_has_no_limit(two_nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert numa.bound_memory_bytes() is None
    monkeypatch.setattr(numa, "_policy_nodes", lambda: {0, 1})
    assert numa.bound_memory_bytes() is None


@pytest.mark.parametrize(("node", "expected"), [(0, 7321 * KIB), (1, 80321 * KIB)])
def test_bound_process_has_the_free_memory_and_the_cached_files_of_its_nodes(
    two_nodes: Path, monkeypatch: pytest.MonkeyPatch, node: int, expected: int
) -> None:
    (two_nodes / "status").write_text(f"Mems_allowed_list:\t{node}\n")
    assert numa.bound_memory_bytes() == expected
    (two_nodes / "status").write_text("Mems_allowed_list:\t0-1\n")
    monkeypatch.setattr(numa, "_policy_nodes", lambda: {node})
    assert numa.bound_memory_bytes() == expected
    assert machine.available_memory_bytes() == expected


def test_kernel_without_nodes_has_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "_NODES", tmp_path / "missing")
    assert numa.bound_memory_bytes() is None


def bind_to_node_0() -> tuple[set[int], set[int]]:
    """Return the nodes of the policy before and after this process is bound to node 0, as numactl does it."""
    import ctypes

    before, mask = numa._policy_nodes(), ctypes.c_uint64(1)
    failed = ctypes.CDLL(None).syscall(238, 2, ctypes.byref(mask), ctypes.c_ulong(64))  # set_mempolicy
    return before, {-1} if failed else numa._policy_nodes()


def test_policy_is_read_from_the_kernel() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        before, after = pool.submit(bind_to_node_0).result()
    if after == {-1}:
        pytest.skip("this container may not bind memory")
    assert (before, after) == (set(), {0})


def test_lists_of_nodes_are_read() -> None:
    assert numa._node_list("0-2,5\n") == {0, 1, 2, 5}
    assert numa._node_list("\n") == set()
