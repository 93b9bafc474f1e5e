# SPDX-License-Identifier: Apache-2.0
"""Whole models on every instruction-set path of this machine, and on the Paddle references."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastdeploy.ops.backends.cpu.library import isa
from tests.models.model_driver import GOLDEN, GOLDEN_NAMES, Driver, load_golden, log_softmax
from tests.models.reference_backend import reference_backend
from tests.ops.isa_paths import PATHS, run, supported

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_reference_operators_reproduce_transformers(name: str) -> None:
    with reference_backend(), np.load(GOLDEN / name / "reference.npz") as expected:
        logits = Driver(load_golden(name)).run_alone(expected["tokens"])
        found = log_softmax(logits)[expected["positions"]]
        assert np.abs(found - expected["logprobs_float32"]).max() <= 1e-4


@pytest.mark.parametrize("path", PATHS)
def test_every_path_is_right_and_row_independent(path: str) -> None:
    if path == isa() or path not in supported():
        pytest.skip(f"this process runs {isa()}: {path} is covered by the other tests or not there")
    suites = [str(HERE / name) for name in ("test_parity.py", "test_row_independence.py", "test_quantization.py")]
    done = run(
        ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "ernie4_5 or qwen3", *suites], FD_CPU_ISA=path
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
