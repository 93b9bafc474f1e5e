# SPDX-License-Identifier: Apache-2.0
"""The whole engine is exact on every instruction-set path that this processor has."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdeploy.ops.backends.cpu import library
from tests.ops.test_paths import PATHS, run, supported

SUITES = [str(Path(__file__).parent / name) for name in ("test_speculation_is_invisible.py", "test_int8_cache.py")]
CASES = "test_speculation[ and (hits-together-oracle or hits-together-mtp or preemption-oracle)"


@pytest.mark.parametrize("path", PATHS)
def test_the_engine_is_exact_on(path: str) -> None:
    if path == library.isa():
        pytest.skip("this process runs the same tests on this path")
    if path not in supported():
        pytest.skip(f"this processor has no {path}")
    done = run(["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *SUITES, "-k", CASES], FD_CPU_ISA=path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
