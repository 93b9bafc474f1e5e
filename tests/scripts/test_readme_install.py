# SPDX-License-Identifier: Apache-2.0
"""The installation of the README makes its other commands work in the folder of the README.

The environment finds the dependencies in that of the tests, and compiled objects are kept. A folder `smollm2`, which is
the demonstration model, stands for the model that would be downloaded.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fastdeploy.version import __version__
from tests.scripts.package_copy import ENVIRONMENT, ROOT, copy_sources, share_dependencies

pytestmark = pytest.mark.nightly

README = (ROOT / "README.md").read_text()
ADDRESS = "http://localhost:8000"
DEFAULT_PORT = "--port 8000"


def blocks(section: str, language: str) -> list[str]:
    """Return the code blocks of a section of the README."""
    text = README.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


SERVE, CURL = blocks("A first request", "bash")
CLIENT, OFFLINE = blocks("A first request", "python")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in which the installation of the README was followed; its home folder is next to it."""
    folder = tmp_path_factory.mktemp("readme")
    sources = copy_sources(folder / "checkout")
    (folder / "home").mkdir()
    (sources / "smollm2").symlink_to(sources / "fastdeploy" / "assets" / "demo_model")
    (block,) = blocks("Install into an environment of your own", "bash")
    make_environment, *installs = block.splitlines()
    shell(sources, make_environment)
    share_dependencies(folder / "home" / "fastdeploy-env", folder / "dependencies")
    shell(sources, "python -m pip uninstall --quiet --yes setuptools")  # the old one of Python 3.11's venv
    for install in installs:
        shell(sources, install.replace("pip install", "pip install --no-deps --no-build-isolation --no-index"))
    return sources


@pytest.fixture(scope="module")
def url(checkout: Path) -> Iterator[str]:
    """The address of the server that the README starts, on a free port."""
    assert DEFAULT_PORT in SERVE
    with serving(checkout, SERVE.replace(DEFAULT_PORT, "--port 0")) as address:
        yield address


@contextmanager
def serving(checkout: Path, command: str) -> Iterator[str]:
    """Run a server in the checkout and yield its address."""
    with subprocess.Popen(
        ["bash", "-c", f"exec {command}"], stdout=subprocess.PIPE, text=True, cwd=checkout, env=environment(checkout)
    ) as server:
        try:
            assert server.stdout is not None
            address = next((found[1] for line in server.stdout if (found := re.match(r"Ready: (\S+)/v1 ", line))), None)
            assert address, "the server ended before it was ready"
            yield address
        finally:
            server.send_signal(signal.SIGTERM)


def environment(checkout: Path) -> dict[str, str]:
    """Return variables as after the activation of the environment of the README."""
    home = checkout.parent / "home"
    folders = (home / "fastdeploy-env" / "bin", Path(sys.executable).parent, ENVIRONMENT["PATH"])
    return {**ENVIRONMENT, "HOME": str(home), "PATH": os.pathsep.join(map(str, folders))}


def shell(checkout: Path, script: str) -> str:
    """Run a script in the checkout and return its output."""
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=checkout,
        env=environment(checkout),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_curl_gets_an_answer(checkout: Path, url: str) -> None:
    assert re.search(r'"role":"assistant","content":"[^"]', shell(checkout, CURL.replace(ADDRESS, url)))


def test_the_official_client_gets_an_answer(checkout: Path, url: str) -> None:
    assert shell(checkout, f"python -c {shlex.quote(CLIENT.replace(ADDRESS, url))}").strip()


def test_the_snippet_without_a_server_prints_an_answer(checkout: Path) -> None:
    assert "SpeculateMetrics(" in shell(checkout, f"python -c {shlex.quote(OFFLINE)}")


def test_the_module_serves_like_the_command(checkout: Path) -> None:
    module = "python -m fastdeploy.entrypoints.openai.api_server"
    with serving(checkout, f"{module} --model demo --host 127.0.0.1 --port 0") as address:
        assert address.startswith("http://127.0.0.1:")


def test_the_package_is_found_in_the_folder_of_the_environment_as_well(checkout: Path) -> None:
    assert shell(checkout, "cd && python -c 'import fastdeploy; print(fastdeploy.LLM.__name__)'") == "LLM\n"


def test_the_package_of_the_checkout_has_its_library(checkout: Path) -> None:
    assert re.search(f"operator library {__version__}", shell(checkout, "fastdeploy --version"))
