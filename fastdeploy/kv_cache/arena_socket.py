# SPDX-License-Identifier: Apache-2.0
"""An arena behind a Unix socket: whoever connects gets its descriptor, if he runs as the same user."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time

from fastdeploy.kv_cache.arena import Arena, ArenaError, receive_arena, send_arena

FILE_NAME = "arena"
SEND_TIMEOUT_S = 1.0  # never needed by a peer that reads nothing: a descriptor and eight bytes fit any buffer
RETRY_S = 0.5  # after accept has failed, for example because there are no descriptors left

logger = logging.getLogger("fastdeploy.engine")


def arena_file(address: str) -> str:
    """Return the path of the arena's socket, beside the engine's socket of this ZeroMQ address."""
    return f"{os.path.dirname(address.removeprefix('ipc://'))}/{FILE_NAME}"


def serve_arena(arena: Arena, path: str) -> None:
    """Send the arena's descriptor, which can only be read, to everybody who connects, from a thread that never ends.

    Raises:
        OSError: the socket cannot be bound.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener.bind(path)
    listener.listen()
    threading.Thread(target=_serve, args=(arena, listener), name="arena", daemon=True).start()


def open_arena(path: str, timeout_s: float) -> Arena:
    """Connect to the socket of a peer's arena, and map it.

    Args:
        timeout_s: for each answer of the peer.

    Raises:
        ArenaError: the peer runs as another user, has sent something else, or does not answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(path)
            return receive_arena(connection)
        except (OSError, ValueError) as error:  # a path may hold a null byte
            raise ArenaError(f"{path}: {error}") from error


def _serve(arena: Arena, listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            logger.warning("the arena cannot be sent: %s", error)
            time.sleep(RETRY_S)
            continue
        with connection:
            try:
                connection.settimeout(SEND_TIMEOUT_S)
                send_arena(connection, arena)
            except (ArenaError, OSError) as error:
                logger.warning("the arena is not sent: %s", error)
