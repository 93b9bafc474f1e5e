# SPDX-License-Identifier: Apache-2.0
"""Runs of pytest whose tests fail, hang or kill: what they print, and that they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFTEST = """
import tests.watchdog
from tests.conftest import pytest_configure

tests.watchdog.GRACE_S = 1.0
"""
LOCKED_TWICE = """
def test_good():
    pass

def test_locked():
    import ctypes
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)
"""
WAITS_AFTER_ITS_FAILURE = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
import pytest

@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(time.sleep, 1000)

def test_waits(thread):
    assert False, "not this"
"""
FAILS_THEN_KILLS = """
import os, signal

def test_fails():
    assert 1 == 2, "one is not two"

def test_kills_pytest():
    os.kill(os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid(), signal.SIGKILL)
"""
INTERRUPTED = """
import signal, subprocess, sys

def test_interrupt():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    child = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert subprocess.run([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True).stdout == "True\\n"
"""


def run_pytest(folder: Path, source: str, *flags: str, before: str = "pass") -> subprocess.CompletedProcess[str]:
    """Run a module of tests, each with a limit of one second; `before` is Python that runs first."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\ntimeout = 1\n")
    (folder / "test_module.py").write_text(source)
    program = f"import pytest, signal, sys; {before}; sys.exit(pytest.main())"
    command = [sys.executable, "-c", program, "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", *flags]
    # Without this worker's own variables: the run would take itself for a worker, and a test would kill this process.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")}
    environment = {**own, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=folder, env=environment
    )


@pytest.mark.parametrize("flags", [[], ["-n", "1", "--dist", "loadfile"]])
def test_a_run_that_is_killed_has_said_what_failed(tmp_path: Path, flags: list[str]) -> None:
    done = run_pytest(tmp_path, FAILS_THEN_KILLS, *flags)
    assert done.returncode == -signal.SIGKILL
    assert "failed: test_module.py::test_fails (call): AssertionError: one is not two\n" in done.stdout


@pytest.mark.parametrize(
    ("source", "waits_in"), [(LOCKED_TWICE, "test_locked"), (WAITS_AFTER_ITS_FAILURE, "in shutdown")]
)
def test_a_test_that_no_exception_ends_is_named_with_its_stack_and_the_run_ends(
    tmp_path: Path, source: str, waits_in: str
) -> None:
    done = run_pytest(tmp_path, source, "-n", "1", "--dist", "loadfile", "--max-worker-restart", "0")
    assert done.returncode == 1
    assert "crashed while running 'test_module.py::" in done.stdout
    assert "Timeout (0:00:02)!" in done.stderr and waits_in in done.stderr


def test_sigint_interrupts_tests_and_their_processes_where_the_shell_lets_it_be_ignored(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, INTERRUPTED, before="signal.signal(signal.SIGINT, signal.SIG_IGN)")
    assert done.returncode == 0, done.stdout
