# SPDX-License-Identifier: Apache-2.0
"""The folder of a running server: who may enter it, where it is, and when it is removed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fastdeploy.core.errors import ConfigError
from fastdeploy.ipc.runtime_folder import MAX_SOCKET_PATH, PREFIX, SOCKET_NAME, RuntimeFolder

HOLDER = (
    "import time; from fastdeploy.ipc.runtime_folder import RuntimeFolder; "
    "folder = RuntimeFolder(); print(folder.path, flush=True); time.sleep(600)"
)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder that is TMPDIR of this process and its children."""
    folder = tmp_path / "t"
    folder.mkdir()
    use_as_tmpdir(folder, monkeypatch)
    return folder


def use_as_tmpdir(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)


def start_holder() -> tuple[subprocess.Popen[str], Path]:
    """Start a process that has a folder; return it and the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_only_its_user_may_enter_the_folder(temporary: Path) -> None:
    folder = RuntimeFolder()
    assert folder.path.parent == temporary
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    assert list(temporary.iterdir()) == []


def test_folder_of_a_killed_server_is_removed_at_the_next_start_and_that_of_a_running_one_is_not(
    temporary: Path,
) -> None:
    processes, folders = zip(start_holder(), start_holder(), strict=True)
    (folders[0] / "metrics").mkdir()
    (folders[0] / "metrics" / "file").touch()
    processes[0].kill()
    processes[0].wait()
    assert folders[0].exists(), "a killed process cannot clean up"
    mine = RuntimeFolder()
    assert sorted(temporary.iterdir()) == sorted([mine.path, folders[1]])
    mine.remove()
    processes[1].kill()
    processes[1].wait()


def test_other_files_with_such_names_stay(temporary: Path) -> None:
    target = temporary / "target"
    target.mkdir()
    (temporary / f"{PREFIX}link").symlink_to(target)
    (temporary / f"{PREFIX}file").touch()
    (temporary / "fastdeploy-abcdefgh").mkdir()
    RuntimeFolder().remove()
    assert sorted(path.name for path in temporary.iterdir()) == [
        "fastdeploy-abcdefgh",
        f"{PREFIX}file",
        f"{PREFIX}link",
        "target",
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_folders_of_other_users_stay(temporary: Path) -> None:
    foreign = temporary / f"{PREFIX}foreign"
    foreign.mkdir()
    os.chown(foreign, 12345, -1)
    RuntimeFolder().remove()
    assert foreign.exists()


def test_servers_that_start_and_are_killed_at_the_same_time_keep_their_own_folders(temporary: Path) -> None:
    """Each start looks for abandoned folders while others have just made theirs."""
    chance, running = random.Random(1), list[tuple[subprocess.Popen[str], Path]]()
    for _ in range(4):
        started = [
            subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) for _ in range(4)
        ]
        running += [(process, Path(process.stdout.readline().strip())) for process in started if process.stdout]
        for process, _folder in chance.sample(running, 2):
            process.send_signal(signal.SIGKILL)
            process.wait()
        running = [(process, folder) for process, folder in running if process.returncode is None]
        assert all(folder.is_dir() for _, folder in running)
    RuntimeFolder().remove()
    assert sorted(temporary.iterdir()) == sorted(folder for _, folder in running)
    for process, _folder in running:
        process.kill()
        process.wait()


def test_a_long_tmpdir_is_not_used_for_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longest_parent = MAX_SOCKET_PATH - len(f"/{PREFIX}xxxxxxxx/{SOCKET_NAME}")
    for length, is_used in ((longest_parent, True), (longest_parent + 1, False), (120, False)):
        folder = tmp_path / ("x" * (length - len(str(tmp_path)) - 1))
        folder.mkdir()
        use_as_tmpdir(folder, monkeypatch)
        made = RuntimeFolder()
        assert made.path.parent == (folder if is_used else Path("/tmp"))
        made.remove()


def test_a_tmpdir_without_space_for_a_folder_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/missing")
    with pytest.raises(ConfigError, match=r"^TMPDIR: cannot create a folder in '/missing': No such file or directory"):
        RuntimeFolder()
