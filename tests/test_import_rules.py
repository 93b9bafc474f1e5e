# SPDX-License-Identifier: Apache-2.0
"""Which packages may import which (docs/design/architecture.md), and which run without Paddle."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fastdeploy

ROOT = Path(fastdeploy.__file__).parent
ALLOWED = {  # by the longest prefix of a file's path; every package may import itself
    "core": set[str](),
    "config": {"core"},
    "gguf": {"core", "config"},
    "hub": {"core", "config", "gguf"},
    "metrics": {"core", "config", "version"},
    "detokenize": {"core", "config", "metrics"},
    "ipc": {"core", "config", "metrics"},
    "scheduler": {"core", "config", "metrics", "ipc", "kv_cache", "version"},
    "ops": {"core", "config", "version"},
    "layers": {"core", "config", "ops"},
    "models": {"core", "config", "gguf", "ops", "layers"},
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
    "gguf",
    "hub",
    "detokenize",
    "ipc",
    "metrics",
    "scheduler",
    "spec_decode/adaptive",
    "entrypoints/openai",
    "entrypoints/cli",
)


def sources() -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py") if len(path.relative_to(ROOT).parts) > 1)


def imported_modules(source: Path) -> Iterator[str]:
    """Yield what a file imports of this package, anywhere in it, as a path: "core/request/Request"."""
    for node in ast.walk(ast.parse((ROOT / source).read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            names = ["." * node.level + f"{node.module or ''}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] in ("fastdeploy", "") and len(parts) > 1:
                yield "/".join(parts[1:]) if parts[0] else name


def is_within(path: str, package: str) -> bool:
    return path == package or path.startswith(package + "/")


def rule_of(source: Path) -> str | None:
    """Return the package of ALLOWED that a file belongs to."""
    return max(
        (package for package in ALLOWED if is_within(source.with_suffix("").as_posix(), package)), key=len, default=None
    )


def forbidden_imports(source: Path) -> list[str]:
    """Return the imports of a file that ALLOWED does not permit; relative imports never are."""
    package = rule_of(source)
    if package is None:
        return []
    allowed = {*ALLOWED[package], package}
    return sorted(name for name in imported_modules(source) if not any(is_within(name, one) for one in allowed))


def outside_backends() -> list[Path]:
    return [source for source in sources() if not is_within(source.as_posix(), "ops/backends")]


def test_every_file_belongs_to_a_package_with_a_rule() -> None:
    without = [source for source in sources() if rule_of(source) is None and source.name != "__init__.py"]
    assert [str(source) for source in without if not is_within(source.as_posix(), "assets")] == []


def test_packages_import_only_what_their_rule_permits() -> None:
    assert {str(source): found for source in sources() if (found := forbidden_imports(source))} == {}


def test_only_backends_import_backends() -> None:
    """A backend is found by the name of its device."""
    imports = {str(source): sorted(imported_modules(source)) for source in outside_backends()}
    found = {source: [name for name in names if is_within(name, "ops/backends")] for source, names in imports.items()}
    assert {source: names for source, names in found.items() if names} == {}


def test_only_backends_use_the_names_of_a_device() -> None:
    words = {str(source): set(re.findall(r"\w+", (ROOT / source).read_text())) for source in outside_backends()}
    assert {source: sorted(DEVICE_NAMES & names) for source, names in words.items() if DEVICE_NAMES & names} == {}


def test_only_backends_name_instruction_sets_or_the_library_of_the_cpu() -> None:
    others = [source for source in outside_backends() if source.as_posix() not in NAMES_INSTRUCTION_SETS]
    found = {str(source): INSTRUCTION_SET.findall((ROOT / source).read_text()) for source in others}
    assert {source: names for source, names in found.items() if names} == {}


def test_packages_without_paddle_do_not_load_it() -> None:
    """One process per package: what another one has loaded would hide it."""
    assert {package: loaded for package in WITHOUT_PADDLE if (loaded := loaded_frameworks(package))} == {}


def loaded_frameworks(package: str) -> str:
    """Import all modules of a package in a new process; return which of Paddle and PyTorch that loads."""
    modules = [
        ".".join(("fastdeploy", *source.with_suffix("").parts)).removesuffix(".__init__")
        for source in sources()
        if is_within(source.as_posix(), package)
    ]
    assert modules, package
    script = f"import {', '.join(modules)}, sys; print(*sys.modules.keys() & {{'paddle', 'torch'}})"
    return subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120
    ).stdout.strip()


def test_an_api_process_runs_without_numpy() -> None:
    """Its memory counts once per worker; FastAPI needs as much as NumPy would."""
    script = "import fastdeploy.entrypoints.openai.api_server, sys; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_only_one_module_imports_redis_and_a_server_without_cluster_loads_it_not() -> None:
    pattern = re.compile(r"^\s*(?:from|import) redis\b", re.MULTILINE)
    found = [str(source) for source in sources() if pattern.search((ROOT / source).read_text())]
    assert found == ["scheduler/redis_client.py"]
    script = "import fastdeploy.entrypoints.openai.api_server, sys; assert 'redis' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
