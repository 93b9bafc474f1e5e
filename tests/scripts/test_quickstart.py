# SPDX-License-Identifier: Apache-2.0
"""scripts/quickstart.sh downloads smollm2 while it builds, waits for a limited time, and says which model it serves.

The build, the download and the server are short scripts here.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = """set -euo pipefail
ROOT={root}
VENV=$ROOT/.venv
ensure_venv() {{ echo venv >>$ROOT/order; }}
ensure_environment() {{ {build}; echo build >>$ROOT/order; }}
"""
PYTHON = """#!/usr/bin/env bash
[ "$*" = "-m fastdeploy.hub.smollm2" ] || exit 9
echo begin >>{root}/order
{download}
"""
SERVER = """#!/usr/bin/env bash
printf '%s\\n' "$@" >{root}/flags
echo "Ready: http://localhost:8000/v1 (model)"
"""
PRESENT = "echo 'downloading smollm2 (..., Apache-2.0; 98 MB)' >&2; echo /cache/SmolLM2.gguf"
ENDLESS = "trap 'kill $!; echo stopped >>{}; exit 1' TERM; sleep 60 & wait"
NO_PACKAGE = "echo 'fastdeploy: error: model: smollm2 is not in the cache, and pip ...; demo' >&2; exit 2"


class Quickstart:
    """A checkout with the script and stand-ins for everything that it runs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "scripts").mkdir()
        (root / ".venv" / "bin").mkdir(parents=True)
        self.script = root / "scripts" / "quickstart.sh"
        shutil.copy(ROOT / "scripts" / "quickstart.sh", self.script)
        self.put("fastdeploy", SERVER)

    def put(self, name: str, text: str, **values: str) -> None:
        file = self.root / ".venv" / "bin" / name
        file.write_text(text.format(root=shlex.quote(str(self.root)), **values))
        file.chmod(0o755)

    def limit(self, seconds: int) -> None:
        """Wait less than the 30 s of the script."""
        text = self.script.read_text()
        assert text.count("WAIT_S=30 ") == 1
        self.script.write_text(text.replace("WAIT_S=30 ", f"WAIT_S={seconds} "))

    def start(self, *flags: str, download: str, build: str = ":") -> subprocess.Popen[str]:
        root = shlex.quote(str(self.root))
        (self.root / "scripts" / "environment.sh").write_text(ENVIRONMENT.format(root=root, build=build))
        self.put("python", PYTHON, download=download)
        command = ["bash", str(self.script), *flags]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *flags: str, download: str, build: str = ":") -> tuple[str, list[str]]:
        """Return what the script writes to stdout, and the lines that it writes to stderr."""
        process = self.start(*flags, download=download, build=build)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, out + err
        return out, err.splitlines()

    @property
    def served(self) -> list[str]:
        """The flags of the server up to the speculation."""
        flags = (self.root / "flags").read_text().splitlines()
        return flags[: flags.index("--speculative-config")]

    @property
    def order(self) -> list[str]:
        return (self.root / "order").read_text().split()


@pytest.fixture
def quickstart(tmp_path: Path) -> Quickstart:
    return Quickstart(tmp_path)


def test_a_downloaded_model_is_served_with_a_question_in_english(quickstart: Quickstart) -> None:
    out, err = quickstart.run("--port", "9000", download=PRESENT)
    assert err == [
        "downloading smollm2 (..., Apache-2.0; 98 MB)",
        "fastdeploy: serving smollm2: SmolLM2-135M-Instruct is in the cache",
    ]
    assert quickstart.served == ["serve", "--model", "smollm2"]
    flags = (quickstart.root / "flags").read_text().splitlines()
    assert flags[4:] == ['{"method": "ngram", "num_speculative_tokens": 5}', "--port", "9000"]
    assert "curl -s http://localhost:8000/v1/chat/completions " in out and '"role": "user"' in out


def test_the_download_runs_while_the_build_does(quickstart: Quickstart) -> None:
    waiting = "until grep -q {} {}/order; do sleep 0.05; done"
    root = shlex.quote(str(quickstart.root))
    _, err = quickstart.run(build=waiting.format("begin", root), download=waiting.format("build", root))
    assert quickstart.order == ["venv", "begin", "build"]
    assert err == ["fastdeploy: serving smollm2: SmolLM2-135M-Instruct is in the cache"]


def test_without_the_package_demo_is_served_with_the_reason_and_a_prompt_in_python(quickstart: Quickstart) -> None:
    out, err = quickstart.run(download=NO_PACKAGE)
    assert err == ["fastdeploy: serving demo: smollm2 is not in the cache, and pip ...; demo"]
    assert quickstart.served == ["serve", "--model", "demo"]
    assert "curl -s http://localhost:8000/v1/completions " in out and "class Stack:" in out


def test_a_download_that_does_not_end_in_time_is_stopped_and_demo_is_served(quickstart: Quickstart) -> None:
    quickstart.limit(2)
    begin = time.monotonic()
    _, err = quickstart.run(download=ENDLESS.format(quickstart.root / "order"))
    assert 0.9 < time.monotonic() - begin < 20
    assert err == [
        "fastdeploy: serving demo: smollm2 is not downloaded after 2 s more; fastdeploy serve smollm2 waits for it"
    ]
    assert quickstart.served == ["serve", "--model", "demo"]
    assert quickstart.order[-1] == "stopped"


@pytest.mark.parametrize("flags", [("--model", "/my/model"), ("--model=/my/model",)])
def test_a_model_of_ones_own_is_served_without_a_download(quickstart: Quickstart, flags: tuple[str, ...]) -> None:
    _, err = quickstart.run(*flags, download=PRESENT)
    assert (quickstart.served, quickstart.order, err) == (["serve"], ["build"], [])
    assert (quickstart.root / "flags").read_text().splitlines()[3:] == list(flags)


def test_a_build_that_fails_stops_the_download(quickstart: Quickstart) -> None:
    root = quickstart.root
    process = quickstart.start(
        build=f"until grep -q begin {root}/order; do sleep 0.05; done; false",
        download=ENDLESS.format(root / "order"),
    )
    process.wait(60)
    assert process.returncode == 1
    deadline = time.monotonic() + 20
    while quickstart.order[-1] != "stopped" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert quickstart.order == ["venv", "begin", "stopped"]
