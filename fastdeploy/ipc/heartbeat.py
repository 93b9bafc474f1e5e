# SPDX-License-Identifier: Apache-2.0
"""Whether the engine process runs: it sets the time of a file twice per second, and API processes read it."""

from __future__ import annotations

import os
import threading
import time

INTERVAL_S = 0.5
STALLED_S = 10.0
FILE_NAME = "heartbeat"


def start_heartbeat(address: str) -> None:
    """Start a thread that beats until the process ends, in the folder of the engine's socket.

    The modification time of the file is the monotonic clock, which all processes of a machine share and nobody sets.
    The thread cannot beat while the process is stopped, or while another thread keeps Python's global lock.
    """
    file = heartbeat_file(address)
    open(file, "wb").close()
    _beat(file)
    threading.Thread(target=_beat_forever, args=(file,), name="heartbeat", daemon=True).start()


def _beat_forever(file: str) -> None:
    while True:
        time.sleep(INTERVAL_S)
        try:
            _beat(file)
        except FileNotFoundError:  # the server has removed its folder, because it ends
            return


def _beat(file: str) -> None:
    now_ns = time.monotonic_ns()
    os.utime(file, ns=(now_ns, now_ns))


def heartbeat_file(address: str) -> str:
    """Return the file beside the engine's socket."""
    return f"{os.path.dirname(address.removeprefix('ipc://'))}/{FILE_NAME}"


def silent_s(file: str) -> float:
    """Return the seconds since the last beat; 0 before the first one and after the folder is removed."""
    try:
        beat_ns = os.stat(file).st_mtime_ns
    except FileNotFoundError:
        return 0.0
    return (time.monotonic_ns() - beat_ns) / 1e9
