# SPDX-License-Identifier: Apache-2.0
"""The table of compiled GPU kernels: what the emulator reports of launches, and what nvcc says of the sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from custom_ops.tools import gpu_library, ptxas
from custom_ops.tools.compiler import OPS
from custom_ops.tools.ptxas import CompiledKernel, LaunchShape, read_launches
from scripts import make_gpu_table
from scripts.make_gpu_table import PAGE, parse_launches, table, write_launches

KERNEL = re.compile(r"^FD_KERNEL (?:FD_LAUNCH_BOUNDS\([^)]*\) )?void (\w+)\(", re.MULTILINE)
NVCC = re.compile(r"^nvcc (\d+\.\d+):$", re.MULTILINE)


def kernels_of_sources() -> set[str]:
    """Return the names of all kernels, without template arguments."""
    sources = [path for path in (OPS / "gpu_ops").iterdir() if path.suffix in (".cu", ".h") and path.name != "device.h"]
    return {name for path in sources for name in KERNEL.findall(path.read_text())}


def test_the_file_of_launches_has_every_kernel_of_the_sources() -> None:
    names = {name.partition("<")[0] for name in read_launches()}
    assert names == kernels_of_sources(), "run python -m scripts.make_gpu_table --launches"


def test_the_page_has_kernels_of_the_sources_with_their_occupancy() -> None:
    rows = re.findall(r"^\| `(.+?)` \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows
    assert {name.partition("<")[0] for name, _ in rows} <= kernels_of_sources(), "run python -m scripts.make_gpu_table"
    assert [name for name, cells in rows if "" in map(str.strip, cells.split("|"))] == []


def test_launches_are_read_by_the_names_that_nvcc_gives() -> None:
    text = (
        "256 1024 void fd::gpu::(anonymous namespace)::product<2, true>(fd::gpu::In<float>, int)\n"
        "32 0 fd::gpu::(anonymous namespace)::count(fd::gpu::Out<int>)\n"
    )
    assert parse_launches(text) == {"product<2, true>": LaunchShape(256, 1024), "count": LaunchShape(32, 0)}


def test_launches_that_are_written_are_read_by_the_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launches = {"product<2, true>": LaunchShape(256, 1024), "count": LaunchShape(32, 0)}
    monkeypatch.setattr(ptxas, "LAUNCHES", tmp_path / "launches.csv")
    write_launches(launches, ptxas.LAUNCHES)
    assert read_launches() == launches


def test_architectures_share_a_cell_in_their_order() -> None:
    kernels = [CompiledKernel("a", "product", number, registers, 0, 0, 0) for number, registers in ((90, 40), (80, 64))]
    kernels.append(CompiledKernel("b", "unseen", 80, 10, 0, 0, 0))
    rows = table(kernels, {"product": LaunchShape(256, 2048)}).splitlines()[2:]
    assert rows == ["| `product` | 64 / 40 | 256 | 2,048 | 50 / 75 |", "| `unseen` | 10 |  |  |  |"]


@pytest.mark.nightly
def test_the_page_is_what_nvcc_says() -> None:
    try:
        nvcc = gpu_library.find_nvcc("")
    except SystemExit:
        pytest.skip("there is no nvcc 12.8 or newer")
    found = NVCC.search(PAGE.read_text())
    assert found
    if found[1] != gpu_library.nvcc_version(nvcc):
        pytest.skip(f"the page was made by nvcc {found[1]}")
    assert PAGE.read_text() == make_gpu_table.fresh_page(), "run python -m scripts.make_gpu_table"
