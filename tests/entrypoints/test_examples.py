# SPDX-License-Identifier: Apache-2.0
"""The blocks of docs/guide/examples.md run as they stand, against the server that the page starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.ipc.child import DEFAULT_FACTORY
from tests.entrypoints.server_process import ROOT, ServerProcess

PAGE = (ROOT / "docs" / "guide" / "examples.md").read_text()
BLOCK = re.compile(r"^```(\w+)(?: (\w+)=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ADDRESS = "http://localhost:8000"
MODEL = "smollm2"


@dataclass(frozen=True)
class Example:
    """A block of the page: its language, how it is used (`file`, `test`, `nightly`) and the word behind that.

    Attributes:
        prints: the text block behind it, where `...` stands for anything.
    """

    language: str
    use: str
    name: str
    text: str
    prints: str = ""

    def is_printed_by(self, output: str) -> bool:
        """Return whether the page shows this output."""
        parts = (re.escape(part) for part in self.prints.strip().split("..."))
        return re.fullmatch(".*".join(parts), output.strip(), re.DOTALL) is not None


def read_examples() -> list[Example]:
    """Return the blocks of the page, each with the text block behind it."""
    examples: list[Example] = []
    for language, use, name, text in BLOCK.findall(PAGE):
        if language == "text":
            examples[-1] = replace(examples[-1], prints=text)
        else:
            examples.append(Example(language, use, name, text))
    return examples


EXAMPLES = read_examples()
FILES = {one.name: one.text for one in EXAMPLES if one.use == "file"}
TESTS = [one for one in EXAMPLES if one.use == "test"]
NIGHTLY = [one for one in EXAMPLES if one.use == "nightly"]
EXPECTED = {
    "curl": r'"role":"assistant","content":"[^"]',
    "curl-stream": r'(?s)data: \{.*"text":"[^"].*data: \[DONE\]\n',
    "openai": r"accepted drafts: \d+\n",
    "responses": r"\S",
    "anthropic": r"\S (max_tokens|end_turn)\n",
    "tools": r"^weather \{'city': '(Paris|Rome)'\}\n",
    "structured": r"^\{'name': .*, 'stars': [1-5]\}\n$",
    "batch": r'(?s)"custom_id": "a".*"status_code": 200.*"custom_id": "b".*"status_code": 200',
    "offline": r"\S",
}
"""Name of a block -> what it prints with any model."""


@contextmanager
def serving(folder: Path) -> Iterator[ServerProcess]:
    """Run the server of the page in a folder, on a free port."""
    (folder / "server.yaml").write_text(FILES["server.yaml"])
    assert "fastdeploy serve --config server.yaml\n" in PAGE
    started = ServerProcess(["--config", "server.yaml", "--port", "0"], factory=DEFAULT_FACTORY, cwd=folder)
    try:
        yield started.wait_ready()
    finally:
        started.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server in whose folder the demonstration model stands for the model of the page."""
    folder = tmp_path_factory.mktemp("server")
    put_demo(folder)
    with serving(folder) as started:
        yield started


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with the model of the page, which is downloaded."""
    with serving(tmp_path_factory.mktemp("server")) as started:
        yield started


def put_demo(folder: Path) -> None:
    """Let the name of the page's model mean the demonstration model in a folder."""
    (folder / MODEL).symlink_to(resolve_model_path("demo"))


def run(example: Example, server: ServerProcess, folder: Path, python: str = sys.executable) -> str:
    """Run a block in a folder with the files of the page; return what it prints."""
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
def test_an_example_runs_with_any_model(example: Example, server: ServerProcess, tmp_path: Path) -> None:
    put_demo(tmp_path)
    assert re.search(EXPECTED[example.name], run(example, server, tmp_path))


@pytest.mark.nightly
@pytest.mark.parametrize("example", TESTS, ids=[one.name for one in TESTS])
def test_an_example_prints_what_the_page_shows(example: Example, real_server: ServerProcess, tmp_path: Path) -> None:
    output = run(example, real_server, tmp_path)
    assert example.is_printed_by(output), output


@pytest.mark.nightly
@pytest.mark.parametrize("example", NIGHTLY, ids=[one.name for one in NIGHTLY])
def test_another_client_works_with_address_key_and_model_changed(
    example: Example, real_server: ServerProcess, tmp_path: Path
) -> None:
    """Run an example in an environment that has nothing but its package."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", example.name], check=True, timeout=400)
    output = run(example, real_server, tmp_path, str(python))
    assert example.is_printed_by(output), output


def test_every_block_is_executed_or_read() -> None:
    unmarked = [one.text for one in EXAMPLES if not one.use and not one.text.startswith("pip install ")]
    assert unmarked == ["fastdeploy serve --config server.yaml\n"]
    assert {one.name for one in TESTS} == set(EXPECTED)
    assert all(one.prints for one in (*TESTS, *NIGHTLY))
