# SPDX-License-Identifier: Apache-2.0
"""The folder of a running server: the engine's socket, its heartbeat, and the metrics of API processes."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from fastdeploy.core.errors import ConfigError

PREFIX = "fastdeploy-run-"
SOCKET_NAME = "engine"
MAX_SOCKET_PATH = 107  # bytes, of the kernel's struct sockaddr_un without the final zero
_FALLBACK = "/tmp"
_SUFFIX_LENGTH = 8  # of the names that `mkdtemp` makes


class RuntimeFolder:
    """A folder in the temporary directory that only this user can enter, locked while this process lives.

    The kernel releases the lock when the process ends for any reason. Creating a folder first removes those whose lock
    is free: their servers were killed.

    Attributes:
        path: the folder.
    """

    def __init__(self) -> None:
        """Create and lock the folder, in /tmp if a socket's path in TMPDIR would be too long.

        Raises:
            ConfigError: it cannot be created.
        """
        parent = _choose_parent()
        try:
            _remove_abandoned(parent)
            self.path, self._lock = _create_locked(parent)
        except OSError as error:
            raise ConfigError("TMPDIR", f"cannot create a folder in {parent!r}: {error.strerror}") from None

    def remove(self) -> None:
        """Delete the folder with its contents, then release the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _choose_parent() -> str:
    try:
        parent = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError("TMPDIR", str(error.strerror)) from None
    longest = os.path.join(parent, PREFIX + "x" * _SUFFIX_LENGTH, SOCKET_NAME)
    return parent if len(os.fsencode(longest)) <= MAX_SOCKET_PATH else _FALLBACK


def _create_locked(parent: str) -> tuple[Path, int]:
    """Return a new folder and the descriptor that holds its lock.

    Another server that starts may remove the folder before it is locked; then the next name is tried.
    """
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # only the user may enter it
        lock = _lock(path)
        if lock is not None:
            return path, lock


def _remove_abandoned(parent: str) -> None:
    """Remove the folders of this user that no running server has locked."""
    for path in Path(parent).glob(PREFIX + "*"):
        lock = _lock(path)
        if lock is None:
            continue
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def _lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock of a folder; None if another process holds it or has removed it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(path)  # a process that removes it holds the lock until it is gone
    except (BlockingIOError, FileNotFoundError):
        os.close(descriptor)
        return None
    return descriptor
