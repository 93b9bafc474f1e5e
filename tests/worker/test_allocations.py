# SPDX-License-Identifier: Apache-2.0
"""A warm step of the real engine allocates no block of a page or more: no tensor, no scratch memory, no array."""

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
    """Build the library that counts calls of malloc."""
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("no g++")
    library = tmp_path_factory.mktemp("hook") / "count_allocations.so"
    source = str(HERE / "count_allocations.cc")
    subprocess.run(
        [compiler, "-O1", "-std=c++17", "-shared", "-fPIC", source, "-o", str(library)], check=True, timeout=120
    )
    return library


def test_warm_steps_of_every_kind_allocate_nothing(hook: Path) -> None:
    # One thread, since the scratch memory of a second one grows whenever it first gets a large tile.
    environment = {**os.environ, "LD_PRELOAD": str(hook), "FD_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.worker.allocating_engine"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    steps = json.loads(result.stdout.splitlines()[-1])
    assert sum(count for _, count in steps["first"]) > 0, "the scratch memory of the first steps is counted"
    assert {kind for kind, _ in steps["warm"]} == {"prefill", "verification", "decode"}
    assert [step for step in steps["warm"] if step[1]] == []
