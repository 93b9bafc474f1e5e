# SPDX-License-Identifier: Apache-2.0
"""A redis-server of a test: with any configuration, and killed, stopped, woken and restarted as the test asks."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import redis

START_TIMEOUT_S = 60.0
DEFAULT_SAVE = "3600 1 300 100 60 10000"  # what redis-server does without a configuration


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """A process that listens on a free port of 127.0.0.1 and on a Unix socket; both stay the same when it restarts.

        with RedisServer(tmp_path, requirepass="secret", maxmemory="3mb") as server: ...

    Without further options nothing is written to disk, so that a restarted server is empty.

    Attributes:
        port, socket: where it listens; there is no plain port if `tls_port` is given.
        log: its output.
    """

    def __init__(self, folder: Path, is_sentinel: bool = False, **options: str | int | Sequence[str]) -> None:
        """Write the configuration; `start`, or the context manager, starts the process.

        Args:
            folder: for the configuration, the log, and the data that survive a restart; made if it is missing.
            is_sentinel: whether it watches other servers, which takes an option like
                `sentinel="monitor main 127.0.0.1 6379 1"`.
            options: directives of redis.conf with `_` for `-`; a sequence repeats the directive. Some of use:
                `requirepass`, `user=["name on >password ~* +@all"]`, `maxmemory`, `appendonly="yes"`,
                `save=DEFAULT_SAVE`, `replicaof="127.0.0.1 6379"`, `cluster_enabled="yes"` with `cluster_port`,
                `tls_port` with `tls_cert_file`, `tls_key_file`, `tls_ca_cert_file` and `tls_auth_clients="no"`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._sockets = Path(tempfile.mkdtemp(prefix="redis."))  # paths of sockets must be short
        self.port = int(str(options.get("tls_port", 0))) or free_port()
        self.socket = self._sockets / "redis"
        self.log = folder / "redis.log"
        self._is_sentinel = is_sentinel
        self._config = folder / "redis.conf"
        self._password = str(options.get("requirepass", ""))
        self._process: subprocess.Popen[bytes] | None = None
        ports = {"port": 0 if "tls_port" in options else self.port}
        common: dict[str, Any] = {"bind": "127.0.0.1", "dir": str(folder), **ports}
        data = {} if is_sentinel else {"unixsocket": str(self.socket), "save": '""', "appendonly": "no"}
        self._config.write_text(_format({**common, **data, **options}))

    @property
    def address(self) -> str:
        """Return the URL for --scheduler-url, without a password."""
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the process, with the data of `folder`, and wait until it answers."""
        command = ["redis-server", str(self._config), *(["--sentinel"] if self._is_sentinel else [])]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"redis-server does not answer: {self.log.read_text()[-2000:]}")
            time.sleep(0.01)

    def stop(self) -> None:
        """End the process by SIGTERM, which saves the data if the configuration says so."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the process by SIGKILL, a stopped one too."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Kill the process and start it again."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Stop the process by SIGSTOP: connections stay open and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Wake a stopped process."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill the process and remove its sockets."""
        self.kill()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def execute(self, *command: str | int | float | bytes) -> Any:
        """Run a command as the default user and return its answer, with bytes for strings."""
        with self.client() as client:
            return client.execute_command(*command)

    def client(self) -> redis.Redis:
        """Return a blocking client of the default user, which needs no TLS."""
        password = self._password or None
        if self._is_sentinel:
            return redis.Redis(port=self.port, password=password)
        return redis.Redis(unix_socket_path=str(self.socket), password=password)

    def _answers(self) -> bool:
        family = socket.AF_INET if self._is_sentinel else socket.AF_UNIX
        try:
            with socket.socket(family, socket.SOCK_STREAM) as connection:
                connection.settimeout(5.0)
                connection.connect(("127.0.0.1", self.port) if self._is_sentinel else str(self.socket))
                connection.sendall(b"PING\r\n")
                answer = connection.recv(64)
        except OSError:
            return False
        return bool(answer) and not answer.startswith(b"-LOADING")

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "the server was not started"
        self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            self._process = None


def _format(options: dict[str, Any]) -> str:
    lines = []
    for name, value in options.items():
        values = [value] if isinstance(value, str | int) else value
        lines += [f"{name.replace('_', '-')} {one}" for one in values]
    return "\n".join(lines) + "\n"
