# SPDX-License-Identifier: Apache-2.0
"""A server of one's own for the time of a command: the same process that `fastdeploy serve` starts."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import IO

from fastdeploy.config.env import API_KEY_VARIABLE
from fastdeploy.core.child_command import child_command
from fastdeploy.core.errors import ConfigError
from fastdeploy.entrypoints.cli.http_client import HttpClient

READY = re.compile(r"Ready: (\S+) ")
STOP_S = 30


class ServerEndedError(Exception):
    """The server ended before it was ready.

    Attributes:
        status: its exit status.
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"the server ended with status {status} before it was ready")
        self.status = status


@contextlib.contextmanager
def local_server(flags: Sequence[str]) -> Iterator[HttpClient]:
    """Run `fastdeploy serve` on a free local port with a key that only this process knows; what it says goes to stderr.

    Raises:
        ServerEndedError: it has said on stderr why it could not start.
    """
    key = secrets.token_hex(16)
    command = child_command("fastdeploy.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", "0")
    environment = {**os.environ, API_KEY_VARIABLE: key}
    process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield HttpClient(_wait_ready(process, process.stdout), key)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def refuse_network_flags(given: Sequence[str]) -> None:
    """Raise ConfigError for flags that say where a server listens: this one is nobody else's."""
    for name in given:
        if name in ("host", "port", "api_key", "metrics_port", "root_path", "ssl_keyfile", "ssl_certfile"):
            raise ConfigError(
                f"--{name.replace('_', '-')}", "this command's server is its own; --url names a running one"
            )


def _wait_ready(process: subprocess.Popen[str], output: IO[str]) -> str:
    for line in output:
        print(line, end="", file=sys.stderr, flush=True)
        if found := READY.match(line):
            threading.Thread(target=_pass_on, args=(output,), daemon=True).start()
            return found.group(1)
    raise ServerEndedError(process.wait())


def _pass_on(output: IO[str]) -> None:
    for line in output:
        print(line, end="", file=sys.stderr, flush=True)
