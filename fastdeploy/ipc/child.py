# SPDX-License-Identifier: Apache-2.0
"""Starts and stops the engine process and the agent and reads their logs, in the parent process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.env import child_environment
from fastdeploy.core.child_command import child_command
from fastdeploy.core.process import STACKS_SIGNAL, is_stopped, signal_main_thread
from fastdeploy.metrics.logs import ENGINE_OUTPUT, engine_line

DEFAULT_FACTORY = "fastdeploy.engine.engine_factory:make_engine"
MODULE = "fastdeploy.engine.engine_process"
OWNER = b"owner"  # connection identity of the process that started the engine
AGENT = b"agent."  # beginning of the connection identities of agents
NUM_TAIL_LINES = 40


def agent_identity(process_id: int) -> bytes:
    """Return the connection identity of an agent, which differs from that of the agent before it."""
    return AGENT + str(process_id).encode()


class ChildProcess:
    """A process that reads its configuration from stdin and writes its log to a pipe.

    Attributes:
        tail: the last lines of its log.
    """

    def __init__(
        self,
        command: Sequence[str],
        config: object,
        log_file: Path | None,
        json_log: bool = False,
        is_replacement: bool = False,
        output_logger: str = ENGINE_OUTPUT,
    ) -> None:
        """Prepare to start a process.

        Args:
            command: program and arguments.
            config: what it reads, encoded with msgpack.
            log_file: file that receives the log; None keeps only its last lines in memory.
            json_log: whether it writes its log as JSON documents (FD_LOG_FORMAT).
            is_replacement: whether it follows a process that has died.
            output_logger: logger that the log names for what its libraries print.
        """
        self.tail: deque[str] = deque(maxlen=NUM_TAIL_LINES)
        self._config = config
        self._command = command
        self._log_file = log_file
        self._json_log = json_log
        self._is_replacement = is_replacement
        self._output_logger = output_logger
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process in a session of its own, so that Ctrl-C in the terminal interrupts the server only."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env=child_environment(self._is_replacement),
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.msgpack.encode(self._config))
        self._process.stdin.close()
        self._reader = asyncio.create_task(self._read_log())

    @property
    def is_running(self) -> bool:
        """Return whether the process has started and not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def process_id(self) -> int:
        """Return its process id, also after its end."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        """Return whether a signal such as SIGSTOP keeps the process from running."""
        return is_stopped(self.process_id)

    def write_stacks(self) -> None:
        """Let a running process that hangs write the stacks of all its threads to its log."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):  # it ends at this moment; `wait` reports that
                signal_main_thread(self.process_id, STACKS_SIGNAL)

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)

    async def wait(self) -> int:
        """Wait until the process has ended and its log is read; return the exit status."""
        assert self._process is not None and self._reader is not None
        status = await self._process.wait()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._reader), 1.0)  # a grandchild may hold the pipe open
        return status

    async def stop(self, timeout_s: float) -> None:
        """Wait for the process to end; kill it after `timeout_s` seconds."""
        assert self._process is not None
        try:
            await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _read_log(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(self._log_file.open("ab")) if self._log_file else None
            while True:
                try:
                    line = await self._process.stdout.readline()
                except ValueError:  # the line is longer than the reader's buffer; its rest follows
                    continue
                if not line:
                    return
                text = line.decode("utf-8", errors="replace").rstrip()
                self.tail.append(text)
                log_line, is_shown = engine_line(text, self._json_log, self._output_logger)
                if file is not None:
                    file.write(log_line.encode() + b"\n")
                    file.flush()
                if is_shown:
                    print(log_line, file=sys.stderr, flush=True)


class EngineChild(ChildProcess):
    """The engine process."""

    def __init__(
        self, config: EngineConfig, address: str, factory: str, log_file: Path | None, json_log: bool = False
    ) -> None:
        parent = str(os.getpid())
        command = child_command(MODULE, "--address", address, "--factory", factory, "--parent", parent)
        super().__init__(command, config, log_file, json_log)
