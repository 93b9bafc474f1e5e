# SPDX-License-Identifier: Apache-2.0
"""FD_BUILD_GPU: what is compiled for GPUs, what is refused, and what the build says about kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from custom_ops.tools import gpu_library
from custom_ops.tools.compiler import Job
from custom_ops.tools.ptxas import CompiledKernel, LaunchShape, find_problems, read_output, short_name, table_rows

OUTPUT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN41_GLOBAL__N__a72f718f_9_kernel_cc_5954a0567productILi2EEEvi' for 'sm_80'
ptxas info    : Function properties for _ZN41_GLOBAL__N__a72f718f_9_kernel_cc_5954a0567productILi2EEEvi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 48 registers, used 1 barriers, 404 bytes cmem[0], 8 bytes cmem[2]
ptxas info    : Compile time = 47.938 ms
ptxas info    : Compiling entry function '_ZN41_GLOBAL__N__a72f718f_9_kernel_cc_5954a0567productILi2EEEvi' for 'sm_90'
ptxas info    : Function properties for _ZN41_GLOBAL__N__a72f718f_9_kernel_cc_5954a0567productILi2EEEvi
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 128 bytes smem, 404 bytes cmem[0]
"""
FITS = CompiledKernel("kernel", "product<2>", 80, 48, 0, 0, 0)
SPILLS = CompiledKernel("kernel", "product<2>", 90, 255, 128, 16, 20)


