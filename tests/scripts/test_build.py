# SPDX-License-Identifier: Apache-2.0
"""setup.py: progress, and the identity of a library."""

from __future__ import annotations

import runpy
import sys
from importlib.metadata import version
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


def test_libraries_of_the_same_sources_have_one_hash_whichever_paths_are_built(build: dict[str, Any]) -> None:
    hashes = set()
    for choice in ("all", "native"):
        [job] = build["compile_jobs"]("custom_ops/common/version.cc", [], build["select_paths"](choice))
        hashes.add(next(flag for flag in job.command if flag.startswith("-DFD_SOURCE_HASH=")))
    assert len(hashes) == 1


def test_an_operator_library_has_the_version_of_paddle_that_it_is_compiled_for(
    build: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, paths = "custom_ops/cpu_ops/built_with.cc", build["select_paths"]("all")
    [job] = build["compile_jobs"](source, [], paths)
    assert f'-DFD_PADDLE_VERSION="{version("paddlepaddle")}"' in job.command
    monkeypatch.setitem(build["compile_jobs"].__globals__, "paddle_version", lambda: "3.9.0")
    [other] = build["compile_jobs"](source, [], paths)
    assert '-DFD_PADDLE_VERSION="3.9.0"' in other.command
    assert other.target != job.target


def test_the_hash_of_a_library_follows_its_sources_and_no_other_file(
    build: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hash_of_folders = build["hash_of_folders"]
    monkeypatch.setitem(hash_of_folders.__globals__, "OPS", tmp_path)
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "a.cc").write_text("int a;")
    first = hash_of_folders("common")
    (tmp_path / "common" / "a.cc.orig").write_text("int b;")
    assert hash_of_folders("common") == first
    (tmp_path / "common" / "b.h").write_text("int b;")
    assert hash_of_folders("common") != first
