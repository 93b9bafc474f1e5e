# SPDX-License-Identifier: Apache-2.0
"""Servers that are started with closed standard streams, or without enough descriptors."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.entrypoints.server_process import LAUNCHER
from tests.mock_engine import FACTORY, save_mock_model

COMPLETION = {"model": "default", "prompt": "the", "max_tokens": 5, "seed": 1}


def test_too_few_open_files_are_one_line_and_status_2(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LAUNCHER, FACTORY, str(save_mock_model(tmp_path)), "--port", "0"]
    shell = ["bash", "-c", 'ulimit -n 24; exec "$@"', "bash"]
    done = subprocess.run([*shell, *command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == "fastdeploy: error: ulimit -n: expected a limit of at least 128 open files, got 24\n"


@pytest.mark.parametrize(("closed", "flags"), [("1", []), ("012", ["--workers", "2"])])
def test_a_server_with_closed_streams_serves_and_drains(tmp_path: Path, closed: str, flags: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-c", LAUNCHER, FACTORY, str(save_mock_model(tmp_path)), "--port", str(port), *flags]
    shell = ["bash", "-c", " ".join(['exec "$@"', *(f"{number}>&-" for number in closed)]), "bash"]
    files = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*shell, *command], **files)
    try:
        wait_healthy(process, port)
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=COMPLETION, timeout=30)
        assert answer.status_code == 200
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def wait_healthy(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return
        time.sleep(0.02)
    pytest.fail(f"the server does not answer; its status is {process.poll()}")
