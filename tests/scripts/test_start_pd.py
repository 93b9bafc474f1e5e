# SPDX-License-Identifier: Apache-2.0
"""scripts/start_pd.sh shows that a text survives its decode node."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
def test_the_demonstration_of_two_nodes_ends_with_equal_texts(tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "scripts" / "start_pd.sh")]
    env = {**os.environ, "TMPDIR": str(tmp_path), "FD_BUILD_PATHS": "all"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("All three texts are the same, ")
    assert [line[:2] for line in lines if line[:1].isdigit()] == ["1.", "2.", "3.", "4.", "5."]
    moved = next(line for line in lines if "bytes of KV cache moved" in line)
    assert int(moved.split("; ")[1].split()[0]) > 0
    assert list(tmp_path.iterdir()) == []
