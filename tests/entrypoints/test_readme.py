# SPDX-License-Identifier: Apache-2.0
"""The first request of the README and the snippet of the quickstart run as they stand.

A folder `smollm2`, which is the demonstration model, stands for the model that would be downloaded.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.ipc.child import DEFAULT_FACTORY
from tests.entrypoints.server_process import ROOT, ServerProcess

SECTION = (ROOT / "README.md").read_text().split("## A first request")[1].split("\n## ")[0]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)
SERVE, CURL, CLIENT, OFFLINE = (text for _, text in BLOCKS)
ADDRESS = "http://localhost:8000"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("readme")
    (made / "smollm2").symlink_to(resolve_model_path("demo"))
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    program, command, *flags = shlex.split(SERVE)
    assert (program, command) == ("fastdeploy", "serve") and flags[1:3] == ["--port", "8000"]
    started = ServerProcess([*flags, "--port", "0"], factory=DEFAULT_FACTORY, cwd=folder)
    try:
        yield started.wait_ready()
    finally:
        started.close()


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_curl_gets_an_answer(server: ServerProcess, folder: Path) -> None:
    assert re.search(
        r'"role":"assistant","content":"[^"]', run(["bash", "-c", CURL.replace(ADDRESS, server.url)], folder)
    )


def test_the_official_client_gets_an_answer(server: ServerProcess, folder: Path) -> None:
    assert run([sys.executable, "-c", CLIENT.replace(ADDRESS, server.url)], folder).strip()


def test_the_snippets_without_a_server_print_answers(folder: Path) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guide/quickstart.md").read_text(), re.DOTALL)
    assert "SpeculateMetrics(" in run([sys.executable, "-c", OFFLINE + snippet], folder)
