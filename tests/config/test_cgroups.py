# SPDX-License-Identifier: Apache-2.0
"""The memory limits of control groups and their parents, on fake trees and on real groups where they can be made."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fastdeploy.config import machine
from fastdeploy.config.cgroups import _groups, cgroup_available_bytes

MEBIBYTE = 1 << 20
V1_MOUNT = "35 31 0:32 {} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
V2_MOUNT = "29 23 0:26 {} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID_MOUNT = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
OTHER_MOUNTS = (
    "22 27 0:20 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n33 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup c rw,cpu\n"
)
V1_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
V2_NAMES = ("memory.max", "memory.current", "")
NO_LIMIT = {V1_NAMES: "9223372036854771712", V2_NAMES: "max"}


def make_process(root: Path, memberships: str, mounts: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(memberships)
    (root / "proc/self/mountinfo").write_text(OTHER_MOUNTS + mounts)


def make_group(
    folder: Path, names: tuple[str, str, str], limit: int | None, used: int, inactive: int = 0, active: int = 0
) -> None:
    """Write the files of a group; sizes are in MiB, and None is no limit."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{NO_LIMIT[names] if limit is None else limit * MEBIBYTE}\n")
    (folder / names[1]).write_text(f"{used * MEBIBYTE}\n")
    counters = {"anon": used, f"{names[2]}inactive_file": inactive, f"{names[2]}active_file": active}
    (folder / "memory.stat").write_text("".join(f"{name} {size * MEBIBYTE}\n" for name, size in counters.items()))


@pytest.mark.parametrize(
    ("names", "memberships", "mounts", "folder"),
    [
        (V1_NAMES, "9:name=systemd:/\n4:memory:/a/b\n3:cpu,cpuacct:/x\n", V1_MOUNT.format("/"), "memory"),
        (V1_NAMES, "5:cpuset,memory:/a/b\n0::/\n", V1_MOUNT.format("/") + HYBRID_MOUNT, "memory"),
        (V1_NAMES, "4:memory:/docker/id/a/b\n", V1_MOUNT.format("/docker/id"), "memory"),
        (V2_NAMES, "0::/a/b\n", V2_MOUNT.format("/"), ""),
        (V2_NAMES, "1:name=systemd:/x\n0::/a/b (deleted)\n", V2_MOUNT.format("/"), ""),
        (V2_NAMES, "0::/kube/pod/a/b\n", V2_MOUNT.format("/kube/pod"), ""),
    ],
)
def test_the_smallest_rest_of_a_group_and_its_parents_counts(
    tmp_path: Path, names: tuple[str, str, str], memberships: str, mounts: str, folder: str
) -> None:
    make_process(tmp_path, memberships, mounts)
    top = tmp_path / "sys/fs/cgroup" / folder
    for group in (top, top / "a", top / "a/b"):
        make_group(group, names, None, used=10)
    unlimited = cgroup_available_bytes(tmp_path)
    assert unlimited is None or unlimited > 2**60
    make_group(top / "a", names, 900, used=100)
    assert cgroup_available_bytes(tmp_path) == 800 * MEBIBYTE
    make_group(top / "a/b", names, 4000, used=50)
    assert cgroup_available_bytes(tmp_path) == 800 * MEBIBYTE
    make_group(top / "a/b", names, 500, used=50)
    assert cgroup_available_bytes(tmp_path) == 450 * MEBIBYTE
    make_group(top, names, 1000, used=700)
    assert cgroup_available_bytes(tmp_path) == 300 * MEBIBYTE


@pytest.mark.parametrize("names", [V1_NAMES, V2_NAMES])
def test_cached_files_do_not_count_as_used_memory_of_a_container(tmp_path: Path, names: tuple[str, str, str]) -> None:
    is_v1 = names is V1_NAMES
    make_process(tmp_path, "4:memory:/\n" if is_v1 else "0::/\n", (V1_MOUNT if is_v1 else V2_MOUNT).format("/"))
    top = tmp_path / "sys/fs/cgroup" / ("memory" if is_v1 else "")
    make_group(top, names, 64, used=60, inactive=30, active=9)
    assert cgroup_available_bytes(tmp_path) == 43 * MEBIBYTE
    (top / "memory.stat").unlink()
    assert cgroup_available_bytes(tmp_path) == 4 * MEBIBYTE
    make_group(top, names, 64, used=70)
    assert cgroup_available_bytes(tmp_path) == 0


def test_memory_high_is_a_limit_too(tmp_path: Path) -> None:
    make_process(tmp_path, "0::/a\n", V2_MOUNT.format("/"))
    make_group(tmp_path / "sys/fs/cgroup/a", V2_NAMES, 900, used=100)
    (tmp_path / "sys/fs/cgroup/a/memory.high").write_text(f"{300 * MEBIBYTE}\n")
    assert cgroup_available_bytes(tmp_path) == 200 * MEBIBYTE


@pytest.mark.parametrize("path", ["/", "/../../kube/pod", "/docker/id"])
def test_a_container_whose_path_is_elsewhere_has_its_group_at_the_mount_point(tmp_path: Path, path: str) -> None:
    make_process(tmp_path, f"0::{path}\n", V2_MOUNT.format("/a\\040group"))
    make_group(tmp_path / "sys/fs/cgroup", V2_NAMES, 900, used=100)
    assert cgroup_available_bytes(tmp_path) == 800 * MEBIBYTE


def test_without_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_available_bytes(tmp_path) is None
    make_process(tmp_path, "4:memory:/a\n0::/a\n", "")
    assert cgroup_available_bytes(tmp_path) is None


def test_available_memory_is_what_the_groups_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cgroup_available_bytes", lambda: 7 * MEBIBYTE)
    assert machine.available_memory_bytes() == 7 * MEBIBYTE
    monkeypatch.setattr(machine, "cgroup_available_bytes", lambda: None)
    assert machine.available_memory_bytes() > 7 * MEBIBYTE


@contextmanager
def real_group(limit_bytes: int) -> Iterator[Path]:
    """Make a group with a limit, and in it one without, below the group of this process; return the inner one."""
    found = next(((group, interface) for group, interface in _groups(Path("/"))), None)
    if found is None:
        pytest.skip("no memory controller is mounted")
    outer = found[0] / f"fastdeploy-test-{os.getpid()}"
    try:
        outer.mkdir()
    except OSError as error:
        pytest.skip(f"groups cannot be made here: {error.strerror}")
    inner = outer / "inner"
    try:
        try:
            inner.mkdir()
            (outer / found[1].limits[0]).write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"groups cannot be limited here: {error.strerror}")
        yield inner
    finally:
        for folder in filter(Path.exists, (inner, outer)):
            folder.rmdir()


def test_a_process_sees_the_limit_of_the_parent_of_its_real_group() -> None:
    program = (
        "import os, sys; open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))\n"
        "from fastdeploy.config.machine import available_memory_bytes; print(available_memory_bytes())"
    )
    with real_group(900 * MEBIBYTE) as group:
        output = subprocess.run(
            [sys.executable, "-c", program, group], capture_output=True, text=True, check=True, timeout=120
        )
    assert 700 * MEBIBYTE < int(output.stdout) <= 900 * MEBIBYTE
