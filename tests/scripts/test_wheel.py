# SPDX-License-Identifier: Apache-2.0
"""A wheel that is installed into an empty environment serves the demonstration model."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
import venv
from pathlib import Path

import pytest

from tests.scripts.package_copy import ENVIRONMENT, copy_sources, run, share_dependencies

CONFIG = '{"method": "ngram", "num_speculative_tokens": 5}'


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel, which finds the dependencies in the environment of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = copy_sources(folder / "sources")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    built = run(folder, *pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, sources)
    assert built.returncode == 0, built.stdout + built.stderr
    venv.create(folder / "env", symlinks=True)
    binaries = folder / "env" / "bin"
    [wheel] = folder.glob("fastdeploy-*.whl")
    install = ("--python", binaries / "python", "install", "--no-deps", "--no-index", wheel)
    installed = run(folder, *pip, *install)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    share_dependencies(folder / "env", folder / "dependencies")
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
    assert done.stderr == (
        "fastdeploy: error: --pipeline-parallel-size 2: is refused, leave it out: "
        "pipeline parallelism is not supported\n"
    )


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
