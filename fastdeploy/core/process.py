# SPDX-License-Identifier: Apache-2.0
"""What every process of a server sets up for itself: its end with its parent, and the stacks of its threads."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal

_PR_SET_PDEATHSIG = 1
_NO_MEMORY = ("failed to map segment", "annot allocate memory", "can't start new thread", "bad_alloc")
STACKS_SIGNAL = signal.SIGUSR1


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent process ends for any reason."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that this process may not have as much memory as it needs."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, (ImportError, OSError, RuntimeError)) and any(text in str(error) for text in _NO_MEMORY)


def write_stacks_on_signal() -> None:
    """Write the Python stacks of all threads to stderr at SIGUSR1, also while a native call keeps the global lock."""
    faulthandler.register(STACKS_SIGNAL, all_threads=True, chain=False)
