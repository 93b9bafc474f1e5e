# SPDX-License-Identifier: Apache-2.0
"""A worker, seen from the command that starts it: a process that answers JSON lines (protocol.py)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]


class WorkerProcess:
    """An engine in a process of its own.

    Attributes:
        ready: what it said when it was loaded.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the command and wait until its engine is loaded.

        Raises:
            SystemExit: the process ended.
        """
        self._command = " ".join(command)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **environment},
        )
        self.ready = self._receive()

    def ask(self, job: Message) -> Message:
        """Return the answer to a job.

        Raises:
            SystemExit: the process ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._receive()

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _receive(self) -> Message:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the worker {self._command} ended with status {self._process.wait()}")
        message: Message = json.loads(line)
        return message
