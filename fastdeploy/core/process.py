# SPDX-License-Identifier: Apache-2.0
"""What every process of a server sets up for itself: its end with its parent, and the stacks of its threads."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
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


def memory_bytes() -> tuple[int, int]:
    """Return the size of the address space of this process and its resident part."""
    with open("/proc/self/statm") as file:
        address_space, resident = map(int, file.read().split()[:2])
    return address_space * resource.getpagesize(), resident * resource.getpagesize()


def is_stopped(process_id: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger; False when there is no such process."""
    try:
        with open(f"/proc/{process_id}/stat", "rb") as file:
            state = file.read().rpartition(b") ")[2][:1]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state in (b"T", b"t")


def signal_main_thread(process_id: int, number: int) -> None:
    """Send a signal that the main thread of a process handles, and no other thread.

    Raises:
        ProcessLookupError: there is no such process.
        PermissionError: it belongs to another user.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.tgkill(process_id, process_id, number) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{os.strerror(error)}: process {process_id}")


def write_stacks_on_signal() -> None:
    """Write the Python stacks of all threads to stderr at SIGUSR1, also while a native call keeps the global lock.

    The handler reads the frames of the other threads without the global lock. It is safe where no other thread runs
    Python code meanwhile: in the main thread of a process that runs or hangs. A stopped process that continues may
    handle the signal in any thread while the main thread already runs, which has crashed engines.
    """
    faulthandler.register(STACKS_SIGNAL, all_threads=True, chain=False)
