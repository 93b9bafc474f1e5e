# SPDX-License-Identifier: Apache-2.0
"""Each planted fault fails the tests of exactness or the quick tests of the engine, which pass without it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.exactness.mutants import MUTANTS, ROOT, VARIABLE

# The fastest first; a fault ends the run at the first test that fails.
SETS = {
    "quick": ["-m", "quick", *(f"tests/{name}" for name in ("kv_cache", "engine", "worker", "spec_decode"))],
    "exactness": [
        "tests/exactness",
        "--ignore=tests/exactness/test_paths.py",
        "--ignore=tests/exactness/test_mutants.py",
    ],
}


def run_tests(name: str, fault: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a set of tests up to the first failure, with a fault if one is given."""
    plugins = ["-p", "no:cacheprovider", *(["-p", "tests.exactness.mutants"] if fault else [])]
    environment = {**os.environ, **({VARIABLE: fault} if fault else {})}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--timeout=120", *plugins, *SETS[name]]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)


@pytest.mark.parametrize("fault", MUTANTS)
def test_the_passage_of_every_mutant_occurs_once(fault: str) -> None:
    compile(MUTANTS[fault].source(), fault, "exec")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SETS)
def test_without_a_fault_the_tests_pass(name: str) -> None:
    done = run_tests(name)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", MUTANTS)
def test_every_fault_fails_a_test(fault: str) -> None:
    compile(MUTANTS[fault].source(), fault, "exec")
    for name in SETS:
        done = run_tests(name, fault)
        assert done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-2000:]  # 1: tests failed
        if done.returncode == 1:
            print(next(line for line in done.stdout.splitlines() if line.startswith(("FAILED tests", "ERROR tests"))))
            return
    pytest.fail(f"no test fails although {fault}")
