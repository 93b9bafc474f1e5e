# SPDX-License-Identifier: Apache-2.0
"""Emulated kernels call no math library: its results differ between processors, and from those of a GPU."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

import pytest

from fastdeploy.ops.backends.gpu import plugin

ROOT = Path(__file__).parents[2]
MATH = runpy.run_path(str(ROOT / "scripts" / "check_rules.py"))["MATH"]
LIBM = {name + suffix for name in MATH for suffix in ("", "f", "l")}
CORRECTLY_ROUNDED = {"fma", "fmaf", "sqrt", "sqrtf"}  # one result on every processor


def called_math(library: Path) -> set[str]:
    """Return the functions of libm that a library needs."""
    command = ["nm", "-D", "--undefined-only", "-j", str(library)]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout.split()
    return LIBM & {symbol.partition("@")[0] for symbol in symbols}


@pytest.mark.parametrize("has_checks", [False, True])
def test_emulated_kernels_call_no_math_library(has_checks: bool) -> None:
    called = called_math(plugin.build_emulated(has_checks))
    assert called <= CORRECTLY_ROUNDED
    assert "fmaf" in called, "the symbols were found"


def test_a_call_of_a_math_library_would_be_seen(tmp_path: Path) -> None:
    source, library = tmp_path / "a.cc", tmp_path / "a.so"
    source.write_text('#include <cmath>\nextern "C" float f(float x) { return std::exp(x); }\n')
    subprocess.run(["g++", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True, timeout=240)
    assert called_math(library) == {"expf"}
