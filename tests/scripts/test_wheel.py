# SPDX-License-Identifier: Apache-2.0
"""A wheel that is installed into an empty environment serves the demonstration model."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import urllib.request
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("custom_ops", "fastdeploy", "setup.py", "pyproject.toml", "requirements.txt", "README.md", "LICENSE")
CONFIG = '{"method": "ngram", "num_speculative_tokens": 5}'


ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command outside of the checkout, whose package it would import."""
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=ENVIRONMENT, timeout=240
    )


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel, which finds the dependencies in the environment of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"  # a copy, because what an earlier build left in build/lib would get into the wheel
    sources.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, sources / name)
    for library in (sources / "fastdeploy" / "ops").glob("*.so"):
        library.unlink()
    (sources / "build").mkdir()
    (ROOT / "build" / "objects").mkdir(parents=True, exist_ok=True)
    (sources / "build" / "objects").symlink_to(ROOT / "build" / "objects")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    built = run(folder, *pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, sources)
    assert built.returncode == 0, built.stdout + built.stderr
    venv.create(folder / "env", symlinks=True)
    binaries = folder / "env" / "bin"
    [wheel] = folder.glob("fastdeploy-*.whl")
    install = ("--python", binaries / "python", "install", "--no-deps", "--no-index", wheel)
    installed = run(folder, *pip, *install)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    [packages] = (folder / "env" / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    return binaries


def test_the_package_comes_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    code = "import fastdeploy.ops.registry as r; print(r.__file__)"
    file = Path(run(tmp_path, environment / "python", "-c", code).stdout.strip())
    assert file.is_relative_to(environment.parent / "lib")


def test_the_wheel_has_the_digests_that_a_device_is_checked_with(environment: Path, tmp_path: Path) -> None:
    code = "from fastdeploy.ops.device_check.golden import FILE; print(FILE.exists())"
    assert run(tmp_path, environment / "python", "-c", code).stdout == "True\n"


def test_flags_of_other_servers_are_read_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    done = run(tmp_path, environment / "fastdeploy", "serve", "demo", "--pipeline-parallel-size", "2")
    assert done.returncode == 2
    assert done.stderr == "fastdeploy: error: --pipeline-parallel-size 2: pipeline parallelism is not supported\n"


def test_the_wheel_serves_with_speculation(environment: Path, tmp_path: Path) -> None:
    command = (environment / "fastdeploy", "serve", "demo", "--port", "0", "--speculative-config", CONFIG)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=ENVIRONMENT) as server:
        try:
            assert server.stdout is not None
            url = next(found[1] for line in server.stdout if (found := re.match(r"Ready: (\S+) ", line)))
            body = {"model": "demo", "prompt": "a b a b a b a b", "max_tokens": 16, "temperature": 0}
            request = urllib.request.Request(
                f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                usage = json.load(response)["usage"]
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    assert usage["completion_tokens"] == 16
