# SPDX-License-Identifier: Apache-2.0
"""Real server processes for tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from fastdeploy.ipc.child import DEFAULT_FACTORY
from tests.drafting_models import speculation
from tests.entrypoints.response_check import check_httpx_response
from tests.mock_engine import FACTORY, save_mock_model

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = (
    f"import sys; sys.path[0] = {str(ROOT)!r}; from fastdeploy.entrypoints.openai.api_server import main; "
    "sys.exit(main(sys.argv[2:], factory=sys.argv[1]))"
)
READY = re.compile(r"^Ready: (https?://\S+)/v1 ", re.MULTILINE)
START_S = 120


class ServerProcess:
    """A server on a free port, or on the Unix socket of `--uds`.

    Attributes:
        url: its address, without /v1; empty before it is ready.
        stdout, stderr: what it has written so far.
    """

    def __init__(
        self, flags: list[str], factory: str = FACTORY, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        place = [] if "--uds" in flags else ["--host", "127.0.0.1", "--port", "0"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, factory, *place, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
            cwd=cwd,
        )
        self.stdout = self.stderr = ""
        self.url = ""
        self._ready = threading.Event()
        self._readers = [
            threading.Thread(target=self._read, args=(name,), daemon=True) for name in ("stdout", "stderr")
        ]
        for reader in self._readers:
            reader.start()

    def wait_ready(self) -> ServerProcess:
        """Wait for the ready line."""
        assert self._ready.wait(START_S), f"not ready: {self.stdout}\n{self.stderr}"
        found = READY.search(self.stdout)
        assert found, f"ended before it was ready: {self.stdout}\n{self.stderr}"
        self.url = found.group(1)
        return self

    def wait_end(self, timeout_s: float = 30) -> int:
        """Wait for the end; return the exit status."""
        status = self.process.wait(timeout_s)
        for reader in self._readers:
            reader.join(5)
        return status

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def engine_pids(self) -> list[int]:
        """Return the process ids of its engine."""
        listed = subprocess.run(
            ["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=False, timeout=120
        )
        return [int(line) for line in listed.stdout.split()]

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        """POST a JSON body, or bytes as they are, and check the response."""
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        response = httpx.post(self.url + path, timeout=60, **content, **kwargs)
        check_httpx_response(response)
        return response

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        """GET, and check the response."""
        response = httpx.get(self.url + path, timeout=60, **kwargs)
        check_httpx_response(response)
        return response

    def close(self) -> None:
        """Kill what is left."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _read(self, name: str) -> None:
        for line in getattr(self.process, name):
            setattr(self, name, getattr(self, name) + line)
            if name == "stdout" and READY.search(self.stdout):
                self._ready.set()
        if name == "stdout":
            self._ready.set()  # ended


def sample(page: str, series: str) -> float | None:
    """Return the value of `NAME` or `NAME{LABEL="...",...}` on a page of metrics; other labels may have any value."""
    name, _, labels = series.partition("{")
    wanted = set(re.findall(r'\w+="[^"]*"', labels))
    for found, value in re.findall(rf"^{re.escape(name)}(\{{.*\}})? (\S+)$", page, re.MULTILINE):
        if wanted <= set(re.findall(r'\w+="[^"]*"', found)):
            return float(value)
    return None


@contextmanager
def mock_server(
    folder: Path, *flags: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, **options: Any
) -> Iterator[ServerProcess]:
    """Run a server with the mock engine, its model in `folder`."""
    server = ServerProcess([str(save_mock_model(folder, **options)), *flags], env=env, cwd=cwd)
    try:
        yield server.wait_ready()
    finally:
        server.close()


@contextmanager
def templateless_server(folder: Path, *flags: str) -> Iterator[ServerProcess]:
    """Run a server with the mock engine, whose model in `folder` has no chat template."""
    config = save_mock_model(folder) / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": None}))
    server = ServerProcess([str(folder), *flags])
    try:
        yield server.wait_ready()
    finally:
        server.close()


@contextmanager
def real_server(*flags: str, env: Mapping[str, str] | None = None) -> Iterator[ServerProcess]:
    """Run a server with the real engine."""
    server = ServerProcess(list(flags), factory=DEFAULT_FACTORY, env=env)
    try:
        yield server.wait_ready()
    finally:
        server.close()


def wait_in_company(server: ServerProcess) -> None:
    """Wait until every API process of a node sees the other node."""
    deadline, num_in_company = time.monotonic() + 60, 0
    while num_in_company < 12:  # connections are spread over the processes by the kernel
        num_in_company = num_in_company + 1 if server.get("/health").json()["cluster"] == "ok" else 0
        assert time.monotonic() < deadline, f"it stays alone: {server.stderr}"
        time.sleep(0.02)


@contextmanager
def node_pair(flags: Mapping[str, list[str]]) -> Iterator[dict[str, ServerProcess]]:
    """Run a node with the real engine per role; begin when each sees another one."""
    started = {role: ServerProcess(given, factory=DEFAULT_FACTORY, cwd=ROOT) for role, given in flags.items()}
    try:
        for server in started.values():
            wait_in_company(server.wait_ready())
        yield started
    finally:
        for server in started.values():
            server.close()


@contextmanager
def speculating_server(method: str) -> Iterator[ServerProcess]:
    """Run the demonstration model with four drafts of a method, and a parser of tool calls."""
    config = speculation(method, **({} if method == "naive" else {"num_speculative_tokens": 4}))
    flags = ("--max-model-len", "512", "--tool-call-parser", "hermes", "--speculative-config", json.dumps(config))
    with real_server("demo", *flags) as running:
        yield running
