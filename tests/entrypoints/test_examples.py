# SPDX-License-Identifier: Apache-2.0
"""The blocks of docs/guide/examples.md run as they stand, against the server that the page starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fastdeploy.ipc.child import DEFAULT_FACTORY
from tests.entrypoints.server_process import ROOT, ServerProcess

PAGE = (ROOT / "docs" / "guide" / "examples.md").read_text()
BLOCK = re.compile(r"^```(\w+)(?: (\w+)=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ADDRESS = "http://localhost:8000"


@dataclass(frozen=True)
class Example:
    """A block of the page: its language, how it is used (`file`, `test`, `nightly`) and the word behind that."""

    language: str
    use: str
    name: str
    text: str


EXAMPLES = [Example(*found) for found in BLOCK.findall(PAGE)]
FILES = {one.name: one.text for one in EXAMPLES if one.use == "file"}
TESTS = [one for one in EXAMPLES if one.use == "test"]
NIGHTLY = [one for one in EXAMPLES if one.use == "nightly"]
EXPECTED = {
    "curl": r'"role":"assistant","content":"[^"]',
    "curl-stream": r'(?s)data: \{.*"text":"[^"].*data: \[DONE\]\n',
    "openai": r"accepted_tokens",
    "responses": r"\S",
    "anthropic": r"\S max_tokens\n",
    "tools": r"^weather \{'city': '(Paris|Rome)'\}\n",
    "structured": r"^[1-5]\n$",
    "batch": r'(?s)"custom_id": "a".*"status_code": 200.*"custom_id": "b".*"status_code": 200',
    "offline": r"\S",
    "langchain-openai": r"\S",
    "litellm": r"\S",
    "instructor": r"^[1-5]\n$",
    "pydantic-ai-slim": r"^(Paris|Rome)\n$",
    "openai-agents": r"^(It is sunny in (Paris|Rome)\.|Paris|Rome)\n$",
}
"""Name of a block, or of its package -> what it prints."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The server of the page, on a free port."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "server.yaml").write_text(FILES["server.yaml"])
    assert "fastdeploy serve --config server.yaml\n" in PAGE
    started = ServerProcess(["--config", "server.yaml", "--port", "0"], factory=DEFAULT_FACTORY, cwd=folder)
    try:
        yield started.wait_ready()
    finally:
        started.close()


def run(example: Example, server: ServerProcess, folder: Path, python: str = sys.executable) -> str:
    """Run a block in an empty folder with the files of the page; return what it prints."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    command = [python, "-c"] if example.language == "python" else ["bash", "-e", "-c"]
    path = f"{Path(python).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [*command, example.text.replace(ADDRESS, server.url)],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("example", TESTS, ids=[one.name for one in TESTS])
def test_an_example_prints_what_it_promises(example: Example, server: ServerProcess, tmp_path: Path) -> None:
    assert re.search(EXPECTED[example.name], run(example, server, tmp_path))


@pytest.mark.nightly
@pytest.mark.parametrize("example", NIGHTLY, ids=[one.name for one in NIGHTLY])
def test_another_client_works_with_address_key_and_model_changed(
    example: Example, server: ServerProcess, tmp_path: Path
) -> None:
    """Run an example in an environment that has nothing but its package."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", example.name], check=True, timeout=120)
    package = re.split(r"[\[=]", example.name)[0]
    assert re.search(EXPECTED[package], run(example, server, tmp_path, str(python)))


def test_every_block_is_executed_or_read() -> None:
    unmarked = [one.text for one in EXAMPLES if not one.use]
    assert unmarked == ["fastdeploy serve --config server.yaml\n"]
    assert {re.split(r"[\[=]", one.name)[0] for one in (*TESTS, *NIGHTLY)} == set(EXPECTED)
