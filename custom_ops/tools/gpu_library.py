# SPDX-License-Identifier: Apache-2.0
"""Builds the library of GPU operators with nvcc.

FD_BUILD_GPU selects what is compiled: nothing (unset or 0), code for the GPUs of this machine (`native`), or for every
architecture of ARCHITECTURES with PTX for later ones (`all`), where a kernel that spills registers is an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from custom_ops.tools.compiler import (
    COMPILER,
    OBJECTS,
    OPS,
    ROOT,
    VERSION,
    Job,
    compile_all,
    contents,
    digest,
    hash_of_folders,
    install,
    paddle_include_flags,
    run,
)
from custom_ops.tools.ptxas import CompiledKernel, find_problems, format_table, read_launches, read_output, table_rows

ARCHITECTURES = (80, 90, 100)
LEAST_ARCHITECTURE = min(ARCHITECTURES)
LEAST_NVCC = (12, 8)
NAME = "libfd_gpu.so"
CUDA_FOLDER = "/usr/local/cuda"  # where the toolkit lies if nothing says otherwise
NVCC_FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true", "-Icustom_ops"]
NVCC_FLAGS += ["-Xptxas=-v", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-ffp-contract=off", "-cudart=static"]
_NEEDS = f"nvcc {LEAST_NVCC[0]}.{LEAST_NVCC[1]} or newer"


def gpu_kernels() -> list[Path]:
    """Return the sources of the GPU operators, which the emulator can execute."""
    return [path for path in sorted((OPS / "gpu_ops").glob("*.cu")) if path.stem != "runtime"]


def gpu_source_hash() -> str:
    """Return the hash that the GPU library and the emulated one report as theirs."""
    return hash_of_folders("common", "gpu_ops")


def version_flags() -> list[str]:
    """Return the macros of common/version.cc."""
    return [f'-DFD_SOURCE_HASH="{gpu_source_hash()}"', f'-DFD_VERSION="{VERSION}"']


def build_and_install(folder: Path, keeps_current: bool) -> None:
    """Build what FD_BUILD_GPU selects into `folder`. If that is nothing, remove what an earlier build has left there.

    Args:
        keeps_current: a library of the present sources stays.

    Raises:
        SystemExit: it cannot be built; says why in one line.
    """
    choice, target = os.environ.get("FD_BUILD_GPU", "0") or "0", folder / NAME
    if choice not in ("0", "native", "all"):
        raise SystemExit(f"FD_BUILD_GPU: expected 0, native or all, got {choice!r}")
    if choice != "0":
        library, kernels = build_gpu(choice)
        install(library, target)
        print(format_table(table_rows(kernels, read_launches())), flush=True)
    elif target.exists() and not (keeps_current and gpu_source_hash().encode() in target.read_bytes()):
        print(f"removing {target}, an earlier build: FD_BUILD_GPU is not set", flush=True)
        target.unlink()


def build_gpu(choice: str) -> tuple[Path, list[CompiledKernel]]:
    """Compile the operators for `native` or `all`; return the library and what ptxas says about its kernels.

    Raises:
        SystemExit: there is no suitable compiler or no GPU, or a kernel spills registers and `choice` is `all`.
    """
    nvcc = find_nvcc(f"FD_BUILD_GPU={choice}")
    targets = targets_of(choice, nvcc)
    cuda_jobs = [nvcc_job(nvcc, path, targets) for path in [*gpu_kernels(), OPS / "gpu_ops" / "runtime.cu"]]
    host_jobs = [host_job(OPS / "gpu_ops" / "errors.cc"), host_job(OPS / "common" / "version.cc", version_flags())]
    host_jobs.append(host_job(OPS / "gpu_ops" / "paddle_device.cc", paddle_include_flags()))
    compile_all([*cuda_jobs, *host_jobs])
    kernels = [kernel for job in cuda_jobs for kernel in read_output(Path(job.command[-1]).stem, job.read_log())]
    problems = find_problems(kernels, read_launches())
    if problems and choice == "all":
        raise SystemExit("FD_BUILD_GPU=all: " + "; ".join(problems))
    objects = [str(job.target.relative_to(ROOT)) for job in (*cuda_jobs, *host_jobs)]
    command = [nvcc, "-shared", "-cudart=static", *targets, *objects]
    linked = OBJECTS / f"gpu.{digest(*command)}.so"
    run(command, linked)
    return linked, kernels


def nvcc_job(nvcc: str, source: Path, targets: list[str]) -> Job:
    """Return how nvcc compiles a source; its output, with what ptxas says, is kept beside the object."""
    command = [nvcc, *NVCC_FLAGS, *targets, "-x", "cu", "-c", str(source.relative_to(ROOT))]
    target = OBJECTS / f"{source.stem}.gpu.{digest(contents(source), nvcc_version(nvcc), *command)}.o"
    return Job(f"{source.stem} for GPUs", target, command, keeps_log=True)


def host_job(source: Path, flags: list[str] | None = None) -> Job:
    """Return how the compiler of the host compiles a source of the GPU library."""
    common = [*COMPILER, "-std=c++17", "-O2", "-fPIC", "-Wall", "-Icustom_ops", "-fvisibility=hidden"]
    command = [*common, *(flags or []), "-c", str(source.relative_to(ROOT))]
    target = OBJECTS / f"{source.stem}.gpu_host.{digest(contents(source), *command)}.o"
    return Job(f"{source.stem} for GPUs", target, command)


def targets_of(choice: str, nvcc: str) -> list[str]:
    """Return the flags of nvcc that select architectures.

    Raises:
        SystemExit: there is no GPU here, or one that nvcc or the kernels do not know.
    """
    if choice == "all":
        flags = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ARCHITECTURES]
        return [*flags, f"-gencode=arch=compute_{ARCHITECTURES[-1]},code=compute_{ARCHITECTURES[-1]}"]
    found = architectures_here(nvcc)
    if not found:
        raise SystemExit("FD_BUILD_GPU=native: found no GPU (by nvidia-smi); FD_BUILD_GPU=all needs none")
    for number in found:
        if number < LEAST_ARCHITECTURE:
            raise SystemExit(f"FD_BUILD_GPU=native: the kernels need sm_{LEAST_ARCHITECTURE}, this GPU is sm_{number}")
        if f"sm_{number}" not in _output(nvcc, "--list-gpu-code"):
            raise SystemExit(
                f"FD_BUILD_GPU=native: this GPU is sm_{number}, which {nvcc} does not know; take a newer one"
            )
    return [f"-gencode=arch=compute_{number},code=sm_{number}" for number in found]


def architectures_here(nvcc: str) -> list[int]:
    """Return the architectures of this machine's GPUs, ascending, as nvidia-smi or else nvcc finds them."""
    output = _output("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    found = {int(major) * 10 + int(minor) for major, minor in re.findall(r"^(\d+)\.(\d)$", output, re.MULTILINE)}
    if not found:
        query = Path(nvcc).resolve().with_name("__nvcc_device_query")
        found = {int(number) for number in re.findall(r"\d+", _output(str(query)))}
    return sorted(found)


def find_nvcc(purpose: str) -> str:
    """Return nvcc: of the path, of CUDA_HOME or of /usr/local/cuda.

    Raises:
        SystemExit: there is none, or it is too old.
    """
    folders = [os.environ.get("CUDA_HOME", ""), CUDA_FOLDER]
    candidates = [shutil.which("nvcc"), *(shutil.which(f"{folder}/bin/nvcc") for folder in folders if folder)]
    nvcc = next(filter(None, candidates), None)
    if nvcc is None:
        raise SystemExit(f"{purpose} needs {_NEEDS} (CUDA toolkit), which is neither in PATH nor in CUDA_HOME")
    version = nvcc_version(nvcc)
    if tuple(map(int, version.split("."))) < LEAST_NVCC:
        raise SystemExit(f"{purpose} needs {_NEEDS}, but {nvcc} is {version}")
    return nvcc


def nvcc_version(nvcc: str) -> str:
    """Return the version of nvcc, such as 12.8."""
    found = re.search(r"release (\d+\.\d+)", _output(nvcc, "--version"))
    return found[1] if found else "0.0"


def _output(*command: str) -> str:
    """Return what a command prints; nothing if it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
