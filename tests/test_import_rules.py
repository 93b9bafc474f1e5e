# SPDX-License-Identifier: Apache-2.0
"""Who may import whom (docs/architecture), and what runs without Paddle."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastdeploy

ROOT = Path(fastdeploy.__file__).parent
COMPUTE = {"core", "config", "version", "ops", "layers", "models", "spec_decode", "kv_cache"}
ALLOWED = {
    "core": set[str](),
    "config": {"core"},
    "metrics": {"core", "config", "version"},
    "detokenize": {"core", "config", "metrics"},
    "ipc": {"core", "config", "metrics"},
    "scheduler": {"core", "config", "metrics"},
    "ops": {"core", "config", "version"},
    "layers": {"core", "config", "ops"},
    "models": {"core", "config", "ops", "layers"},
    "spec_decode": {"core", "config", "ops"},
    "kv_cache": {"core", "config", "ops"},
    "worker": COMPUTE,
    "engine": COMPUTE | {"worker", "detokenize", "ipc", "metrics"},
    "entrypoints": COMPUTE | {"worker", "engine", "detokenize", "ipc", "metrics", "scheduler"},
}
ALLOWED_OPENAI = {"core", "config", "version", "detokenize", "ipc", "metrics", "scheduler"}
WITHOUT_PADDLE = ("core", "config", "detokenize", "ipc", "metrics", "entrypoints/openai", "entrypoints/cli")


def sources() -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py") if len(path.relative_to(ROOT).parts) > 1)


def imported_packages(source: Path) -> Iterator[str]:
    """Yield the packages of ours that a file imports anywhere in it."""
    for node in ast.walk(ast.parse((ROOT / source).read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "fastdeploy" and len(parts) > 1:
                yield parts[1]


@pytest.mark.parametrize("source", sources(), ids=str)
def test_imports_follow_the_rules(source: Path) -> None:
    package = source.parts[0]
    assert package in ALLOWED or package == "assets", f"no rule for {package}"
    allowed = ALLOWED_OPENAI | {"entrypoints"} if source.parts[:2] == ("entrypoints", "openai") else ALLOWED[package]
    wrong = set(imported_packages(source)) - allowed - {package}
    assert not wrong, f"{source} imports {', '.join(sorted(wrong))}"


@pytest.mark.parametrize("package", WITHOUT_PADDLE)
def test_package_runs_without_paddle(package: str) -> None:
    modules = [
        ".".join(("fastdeploy", *source.with_suffix("").parts)).removesuffix(".__init__")
        for source in sources()
        if source.as_posix().startswith(package + "/")
    ]
    assert modules
    script = f"import {', '.join(modules)}, sys; assert 'paddle' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