def make_tool(folder: Path, name: str, script: str) -> None:
    """Write a program of this name, which stands for a tool."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which nvcc and nvidia-smi are looked for."""
    monkeypatch.setattr(gpu_library, "CUDA_FOLDER", str(tmp_path / "none"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def refusal(choice: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """Return the line with which a build is refused."""
    monkeypatch.setenv("FD_BUILD_GPU", choice)
    with pytest.raises(SystemExit) as error:
        gpu_library.build_and_install(folder, keeps_current=True)
    return str(error.value)


def test_without_nvcc_the_build_says_what_it_needs(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal("all", monkeypatch, tools)
    expected = "FD_BUILD_GPU=all needs nvcc 12.8 or newer (CUDA toolkit), which is neither in PATH nor in CUDA_HOME"
    assert message == expected


def test_an_old_nvcc_is_refused_with_its_version(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tool(tools, "nvcc", "echo 'Cuda compilation tools, release 12.4, V12.4.131'")
    message = refusal("all", monkeypatch, tools)
    assert message == f"FD_BUILD_GPU=all needs nvcc 12.8 or newer, but {tools}/nvcc is 12.4"


def test_nvcc_is_also_found_in_cuda_home(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tools / "cuda" / "bin"
    home.mkdir(parents=True)
    make_tool(home, "nvcc", "echo 'release 13.0, V13.0.88'")
    monkeypatch.setenv("CUDA_HOME", str(home.parent))
    assert gpu_library.find_nvcc("") == str(home / "nvcc")


def test_an_unknown_choice_is_refused(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal("yes", monkeypatch, tools) == "FD_BUILD_GPU: expected 0, native or all, got 'yes'"


NVCC = """case "$1" in --version) echo 'release 12.8, V12.8.61';; --list-gpu-code) printf 'sm_90\\nsm_100\\n';; esac"""


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("exit 1", "found no GPU (by nvidia-smi); FD_BUILD_GPU=all needs none"),
        ("echo 7.5", "the kernels need sm_80, this GPU is sm_75"),
        ("echo 10.3", "this GPU is sm_103, which"),
    ],
)
def test_native_needs_a_gpu_that_kernels_and_nvcc_know(
    tools: Path, monkeypatch: pytest.MonkeyPatch, query: str, message: str
) -> None:
    make_tool(tools, "nvcc", NVCC)
    make_tool(tools, "nvidia-smi", query)
    assert refusal("native", monkeypatch, tools).startswith(f"FD_BUILD_GPU=native: {message}")


def test_native_compiles_for_each_architecture_of_this_machine_once(tools: Path) -> None:
    make_tool(tools, "nvcc", NVCC)
    make_tool(tools, "nvidia-smi", "printf '10.0\\n9.0\\n9.0\\n'")
    targets = gpu_library.targets_of("native", str(tools / "nvcc"))
    assert targets == ["-gencode=arch=compute_90,code=sm_90", "-gencode=arch=compute_100,code=sm_100"]


def test_nvcc_finds_the_gpu_where_there_is_no_nvidia_smi(tools: Path) -> None:
    make_tool(tools, "nvcc", NVCC)
    make_tool(tools, "nvidia-smi", "exit 1")
    make_tool(tools, "__nvcc_device_query", "echo 90")
    assert gpu_library.architectures_here(str(tools / "nvcc")) == [90]


def test_all_has_code_for_three_architectures_and_ptx_for_later_ones() -> None:
    *code, ptx = gpu_library.targets_of("all", "nvcc")
    assert [flag.rpartition("code=")[2] for flag in code] == ["sm_80", "sm_90", "sm_100"]
    assert ptx == "-gencode=arch=compute_100,code=compute_100"


def test_every_kernel_is_compiled_without_contraction_or_flushing(tools: Path) -> None:
    make_tool(tools, "nvcc", NVCC)
    job: Job = gpu_library.nvcc_job(str(tools / "nvcc"), gpu_library.gpu_kernels()[0], [])
    assert {"-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true", "-cudart=static"} <= {*job.command}


def test_another_nvcc_makes_another_object(tools: Path) -> None:
    targets = []
    for version in ("12.8", "13.0"):
        make_tool(tools, "nvcc", f"echo 'release {version}, V'")
        targets.append(gpu_library.nvcc_job(str(tools / "nvcc"), gpu_library.gpu_kernels()[0], []).target)
    assert targets[0] != targets[1]


def test_a_library_stays_only_while_its_sources_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FD_BUILD_GPU", raising=False)
    library = tmp_path / gpu_library.NAME
    for content, keeps_current, stays in [
        (gpu_library.gpu_source_hash(), True, True),
        (gpu_library.gpu_source_hash(), False, False),
        ("other sources", True, False),
    ]:
        library.write_text(content)
        gpu_library.build_and_install(tmp_path, keeps_current)
        assert library.exists() == stays


def test_what_ptxas_says_is_read_for_each_architecture() -> None:
    assert read_output("kernel", OUTPUT) == [FITS, SPILLS]


@pytest.mark.parametrize(
    "demangled",
    [
        "void (anonymous namespace)::product<2, true>(fd::gpu::In<float>, int)",
        "void _GLOBAL__N__a_9_kernel_cc_5::product<2, true>(fd::gpu::In<float>, int)",
        "(anonymous namespace)::product<2, true>(fd::gpu::In<unsigned short>, int (*)(int))",
        "void _GLOBAL__N__a_9_kernel_cc_5::product<(_GLOBAL__N__a_9_kernel_cc_5::Kind)2, true>(int)",
        "void (anonymous namespace)::product<((anonymous namespace)::Kind)2, true>(int)",
    ],
)
def test_a_kernel_has_the_same_name_from_both_compilers(demangled: str) -> None:
    assert short_name(demangled) == "product<2, true>"


def test_spills_and_blocks_with_too_many_registers_are_problems() -> None:
    launches = {"product<2>": LaunchShape(512, 0)}
    assert find_problems([FITS], launches) == []
    assert find_problems([SPILLS], launches) == [
        "kernel.cu: product<2> for sm_90 spills 20 bytes of registers",
        "kernel.cu: product<2> for sm_90 cannot be launched: 512 threads of 255 registers",
    ]


@pytest.mark.parametrize(
    ("architecture", "registers", "shape", "expected"),
    [
        (80, 32, LaunchShape(256, 0), 1.0),  # 8 blocks of 8 warps
        (80, 64, LaunchShape(256, 0), 0.5),  # 65,536 / (64 x 256) = 4 blocks
        (80, 32, LaunchShape(256, 49152), 0.375),  # 164 KiB / 49 KiB = 3 blocks
        (90, 32, LaunchShape(256, 49152), 0.5),  # 228 KiB / 49 KiB = 4 blocks
        (80, 16, LaunchShape(32, 0), 0.5),  # 32 blocks at most
        (89, 32, LaunchShape(256, 0), 1.0),  # 6 blocks of 8 warps
        (75, 32, LaunchShape(256, 0), None),
    ],
)
def test_occupancy_is_that_of_the_scarcest_resource(
    architecture: int, registers: int, shape: LaunchShape, expected: float | None
) -> None:
    kernel = CompiledKernel("kernel", "product", architecture, registers, 0, 0, 0)
    assert kernel.occupancy(shape) == expected


def test_the_table_has_a_row_for_each_kernel_and_architecture() -> None:
    head, *rows = table_rows([SPILLS, FITS], {"product<2>": LaunchShape(128, 8192)})
    assert head[:4] == ("family", "kernel", "for", "registers")
    assert rows == [
        ("kernel", "product<2>", "sm_80", "48", "0", "128", "8192", "62%"),
        ("kernel", "product<2>", "sm_90", "255", "20", "128", "8320", "12%"),
    ]
