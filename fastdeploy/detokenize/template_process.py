# SPDX-License-Identifier: Apache-2.0
"""Renders templates that clients send in a process of their own, which its limits end if they do not end.

A sandbox keeps a template from reaching what it should not; it does not keep `{% for %}` within `{% for %}` from
running for days, nor `'x' * 10**10` from taking all memory. The process takes one JSON line per rendering and answers
with one.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from fastdeploy.core.child_command import child_command
from fastdeploy.core.errors import InvalidRequestError, QueueFullError
from fastdeploy.detokenize.chat_template import Messages, render_source

MAX_CPU_S = 2.0
MAX_MEMORY_BYTES = 512 * 2**20
MAX_TEXT_LENGTH = 16 * 2**20
MAX_SOURCE_LENGTH = 2**20
MAX_WAIT_S = 10.0
KEPT_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "TZ")  # keys and passwords stay out of a template's reach


class TemplateProcess:
    """The process, started when it is first needed and again after a template has killed it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, source: str, messages: Messages, names: Mapping[str, Any]) -> str:
        """Render as `render_source` does, within the limits.

        Raises:
            InvalidRequestError: as `render_source`, or a limit was met.
            QueueFullError: other templates have kept the process busy for `MAX_WAIT_S` seconds.
        """
        if len(source) > MAX_SOURCE_LENGTH:
            raise InvalidRequestError("chat_template", f"expected at most {MAX_SOURCE_LENGTH} characters")
        line = json.dumps([source, messages, names]).encode() + b"\n"
        if not self._lock.acquire(timeout=MAX_WAIT_S):
            raise QueueFullError("too many templates are being rendered")
        try:
            answer = self._ask(line)
        finally:
            self._lock.release()
        if "text" in answer:
            return str(answer["text"])
        raise InvalidRequestError(answer["field"], answer["message"])

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ask(self, line: bytes) -> dict[str, str]:
        if self._process is None:
            self._process = _start()
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if answer:
            return dict(json.loads(answer))
        self.close()
        return {
            "field": "chat_template",
            "message": f"takes more than {MAX_CPU_S:g} s of processor time or {MAX_MEMORY_BYTES >> 20} MiB",
        }


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        child_command("fastdeploy.detokenize.template_process"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
        start_new_session=True,  # Ctrl-C is for the server
    )


def main() -> None:
    """Answer lines of standard input until it is closed.

    The timer ends the process whatever Python is doing; a MemoryError ends it too, and what it has kept with it.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        answer = json.dumps(_answer(line)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)  # reading the next line is not a template's work
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


def _answer(line: bytes) -> dict[str, str]:
    try:
        text = render_source(*json.loads(line))
    except InvalidRequestError as error:
        return {"field": error.field, "message": error.message}
    if len(text) > MAX_TEXT_LENGTH:
        return {"field": "chat_template", "message": f"renders more than {MAX_TEXT_LENGTH >> 20} Mi characters"}
    return {"text": text}


if __name__ == "__main__":
    main()
