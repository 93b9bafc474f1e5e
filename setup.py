# SPDX-License-Identifier: Apache-2.0
"""Builds the native libraries: the Paddle operators (`ops/_cpu`) and the host structures without Paddle (`ops/_host`).

A source that mentions FD_ISA is compiled once per instruction-set path, every other source once; a source named
`paddle*` can include the headers of Paddle. Objects and linked libraries are kept under build/objects and are compiled
again only when a source, one of the headers that it includes, or a flag has changed, comments excepted.

FD_BUILD_PATHS selects the paths: `all` (the default: wheels and tests) or `native` (the best path of this machine and
the portable one, which takes half the time).
"""

import hashlib
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
OPS = ROOT / "custom_ops"
OBJECTS = ROOT / "build" / "objects"
VERSION = runpy.run_path(str(ROOT / "fastdeploy" / "version.py"))["__version__"]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
COMPILER = os.environ.get("CXX", "g++").split()
COMMON_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-pthread", "-Wall", "-Wno-maybe-uninitialized", "-Icustom_ops"]
COMMON_FLAGS += ["-ffp-contract=off", "-fno-math-errno"]  # a compiler that fuses where it likes would break exactness
AVX2_FLAGS = ["-mavx2", "-mfma", "-mbmi2", "-mprfchw"]
AVX512_FLAGS = [*AVX2_FLAGS, *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni"))]
AVX512_FLAGS += ["-Wno-uninitialized"]  # GCC 12 warns about its own header; the other paths compile the same sources
X86_PATHS = {  # each with the tuning (custom_ops/cpu_ops/tuning.h) of the processors that run it
    "avx2": [*AVX2_FLAGS, "-DFD_TUNING=zen3"],
    "avx512": [*AVX512_FLAGS, "-DFD_TUNING=emerald_rapids"],
    "avx512_bf16": [*AVX512_FLAGS, "-mavx512bf16", "-DFD_ISA_AVX512=1", "-DFD_TUNING=zen5"],
}
ALL_PATHS = {
    "portable": ["-DFD_TUNING=generic"],
    **(X86_PATHS if platform.machine() in ("x86_64", "AMD64") else {}),
}


def digest(*parts: str | bytes) -> str:
    """Return 16 hexadecimal digits that name the given contents."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part.encode() if isinstance(part, str) else part)
        state.update(b"\0")
    return state.hexdigest()[:16]


def build_paths() -> dict[str, list[str]]:
    """Return the flags of every path to build, by name."""
    return select_paths(os.environ.get("FD_BUILD_PATHS", "all"))


@cache
def select_paths(choice: str) -> dict[str, list[str]]:
    """Return the flags of the paths that a value of FD_BUILD_PATHS selects."""
    if choice == "all":
        return ALL_PATHS
    if choice == "native":
        return {path: flags for path, flags in ALL_PATHS.items() if path in ("portable", best_path())}
    raise SystemExit(f"FD_BUILD_PATHS: expected 'all' or 'native', got {choice!r}")


def best_path() -> str:
    """Return the path that the library would run on this machine, by asking the code that selects it."""
    sources = [OPS / "tools" / "print_best_path.cc", OPS / "common" / "isa.cc"]
    command = [*COMPILER, *COMMON_FLAGS, *have_flags(ALL_PATHS), *(str(path.relative_to(ROOT)) for path in sources)]
    program = OBJECTS / f"print_best_path.{digest(*map(contents, sources), *command)}"
    run(command, program)
    environment = {name: value for name, value in os.environ.items() if name != "FD_CPU_ISA"}
    return subprocess.run([program], env=environment, check=True, capture_output=True, text=True).stdout.strip()


def have_flags(paths: Iterable[str]) -> list[str]:
    """Return the macros that name the paths of a library in its sources."""
    return [f"-DFD_HAVE_{path.upper()}=1" for path in paths]


@cache
def source_hash(*paths: str) -> str:
    """Return the hash of the package's native sources and of the paths to build, which a library reports as its own."""
    return digest(*paths, hash_of_folders("common", "cpu_ops", "host"))


def hash_of_folders(*names: str) -> str:
    """Return the hash of all sources in these folders, comments excepted."""
    files = sorted(path for name in names for path in (OPS / name).iterdir())
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


@dataclass(frozen=True)
class Job:
    """One object to compile with `command` into `target`, whose name contains a digest of everything it depends on."""

    name: str
    target: Path
    command: list[str]


class Library(Extension):
    """A shared library."""

    def __init__(self, name: str, sources: list[Path], uses_paddle: bool = False) -> None:
        super().__init__(name, [str(path.relative_to(ROOT)) for path in sources], language="c++")
        self.uses_paddle = uses_paddle

    def jobs(self, paths: dict[str, list[str]]) -> list[Job]:
        """Return the objects that this library is linked from, for these paths."""
        includes = paddle_include_flags() if self.uses_paddle else []
        return [job for source in self.sources for job in compile_jobs(source, includes, paths)]

    def link(self, jobs: list[Job], flags: Iterable[str]) -> Path:
        """Link the compiled objects and return the library."""
        objects = [str(job.target.relative_to(ROOT)) for job in jobs]
        command = [*COMPILER, "-shared", "-pthread", *objects, *flags]
        linked = OBJECTS / f"{self.name}.{digest(*command)}{SUFFIX}"
        run(command, linked)
        return linked


def import_paddle() -> ModuleType:
    """Import Paddle without its warning that ccache is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module("paddle")


def paddle_include_flags() -> list[str]:
    """Return the compile flags for Paddle's headers, which are found without importing Paddle."""
    found = find_spec("paddle")
    if found is None or found.origin is None:
        raise SystemExit("fastdeploy needs paddlepaddle to compile: pip install paddlepaddle")
    include = Path(found.origin).parent / "include"
    return ["-isystem", str(include), "-isystem", str(include / "third_party")]


def paddle_link_flags() -> list[str]:
    """Return the link flags for libpaddle."""
    base = Path(import_paddle().__file__).parent / "base"
    return [f"-L{base}", "-Wl,--no-as-needed", "-l:libpaddle.so", "-Wl,--as-needed"]


def compile_jobs(source: str, paddle_includes: list[str], paths: dict[str, list[str]]) -> list[Job]:
    """Return the objects of one source: one per path, or a single one."""
    path = ROOT / source
    text = contents(path)
    flags = paddle_includes if path.name.startswith("paddle") else ["-fvisibility=hidden"]
    if "FD_SOURCE_HASH" in text:
        flags = [*flags, f'-DFD_SOURCE_HASH="{source_hash(*paths)}"', f'-DFD_VERSION="{VERSION}"']
    if "FD_HAVE" in text:
        flags = [*flags, *have_flags(paths)]
    jobs = []
    for isa, isa_flags in paths.items() if "FD_ISA" in path.read_text() else [("once", [])]:
        if isa != "once":
            isa_flags = [f"-DFD_ISA={isa}", f"-DFD_ISA_{isa.upper()}=1", *isa_flags]
        command = [*COMPILER, *COMMON_FLAGS, *flags, *isa_flags, "-c", source]
        target = OBJECTS / f"{path.stem}.{isa}.{digest(text, *command)}.o"
        jobs.append(Job(path.stem if isa == "once" else f"{path.stem} {isa}", target, command))
    return jobs


def run(command: list[str], target: Path) -> None:
    """Run a command that writes `target`, unless the file exists; it gets its name only when it is complete."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    subprocess.run([*command, "-o", str(partial)], check=True, cwd=ROOT)
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
        run(job.command, job.target)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, range(1, len(ordered) + 1), ordered))


def install(library: Path, target: Path) -> None:
    """Replace a library; a process that has already mapped the old file keeps it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.copyfile(library, fresh)
    fresh.replace(target)


class BuildLibraries(build_ext):
    """Compiles with flags per source, which the compile step of distutils cannot do."""

    def build_extensions(self) -> None:
        jobs = {library.name: library.jobs(build_paths()) for library in self.extensions}
        compile_all([job for of_library in jobs.values() for job in of_library])
        for library in self.extensions:
            linked = library.link(jobs[library.name], paddle_link_flags() if library.uses_paddle else [])
            install(linked, Path(self.get_ext_fullpath(library.name)))


def folder(name: str) -> list[Path]:
    """Return the sources of one folder."""
    return sorted((OPS / name).glob("*.cc"))


def build_for_path(name: str, sources: list[Path], path: str, link_flags: Iterable[str] = ()) -> Path:
    """Compile sources for one path and link them; return the library, which is not part of the package.

    Benchmarks and tests build their libraries with it; objects are cached like those of the package.
    """
    library = Library(name, sources)
    jobs = library.jobs({path: ALL_PATHS[path]})
    compile_all(jobs)
    return library.link(jobs, link_flags)


def build_emulated(name: str, kernels: list[Path], has_checks: bool, has_paddle_device: bool = False) -> Path:
    """Compile GPU kernels for the emulator and link them with it; return the library.

    Args:
        has_checks: each access of a kernel calls the emulator, which compares it with those before it.
        has_paddle_device: the library is a plug-in that makes the emulated device known to Paddle.
    """
    common = [*COMPILER, "-std=c++17", "-fPIC", "-pthread", "-g", "-Wall", "-Icustom_ops", "-ffp-contract=off"]
    common += ["-fno-math-errno"]  # a square root is an instruction, not a call
    flags_of = {path: ["-O2"] for path in (*folder("emulation"), OPS / "gpu_ops" / "errors.cc", *kernels)}
    flags_of[OPS / "common" / "version.cc"] = [f'-DFD_SOURCE_HASH="{gpu_source_hash()}"', f'-DFD_VERSION="{VERSION}"']
    if has_checks:
        flags_of |= {path: ["-O1", "-fsanitize=thread"] for path in kernels}
    if has_paddle_device:
        flags_of[OPS / "gpu_ops" / "paddle_device.cc"] = ["-O2", *paddle_include_flags()]
    jobs = []
    for path, flags in flags_of.items():
        command = [*common, "-fvisibility=hidden", *flags, "-x", "c++", "-c", str(path.relative_to(ROOT))]
        target = OBJECTS / f"{path.stem}.emulated.{digest(contents(path), *command)}.o"
        jobs.append(Job(f"{path.stem} emulated", target, command))
    compile_all(jobs)
    link = [*COMPILER, "-shared", "-pthread", *(str(job.target.relative_to(ROOT)) for job in jobs), "-ldl"]
    linked = OBJECTS / f"{name}.{digest(*link)}{SUFFIX}"
    run(link, linked)
    return linked


def gpu_kernels() -> list[Path]:
    """Return the sources of the GPU operators, which the emulator can execute."""
    return [path for path in sorted((OPS / "gpu_ops").glob("*.cu")) if path.stem != "runtime"]


def gpu_source_hash() -> str:
    """Return the hash that the GPU library and the emulated one report as theirs."""
    return hash_of_folders("common", "gpu_ops")


def build_emulated_gpu(has_checks: bool) -> Path:
    """Build the GPU operators for the emulator, as a plug-in for Paddle in a folder of its own; return the library."""
    linked = build_emulated(f"gpu{'_checked' if has_checks else ''}", gpu_kernels(), has_checks, has_paddle_device=True)
    plug_in = ROOT / "build" / "emulated" / linked.name.removesuffix(SUFFIX) / "libfd_gpu.so"
    if not plug_in.exists():
        install(linked, plug_in)
    return plug_in


LIBRARIES = [
    Library("fastdeploy.ops._cpu", [*folder("cpu_ops"), *folder("common")], uses_paddle=True),
    Library("fastdeploy.ops._host", [*folder("host"), OPS / "common" / "version.cc"]),
]

if __name__ == "__main__":
    setup(ext_modules=LIBRARIES, cmdclass={"build_ext": BuildLibraries})
