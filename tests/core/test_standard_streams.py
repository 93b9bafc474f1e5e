# SPDX-License-Identifier: Apache-2.0
"""Processes that are started with closed standard streams."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fastdeploy.core.child_command import child_command

CLOSED = [closed for count in (1, 2, 3) for closed in itertools.combinations(range(3), count)]
MODULE = """
import json, os, subprocess, sys

if not sys.flags.safe_path:
    from fastdeploy.core.standard_streams import open_standard_streams
    open_standard_streams()
names = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
child = subprocess.run(["readlink", *(f"/proc/self/fd/{number}" for number in range(3))], stdout=subprocess.PIPE)
opened = os.open("/proc/self/status", os.O_RDONLY)
print("out")
print("error", file=sys.stderr)
sys.stdin.read()
sys.stdout.flush()
with open(sys.argv[-1], "w") as file:
    json.dump([names, child.stdout.decode().split(), opened], file)
"""


def closing(closed: tuple[int, ...], *command: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command without these descriptors; the others are pipes or /dev/null."""
    shell = " ".join(["exec", '"$@"', *(f"{number}>&-" for number in closed)])
    return subprocess.run(
        ["bash", "-c", shell, "bash", *command], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )


@pytest.mark.parametrize("closed", CLOSED)
@pytest.mark.parametrize("is_child", [False, True])
def test_closed_streams_are_dev_null_also_for_children(tmp_path: Path, closed: tuple[int, ...], is_child: bool) -> None:
    """A child process of a server is not asked to open them: its command does so first."""
    (tmp_path / "module.py").write_text(MODULE if not is_child else MODULE.replace("not sys.flags.safe_path", "False"))
    result = tmp_path / "result"
    command = [sys.executable, str(tmp_path / "module.py")]
    if is_child:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(tmp_path)
            command = child_command("module")
    done = closing(closed, *command, str(result))
    assert done.returncode == 0, done.stderr
    names, of_child, opened = json.loads(result.read_text())
    assert opened > 2
    for number in closed:
        assert names[number] == "/dev/null"
    assert of_child[2] == names[2]
    assert (done.stdout, done.stderr) == (b"" if 1 in closed else b"out\n", b"" if 2 in closed else b"error\n")
