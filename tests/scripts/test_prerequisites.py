# SPDX-License-Identifier: Apache-2.0
"""The scripts name what is missing, in one line."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "cat", "cut", "dirname", "env", "find", "id", "realpath", "sha256sum", "sort", "xargs")
OLD_PYTHON = "#!/bin/sh\nexit 1\n"
PYTHON_WITHOUT = """#!/bin/sh
case "$2" in *{word}*) exit 1;; esac
exec {python} "$@"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the scripts look at, with no .venv, and a bin folder that is all there is in PATH."""
    for name in ("requirements.txt", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("demo_model"))
    (tmp_path / "custom_ops").mkdir()
    (tmp_path / "custom_ops" / "a.cc").write_text("")
    (tmp_path / "fastdeploy").mkdir()
    shutil.copy(ROOT / "fastdeploy" / "version.py", tmp_path / "fastdeploy")
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found
        (binaries / tool).symlink_to(found)
    return tmp_path


def put(checkout: Path, name: str, script: str) -> None:
    file = checkout / "bin" / name
    file.write_text(script)
    file.chmod(0o755)


def complaint(checkout: Path, script: str) -> list[str]:
    """Run a script that must fail; return the lines it wrote to stderr."""
    done = subprocess.run(
        ["bash", str(checkout / "scripts" / script)],
        env={"PATH": str(checkout / "bin")},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr.splitlines()


@pytest.mark.parametrize(("script", "name"), [("quickstart.sh", "python3"), ("build_wheel.sh", "python3.12")])
def test_unsupported_python_is_named(checkout: Path, script: str, name: str) -> None:
    put(checkout, name, OLD_PYTHON)
    assert complaint(checkout, script) == [
        "fastdeploy: missing: Python 3.11 or 3.12 (Debian, Ubuntu: apt-get install python3 python3-venv python3-dev)"
    ]


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("ensurepip", "missing: the venv module of python3 (Debian, Ubuntu: apt-get install python3-venv)"),
        ("Python.h", "missing: Python.h for python3 (Debian, Ubuntu: apt-get install python3-dev)"),
        ("nothing", "missing: a C++17 compiler (Debian, Ubuntu: apt-get install g++)"),
    ],
)
@pytest.mark.parametrize(("script", "name"), [("quickstart.sh", "python3"), ("build_wheel.sh", "python3.11")])
def test_missing_parts_of_a_toolchain_are_named(checkout: Path, script: str, name: str, word: str, line: str) -> None:
    put(checkout, name, PYTHON_WITHOUT.format(word=word, python=sys.executable))
    assert complaint(checkout, script) == [f"fastdeploy: {line.replace('python3 ', f'{name} ', 1)}"]


def test_missing_redis_is_named_and_the_rest_goes_on(checkout: Path) -> None:
    put(checkout, "python3", OLD_PYTHON)
    lines = complaint(checkout, "run_tests.sh")
    assert lines[0] == "fastdeploy: missing: redis-server (Debian, Ubuntu: apt-get install redis-server)"
    assert lines[1].startswith("fastdeploy: missing: Python 3.11")
