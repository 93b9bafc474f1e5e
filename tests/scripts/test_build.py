# SPDX-License-Identifier: Apache-2.0
"""setup.py: progress, and the identity of a library."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def build() -> dict[str, Any]:
    """What setup.py defines; it is run with a command that builds nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["setup.py", "--quiet", "--version"])
        patch.chdir(ROOT)
        return runpy.run_path("setup.py")


def test_every_progress_line_is_one_write(
    build: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    monkeypatch.setattr(sys.stdout, "write", written.append)
    source = tmp_path / "a.cc"
    source.write_text("")
    names = [f"a{number}" for number in range(8)]
    jobs = [build["Job"](name, tmp_path / name, [sys.executable, "-c", "", str(source)]) for name in names]
    monkeypatch.setitem(build["compile_all"].__globals__, "run", lambda command, target, log: None)
    build["compile_all"](jobs)
    monkeypatch.undo()
    assert sorted(written) == [f"[{number}/8] {name}\n" for number, name in enumerate(names, 1)]


def test_a_library_with_fewer_paths_has_another_hash(build: dict[str, Any]) -> None:
    hashes = []
    for choice in ("all", "native"):
        [job] = build["compile_jobs"]("custom_ops/common/version.cc", [], build["select_paths"](choice))
        hashes.append(next(flag for flag in job.command if flag.startswith("-DFD_SOURCE_HASH=")))
    assert hashes[0] != hashes[1]
