# SPDX-License-Identifier: Apache-2.0
"""Builds the native libraries: the Paddle operators (`ops/_cpu`) and the host structures without Paddle (`ops/_host`).

A source that mentions FD_ISA is compiled once per instruction-set path, every other source once; a source named
`paddle*` can include the headers of Paddle. Objects and linked libraries are kept under build/objects and are compiled
again only when a source, one of the headers that it includes, or a flag has changed, comments excepted.

FD_BUILD_PATHS selects the paths: `all` (the default: wheels and tests) or `native` (the best path of this machine and
the portable one, which takes half the time). FD_BUILD_GPU selects what is compiled for GPUs (custom_ops/tools).
"""

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

if str(Path(__file__).resolve().parent) not in sys.path:  # pip runs this file without its folder in the path
    sys.path.append(str(Path(__file__).resolve().parent))

from custom_ops.tools import gpu_library
from custom_ops.tools.compiler import (
    COMPILER,
    OBJECTS,
    OPS,
    ROOT,
    SUFFIX,
    VERSION,
    Job,
    compile_all,
    contents,
    digest,
    folder,
    hash_of_folders,
    install,
    paddle_folder,
    paddle_include_flags,
    paddle_version,
    run,
)

COMMON_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-pthread", "-Wall", "-Wno-maybe-uninitialized", "-Icustom_ops"]
COMMON_FLAGS += ["-ffp-contract=off", "-fno-math-errno"]  # a compiler that fuses where it likes would break exactness
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c", "-mbmi2", "-mprfchw"]
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


def source_hash() -> str:
    """Return the hash of the package's native sources, which a library reports as its own.

    The paths to build are no part of it: two nodes whose libraries run the same path compute the same bits.
    """
    return hash_of_folders("common", "cpu_ops", "host")


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


def paddle_link_flags() -> list[str]:
    """Return the link flags for libpaddle."""
    base = paddle_folder() / "base"
    return [f"-L{base}", "-Wl,--no-as-needed", "-l:libpaddle.so", "-Wl,--as-needed"]


def compile_jobs(source: str, paddle_includes: list[str], paths: dict[str, list[str]]) -> list[Job]:
    """Return the objects of one source: one per path, or a single one."""
    path = ROOT / source
    text = contents(path)
    flags = paddle_includes if path.name.startswith("paddle") else ["-fvisibility=hidden"]
    if "FD_SOURCE_HASH" in text:
        flags = [*flags, f'-DFD_SOURCE_HASH="{source_hash()}"', f'-DFD_VERSION="{VERSION}"']
    if "FD_PADDLE_VERSION" in text:
        flags = [*flags, f'-DFD_PADDLE_VERSION="{paddle_version()}"']
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


class BuildLibraries(build_ext):
    """Compiles with flags per source, which the compile step of distutils cannot do."""

    def run(self) -> None:
        super().run()
        root = ROOT if self.inplace else ROOT / self.build_lib
        gpu_library.build_and_install(root / "fastdeploy" / "ops" / "gpu_library", keeps_current=bool(self.inplace))

    def build_extensions(self) -> None:
        jobs = {library.name: library.jobs(build_paths()) for library in self.extensions}
        compile_all([job for of_library in jobs.values() for job in of_library])
        for library in self.extensions:
            linked = library.link(jobs[library.name], paddle_link_flags() if library.uses_paddle else [])
            install(linked, Path(self.get_ext_fullpath(library.name)))


def build_for_path(name: str, sources: list[Path], path: str, link_flags: Iterable[str] = ()) -> Path:
    """Compile sources for one path and link them; return the library, which is not part of the package.

    Benchmarks and tests build their libraries with it; objects are cached like those of the package.
    """
    library = Library(name, sources)
    jobs = library.jobs({path: ALL_PATHS[path]})
    compile_all(jobs)
    return library.link(jobs, link_flags)


LIBRARIES = [
    Library("fastdeploy.ops._cpu", [*folder("cpu_ops"), *folder("common")], uses_paddle=True),
    Library("fastdeploy.ops._host", [*folder("host"), OPS / "common" / "threads.cc", OPS / "common" / "version.cc"]),
]

if __name__ == "__main__":
    setup(ext_modules=LIBRARIES, cmdclass={"build_ext": BuildLibraries})
