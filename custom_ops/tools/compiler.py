# SPDX-License-Identifier: Apache-2.0
"""Compiles native sources into objects, which are kept under build/objects and named by a digest of all they depend on.

An object is compiled again only when its source, one of our headers that it includes, or a flag has changed, comments
excepted. setup.py, the builds of GPU kernels and the emulator share it.
"""

from __future__ import annotations

import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OPS = ROOT / "custom_ops"
OBJECTS = ROOT / "build" / "objects"
VERSION = runpy.run_path(str(ROOT / "fastdeploy" / "version.py"))["__version__"]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
SOURCE_SUFFIXES = (".h", ".cc", ".cu")
COMPILER = os.environ.get("CXX", "g++").split()


def digest(*parts: str | bytes) -> str:
    """Return 16 hexadecimal digits that name the given contents."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part.encode() if isinstance(part, str) else part)
        state.update(b"\0")
    return state.hexdigest()[:16]


def hash_of_folders(*names: str) -> str:
    """Return the hash of all sources in these folders, comments excepted; other files there do not count."""
    files = sorted(path for name in names for path in (OPS / name).iterdir() if path.suffix in SOURCE_SUFFIXES)
    return digest(*(part for path in files for part in (str(path.relative_to(OPS)), code(path))))


@cache
def code(path: Path) -> str:
    """Return a source without its comments: to change one compiles nothing."""
    return re.sub(r'\s*//[^"\n]*$', "", path.read_text(), flags=re.MULTILINE)


@cache
def contents(path: Path) -> str:
    """Return the code of a source and of all our headers that it includes, directly or not."""
    files: dict[Path, str] = {}
    queue = [path]
    while queue:
        file = queue.pop()
        if file not in files:
            files[file] = code(file)
            includes = re.findall(r'#include "([^"]+)"', files[file])
            queue += [OPS / name for name in includes if (OPS / name).exists()]
    return "\0".join(files[file] for file in sorted(files))


def folder(name: str) -> list[Path]:
    """Return the sources of one folder."""
    return sorted((OPS / name).glob("*.cc"))


@dataclass(frozen=True)
class Job:
    """One object to compile with `command` into `target`, whose name contains a digest of everything it depends on.

    Attributes:
        keeps_log: what the compiler says is kept beside the object instead of being shown.
    """

    name: str
    target: Path
    command: list[str]
    keeps_log: bool = False

    @property
    def log(self) -> Path | None:
        """Return the file with what the compiler has said."""
        return self.target.with_suffix(".log") if self.keeps_log else None

    def read_log(self) -> str:
        """Return what the compiler has said; nothing if that is not kept."""
        return "" if self.log is None else self.log.read_text()


def paddle_folder() -> Path:
    """Return the folder of the package paddle, which is not imported."""
    found = find_spec("paddle")
    if found is None or found.origin is None:
        raise SystemExit("fastdeploy needs paddlepaddle to compile: pip install paddlepaddle")
    return Path(found.origin).parent


def paddle_include_flags() -> list[str]:
    """Return the compile flags for Paddle's headers."""
    include = paddle_folder() / "include"
    return ["-isystem", str(include), "-isystem", str(include / "third_party")]


def paddle_version() -> str:
    """Return the version of Paddle, which `paddle.__version__` is when it runs."""
    return str(runpy.run_path(str(paddle_folder() / "version" / "__init__.py"))["full_version"])


def run(command: list[str], target: Path, log: Path | None = None) -> None:
    """Run a command that writes `target`, unless the file exists; it gets its name only when it is complete.

    Args:
        log: file for what the command says; it is shown if the command fails.
    """
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    streams = {} if log is None else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run([*command, "-o", str(partial)], check=False, cwd=ROOT, text=True, **streams)
    if done.returncode:
        raise SystemExit(f"{done.stdout or ''}{' '.join(command)} failed with status {done.returncode}")
    if log is not None:
        log.write_text(done.stdout)
    partial.replace(target)


def compile_all(jobs: list[Job]) -> None:
    """Compile the objects that are missing, the largest sources first, with one line of progress for each."""
    if shutil.which(COMPILER[0]) is None:
        raise SystemExit("fastdeploy needs a C++17 compiler: install g++ (Debian, Ubuntu: apt-get install g++)")
    missing = {job.target: job for job in jobs if not job.target.exists()}
    ordered = sorted(missing.values(), key=lambda job: -(ROOT / job.command[-1]).stat().st_size)

    def compile_one(number: int, job: Job) -> None:
        sys.stdout.write(f"[{number}/{len(ordered)}] {job.name}\n")  # print would write the end of the line separately
        sys.stdout.flush()
        run(job.command, job.target, job.log)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, range(1, len(ordered) + 1), ordered))


def install(library: Path, target: Path) -> None:
    """Replace a library; a process that has already mapped the old file keeps it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.copyfile(library, fresh)
    fresh.replace(target)
