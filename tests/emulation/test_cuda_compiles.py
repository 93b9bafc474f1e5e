# SPDX-License-Identifier: Apache-2.0
"""The same sources compile for GPUs, without spilled registers; they run on none here."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARCHITECTURES = (80, 90, 100)
FLAGS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true", "-Icustom_ops", "-Xptxas=-v")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc"),
]


@pytest.mark.parametrize(
    "source", ["custom_ops/gpu_ops/runtime.cu", "tests/emulation/kernel.cc", "tests/ops/gpu/tiles.cc"]
)
def test_a_source_compiles_for_every_architecture_without_spills(source: str, tmp_path: Path) -> None:
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ARCHITECTURES]
    command = ["nvcc", *FLAGS, *targets, "-x", "cu", "-Xcompiler=-fPIC", "-c", source, "-o", str(tmp_path / "object.o")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stdout + done.stderr)
    assert set(spills) <= {("0", "0")}
    assert "warning" not in done.stderr
