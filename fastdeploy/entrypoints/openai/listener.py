# SPDX-License-Identifier: Apache-2.0
"""The socket on which the server accepts connections: a TCP port, or a Unix socket."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

from fastdeploy.config.server_config import ServerConfig
from fastdeploy.core.errors import ConfigError

BACKLOG = 2048


@contextlib.contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    """Listen until the block ends, and then remove the file of a Unix socket.

    Raises:
        ConfigError: the port or the Unix socket is in use, or the address is not one of this machine.
    """
    if not config.uds:
        yield _bind_port(config)
        return
    listener = _bind_path(config.uds)
    try:
        yield listener
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(config.uds)


def url(config: ServerConfig, listener: socket.socket) -> str:
    """Return the URL of the server for clients on this machine."""
    scheme = "https" if config.ssl_certfile else "http"
    if config.uds:
        return f"{scheme}://localhost{config.root_path}"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.host, config.host)
    return f"{scheme}://{host}:{listener.getsockname()[1]}{config.root_path}"


def _bind_port(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(BACKLOG)
    except socket.gaierror as error:
        listener.close()
        raise ConfigError("--host", f"{config.host!r} is not an address of this machine: {error.strerror}") from None
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ConfigError("--port", f"cannot listen on port {config.port} of {config.host}: {reason}") from None
    listener.setblocking(False)
    return listener


def _bind_path(path: str) -> socket.socket:
    """Return a Unix socket; one that a server has left behind is replaced."""
    if _is_abandoned(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError("--uds", f"cannot listen on {path!r}: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener


def _is_abandoned(path: str) -> bool:
    """Return whether a path is a Unix socket on which nobody listens."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(path)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
