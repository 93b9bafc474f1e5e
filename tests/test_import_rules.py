# SPDX-License-Identifier: Apache-2.0
"""Who may import whom (docs/architecture), and what runs without Paddle."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastdeploy

ROOT = Path(fastdeploy.__file__).parent
ALLOWED = {  # by the longest prefix of a file's path; every package may import itself
    "core": set[str](),
    "config": {"core"},
    "hub": {"core", "config"},
    "metrics": {"core", "config", "version"},
    "detokenize": {"core", "config", "metrics"},
    "ipc": {"core", "config", "metrics"},
    "scheduler": {"core", "config", "metrics", "ipc", "kv_cache"},
    "ops": {"core", "config", "version"},
    "layers": {"core", "config", "ops"},
    "models": {"core", "config", "ops", "layers"},
    "kv_cache": {"core", "config"},
    "spec_decode/proposers": {"core", "config", "ops"},
    "spec_decode/adaptive": {"core"},
    "worker": {"core", "config", "ops", "layers", "models", "kv_cache", "spec_decode/adaptive"},
    "spec_decode/drafting": {"core", "config", "hub", "ops", "layers", "models", "kv_cache", "worker", "detokenize"},
    "structured_output": {"core", "detokenize"},
    "engine": {
        *("core", "config", "hub", "ops", "layers", "models", "kv_cache", "spec_decode", "worker"),
        *("structured_output", "detokenize", "ipc", "metrics"),
    },
    "entrypoints/openai": {
        *("core", "config", "hub", "version", "detokenize", "ipc", "metrics", "scheduler", "entrypoints"),
    },
    "entrypoints": {
        *("core", "config", "hub", "version", "ops", "layers", "models", "kv_cache", "spec_decode", "worker"),
        *("structured_output", "engine", "detokenize", "ipc", "metrics", "scheduler"),
    },
}
DEVICE_NAMES = {
    "CPUPlace",
    "OpGraph",
    "_C_ops",
    "load_op_meta_info_and_register_op",
    "madvise",
    "run_native",
    "_run_custom_op",
    "thread_time",
}
INSTRUCTION_SET = re.compile(r"\b(?:avx|amx|sse\d|vnni)\w*|[\"']_cpu\b")  # and the file name of the CPU's library
NAMES_INSTRUCTION_SETS = {"config/env.py", "entrypoints/cli/collect_env.py"}  # explain FD_CPU_ISA, report /proc/cpuinfo
WITHOUT_PADDLE = (
    "core",
    "config",
    "hub",
    "detokenize",
    "ipc",
    "metrics",
    "spec_decode/adaptive",
    "entrypoints/openai",
    "entrypoints/cli",
)


def sources() -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py") if len(path.relative_to(ROOT).parts) > 1)


def imported_modules(source: Path) -> Iterator[str]:
    """Yield what a file imports of ours, anywhere in it, as a path: "core/request/Request"."""
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
                yield "/".join(parts[1:])


def is_within(path: str, package: str) -> bool:
    return path == package or path.startswith(package + "/")


@pytest.mark.parametrize("source", sources(), ids=str)
def test_imports_follow_the_rules(source: Path) -> None:
    path = source.with_suffix("").as_posix()
    rules = [package for package in ALLOWED if is_within(path, package)]
    assert rules or is_within(path, "assets") or source.name == "__init__.py", f"no rule for {path}"
    if not rules:
        return
    package = max(rules, key=len)
    allowed = {*ALLOWED[package], package}
    wrong = [name for name in imported_modules(source) if not any(is_within(name, one) for one in allowed)]
    assert not wrong, f"{source} imports {', '.join(sorted(wrong))}"


def test_only_backends_depend_on_a_device() -> None:
    """A backend is found by the name of its device; no other package imports it or uses the names of its device."""
    for source in sources():
        if is_within(source.as_posix(), "ops/backends"):
            continue
        importing = [name for name in imported_modules(source) if is_within(name, "ops/backends")]
        assert not importing, f"{source} imports {', '.join(importing)}"
        text = (ROOT / source).read_text()
        named = DEVICE_NAMES & set(re.findall(r"\w+", text))
        assert not named, f"{source} names {', '.join(sorted(named))}"
        if source.as_posix() not in NAMES_INSTRUCTION_SETS:
            assert INSTRUCTION_SET.search(text) is None, f"{source} names an instruction set or the CPU's library"


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


def test_an_api_process_runs_without_numpy() -> None:
    """Its memory counts once per worker; FastAPI needs as much as NumPy would."""
    script = "import fastdeploy.entrypoints.openai.api_server, sys; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
