# SPDX-License-Identifier: Apache-2.0
"""What every process of a server sets up for itself: its end with its parent, and the stacks of its threads."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal

_PR_SET_PDEATHSIG = 1
STACKS_SIGNAL = signal.SIGUSR1


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent process ends for any reason."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def write_stacks_on_signal() -> None:
    """Write the Python stacks of all threads to stderr at SIGUSR1, also while a native call keeps the global lock."""
    faulthandler.register(STACKS_SIGNAL, all_threads=True, chain=False)
