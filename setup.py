# SPDX-License-Identifier: Apache-2.0
"""Builds the two native libraries: the Paddle operators (`ops/_cpu`) and the Paddle-free host structures (`ops/_host`).

A source that mentions FD_ISA is compiled once per instruction-set path, every other source once; one that is called
`paddle*` sees the headers of Paddle. Objects and the
linked library are kept under build/ and made again only when a source, a header or a flag has changed.
"""

import hashlib
import os
import platform
import runpy
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
OPS = ROOT / "custom_ops"
VERSION = runpy.run_path(str(ROOT / "fastdeploy" / "version.py"))["__version__"]
COMMON_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-pthread", "-Wall", "-Wno-maybe-uninitialized"]
COMMON_FLAGS += ["-ffp-contract=off", "-fno-math-errno"]  # a compiler that fuses where it likes would break exactness
AVX2_FLAGS = ["-mavx2", "-mfma", "-mbmi2", "-mprfchw"]
AVX512_FLAGS = [f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni")]
AVX512_FLAGS += ["-Wno-uninitialized"]  # GCC 12 warns of its own header; the other paths compile the same sources
X86_PATHS = {
    "avx2": AVX2_FLAGS,
    "avx512": [*AVX2_FLAGS, *AVX512_FLAGS],
    "avx512_bf16": [*AVX2_FLAGS, *AVX512_FLAGS, "-mavx512bf16", "-DFD_ISA_AVX512=1"],
}
PATHS = {"portable": [], **(X86_PATHS if platform.machine() in ("x86_64", "AMD64") else {})}


def digest(*parts: str | bytes) -> str:
    """Return 16 hexadecimal digits that name the given contents."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part.encode() if isinstance(part, str) else part)
        state.update(b"\0")
    return state.hexdigest()[:16]


def source_hash() -> str:
    """Hash every native source, so that a library can say what it was built from."""
    files = sorted(path for path in OPS.rglob("*") if path.suffix in (".h", ".cc"))
    return digest(*(part for path in files for part in (path.relative_to(OPS).as_posix(), path.read_bytes())))


def headers_digest(folder: Path) -> str:
    return digest(*(path.read_bytes() for path in sorted([*(OPS / "common").glob("*.h"), *folder.glob("*.h")])))


class Library(Extension):
    """A shared library made of the sources of one folder and of `common/`."""

    def __init__(self, name: str, folder: Path, uses_paddle: bool) -> None:
        sources = sorted([*folder.glob("*.cc"), *(OPS / "common").glob("*.cc")])
        super().__init__(name, [os.path.relpath(path, ROOT) for path in sources], language="c++")
        self.folder, self.uses_paddle = folder, uses_paddle

    def paddle_flags(self) -> tuple[list[str], list[str]]:
        """Return compile flags for Paddle's headers and link flags for libpaddle."""
        import paddle

        base = Path(paddle.__file__).parent / "base"
        includes = [paddle.sysconfig.get_include(), str(Path(paddle.sysconfig.get_include()) / "third_party")]
        compile_flags = [flag for path in includes for flag in ("-isystem", path)]
        return compile_flags, [f"-L{base}", "-Wl,--no-as-needed", "-l:libpaddle.so", "-Wl,--as-needed"]


def compile_jobs(library: Library, paddle_flags: list[str]) -> list[tuple[Path, list[str]]]:
    """Return (object, command) of every translation unit; an object is named after all that it depends on."""
    compiler = [
        *os.environ.get("CXX", "g++").split(),
        *COMMON_FLAGS,
        f"-fmacro-prefix-map={ROOT}/=",
        f"-I{OPS}",
        *paths_flags(),
    ]
    headers = headers_digest(library.folder)
    jobs = []
    for source in (ROOT / path for path in library.sources):
        text = source.read_text()
        flags = list(paddle_flags) if source.name.startswith("paddle") else ["-fvisibility=hidden"]
        if "FD_SOURCE_HASH" in text:
            flags += [f'-DFD_SOURCE_HASH="{source_hash()}"', f'-DFD_VERSION="{VERSION}"']
        for path, path_flags in PATHS.items() if "FD_ISA" in text else {"once": []}.items():
            isa = [f"-DFD_ISA={path}", f"-DFD_ISA_{path.upper()}=1", *path_flags] if path != "once" else []
            command = [*compiler, *flags, *isa, "-c", str(source)]
            target = ROOT / "build" / "objects" / f"{source.stem}.{path}.{digest(text, headers, *command)}.o"
            jobs.append((target, command))
    return jobs


def paths_flags() -> list[str]:
    return [f"-DFD_HAVE_{path.upper()}=1" for path in PATHS]


def run(command: list[str], target: Path) -> None:
    """Run a command that makes `target`, which appears only when it is whole."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    subprocess.run([*command, "-o", str(partial)], check=True)
    partial.replace(target)


class BuildLibraries(build_ext):
    """Compiles with flags per source, which distutils' own compile step cannot."""

    def build_extension(self, ext: Library) -> None:
        if shutil.which(os.environ.get("CXX", "g++").split()[0]) is None:
            raise SystemExit("fastdeploy needs a C++17 compiler: install g++ (Debian, Ubuntu: apt-get install g++)")
        compile_flags, link_flags = ext.paddle_flags() if ext.uses_paddle else ([], [])
        jobs = compile_jobs(ext, compile_flags)
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda job: run(job[1], job[0]), jobs))
        objects = [str(target) for target, _ in jobs]
        linker = [*os.environ.get("CXX", "g++").split(), "-shared", "-pthread", *objects, *link_flags]
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        linked = ROOT / "build" / "objects" / f"{ext.name}.{digest(*linker)}{suffix}"
        run(linker, linked)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(f"{target.name}.{os.getpid()}")  # a running process keeps the file it has mapped
        shutil.copyfile(linked, fresh)
        fresh.replace(target)


LIBRARIES = [Library("fastdeploy.ops._cpu", OPS / "cpu_ops", uses_paddle=True)]
if any((OPS / "host").glob("*.cc")):
    LIBRARIES.append(Library("fastdeploy.ops._host", OPS / "host", uses_paddle=False))

setup(ext_modules=LIBRARIES, cmdclass={"build_ext": BuildLibraries})
