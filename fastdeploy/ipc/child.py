# SPDX-License-Identifier: Apache-2.0
"""The engine's process, seen from its parent: started, listened to, ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import deque
from pathlib import Path

import msgspec

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.core.child_command import child_command
from fastdeploy.metrics.logs import engine_line

DEFAULT_FACTORY = "fastdeploy.engine.engine_factory:make_engine"
MODULE = "fastdeploy.engine.engine_process"
OWNER = b"owner"  # identity of the connection of the process that starts the engine
NUM_TAIL_LINES = 40


class EngineChild:
    """One engine process. Its configuration goes in through stdin, its log comes out through a pipe.

    Attributes:
        tail: the last lines it wrote.
    """

    def __init__(
        self, config: EngineConfig, address: str, factory: str, log_file: Path | None, json_log: bool = False
    ) -> None:
        self.tail: deque[str] = deque(maxlen=NUM_TAIL_LINES)
        self._config = config
        parent = str(os.getpid())
        self._command = child_command(MODULE, "--address", address, "--factory", factory, "--parent", parent)
        self._log_file = log_file
        self._json_log = json_log
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process in a session of its own: a Ctrl-C in the terminal is the server's to handle."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.msgpack.encode(self._config))
        self._process.stdin.close()
        self._reader = asyncio.create_task(self._read_log())

    @property
    def is_running(self) -> bool:
        """True between start and end."""
        return self._process is not None and self._process.returncode is None

    async def wait(self) -> int:
        """Return the exit status once the process has ended and its log is read."""
        assert self._process is not None and self._reader is not None
        status = await self._process.wait()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._reader), 1.0)  # a grandchild may hold the pipe open
        return status

    async def stop(self, patience_s: float) -> None:
        """Wait for the process to end; kill it when it takes longer than `patience_s` seconds."""
        assert self._process is not None
        try:
            await asyncio.wait_for(self._process.wait(), patience_s)
        except asyncio.TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _read_log(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(self._log_file.open("ab")) if self._log_file else None
            while True:
                try:
                    line = await self._process.stdout.readline()
                except ValueError:  # longer than the reader's buffer; the rest of it follows
                    continue
                if not line:
                    return
                text = line.decode("utf-8", errors="replace").rstrip()
                self.tail.append(text)
                kept, is_shown = engine_line(text, self._json_log)
                if file is not None:
                    file.write(kept.encode() + b"\n")
                    file.flush()
                if is_shown:
                    print(kept, file=sys.stderr, flush=True)
