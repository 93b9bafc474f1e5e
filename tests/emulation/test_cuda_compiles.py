# SPDX-License-Identifier: Apache-2.0
"""The same sources compile for GPUs, without spilled registers; they run on none here."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from custom_ops.tools import gpu_library
from custom_ops.tools.compiler import compile_all
from custom_ops.tools.ptxas import find_problems, read_launches, read_output

ROOT = Path(__file__).parents[2]
OTHERS = ("custom_ops/gpu_ops/runtime.cu", "tests/emulation/kernel.cc", "tests/ops/gpu/tiles.cc")
SOURCES = [*gpu_library.gpu_kernels(), *(ROOT / name for name in OTHERS)]


def find_nvcc() -> str:
    """Return nvcc, or an empty string if there is none that is new enough."""
    try:
        return gpu_library.find_nvcc("")
    except SystemExit:
        return ""


pytestmark = [pytest.mark.nightly, pytest.mark.skipif(not find_nvcc(), reason="there is no nvcc 12.8 or newer")]


@pytest.mark.parametrize("source", SOURCES, ids=[path.stem for path in SOURCES])
def test_a_source_compiles_for_every_architecture_without_spills(source: Path) -> None:
    nvcc = find_nvcc()
    job = gpu_library.nvcc_job(nvcc, source, gpu_library.targets_of("all", nvcc))
    compile_all([job])
    assert "warning" not in job.read_log()
    kernels = read_output(source.stem, job.read_log())
    assert find_problems(kernels, read_launches()) == []
    assert {kernel.architecture for kernel in kernels} in ({80, 90, 100}, set())


def test_the_library_loads_where_there_is_no_driver_and_says_so() -> None:
    path, _ = gpu_library.build_gpu("all")
    library = ctypes.CDLL(str(path))
    library.fd_library_hash.restype = library.fd_last_error.restype = ctypes.c_char_p
    assert library.fd_library_hash().decode() == gpu_library.gpu_source_hash()
    count = ctypes.c_int()
    if library.fd_device_count(ctypes.byref(count)):
        accepted = ("driver too old", "there is no NVIDIA driver", "cudaGetDeviceCount: ")
        assert library.fd_last_error().decode().startswith(accepted)
