# SPDX-License-Identifier: Apache-2.0
"""Builds GPU kernels for the emulator, with the C++ compiler of the host."""

from __future__ import annotations

from pathlib import Path

from custom_ops.tools.compiler import (
    COMPILER,
    OBJECTS,
    OPS,
    ROOT,
    SUFFIX,
    Job,
    compile_all,
    contents,
    digest,
    folder,
    install,
    paddle_include_flags,
    run,
)
from custom_ops.tools.gpu_library import gpu_kernels, version_flags

CHECKS = ("-fsanitize=thread,shift-exponent,integer-divide-by-zero,float-cast-overflow",)
"""What calls functions of custom_ops/emulation/hooks.cc: accesses, and operations whose results differ on a GPU."""


def build_emulated(name: str, kernels: list[Path], has_checks: bool, has_paddle_device: bool = False) -> Path:
    """Compile GPU kernels for the emulator and link them with it; return the library.

    Args:
        has_checks: each access of a kernel calls the emulator, which compares it with those before it, and so does each
            shift, division and conversion that is undefined.
        has_paddle_device: the library is a plug-in that makes the emulated device known to Paddle.
    """
    common = [*COMPILER, "-std=c++17", "-fPIC", "-pthread", "-g", "-Wall", "-Icustom_ops", "-ffp-contract=off"]
    common += ["-fno-math-errno"]  # a square root is an instruction, not a call
    flags_of = {path: ["-O2"] for path in (*folder("emulation"), OPS / "gpu_ops" / "errors.cc", *kernels)}
    flags_of[OPS / "common" / "version.cc"] = version_flags()
    if has_checks:
        flags_of |= {path: ["-O1", *CHECKS] for path in kernels}
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


def build_emulated_gpu(has_checks: bool) -> Path:
    """Build the GPU operators for the emulator, as a plug-in for Paddle in a folder of its own; return the library."""
    linked = build_emulated(f"gpu{'_checked' if has_checks else ''}", gpu_kernels(), has_checks, has_paddle_device=True)
    plug_in = ROOT / "build" / "emulated" / linked.name.removesuffix(SUFFIX) / "libfd_gpu.so"
    if not plug_in.exists():
        install(linked, plug_in)
    return plug_in
