# SPDX-License-Identifier: Apache-2.0
"""A warm step of the real engine asks for no memory: no tensor, no scratch, no array of a page or more, by anybody."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.fixture(scope="module")
def hook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the counter that is put before malloc."""
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("no g++")
    library = tmp_path_factory.mktemp("hook") / "count_allocations.so"
    source = str(HERE / "count_allocations.cc")
    subprocess.run([compiler, "-O1", "-std=c++17", "-shared", "-fPIC", source, "-o", str(library)], check=True)
    return library


def test_warm_steps_of_every_kind_allocate_nothing(hook: Path) -> None:
    # One thread, since a second one grows its scratch whenever it first happens to be given a large tile.
    environment = {**os.environ, "LD_PRELOAD": str(hook), "FD_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.worker.allocating_engine"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    steps = json.loads(done.stdout.splitlines()[-1])
    assert sum(count for _, count in steps["first"]) > 0, "the counter must see the first steps' scratch"
    assert {kind for kind, _ in steps["warm"]} == {"prompt", "verification", "decode"}
    assert [step for step in steps["warm"] if step[1]] == []
