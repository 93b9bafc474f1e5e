# SPDX-License-Identifier: Apache-2.0
"""Writes the table of compiled GPU kernels in docs/design/gpu-kernels.md; needs nvcc.

    python -m scripts.make_gpu_table [--launches]

With --launches, the tests of GPU operators first run in this process, some minutes, and the blocks that the emulator
has seen are written to custom_ops/tools/gpu_launches.csv, from which the build and the table take shared memory and
occupancy.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
from collections.abc import Iterable, Mapping
from pathlib import Path

from custom_ops.tools.compiler import ROOT
from custom_ops.tools.emulated_library import build_emulated_gpu
from custom_ops.tools.gpu_library import build_gpu, find_nvcc, nvcc_version
from custom_ops.tools.ptxas import LAUNCHES, CompiledKernel, LaunchShape, read_launches, short_name

PAGE = ROOT / "docs" / "design" / "gpu-kernels.md"
BEGIN, END = "<!-- table: made by scripts/make_gpu_table.py -->", "<!-- end of table -->"
HEAD = ("kernel", "registers", "threads", "shared memory, bytes", "occupancy, %")
TESTS = "tests/ops/gpu"


def observe_launches() -> dict[str, LaunchShape]:
    """Run the tests of GPU operators, and return the largest block of each kernel that they have launched.

    Raises:
        SystemExit: a test fails.
    """
    import pytest

    if pytest.main(["-q", "-p", "no:xdist", str(ROOT / TESTS)]):
        raise SystemExit(f"{TESTS}: a test failed")
    launches: dict[str, LaunchShape] = {}
    for has_checks in (False, True):
        library = ctypes.CDLL(str(build_emulated_gpu(has_checks)))
        library.fd_emulation_launches.restype = ctypes.c_char_p
        for name, shape in parse_launches(library.fd_emulation_launches().decode()).items():
            known = launches.get(name, shape)
            shared_bytes = max(known.shared_bytes, shape.shared_bytes)
            launches[name] = LaunchShape(max(known.threads, shape.threads), shared_bytes)
    return launches


def parse_launches(text: str) -> dict[str, LaunchShape]:
    """Return what fd_emulation_launches reports, by the names of kernels."""
    launches = {}
    for line in text.splitlines():
        threads, shared_bytes, signature = line.split(" ", 2)
        launches[short_name(signature)] = LaunchShape(int(threads), int(shared_bytes))
    return launches


def write_launches(launches: Mapping[str, LaunchShape], path: Path) -> None:
    """Write the file that `read_launches` reads."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("kernel", "threads", "shared_bytes"))
        writer.writerows((name, shape.threads, shape.shared_bytes) for name, shape in sorted(launches.items()))


def table(kernels: Iterable[CompiledKernel], launches: Mapping[str, LaunchShape]) -> str:
    """Return a row for each kernel, with the figures of its architectures in ascending order, once if they are equal.

    A cell is empty if no test launches the kernel.
    """
    by_name: dict[tuple[str, str], list[CompiledKernel]] = {}
    for kernel in sorted(kernels, key=lambda kernel: kernel.architecture):
        by_name.setdefault((kernel.family, kernel.name), []).append(kernel)
    lines = [f"| {' | '.join(HEAD)} |", "| --- " + "| ---: " * (len(HEAD) - 1) + "|"]
    for (_, name), variants in sorted(by_name.items()):
        shape = launches.get(name)
        cells = [f"`{name}`", _merge(str(variant.registers) for variant in variants)]
        if shape is None:
            cells += [""] * 3
        else:
            shared_bytes = (f"{shape.shared_bytes + variant.static_shared_bytes:,}" for variant in variants)
            occupancies = (100 * (variant.occupancy(shape) or 0) for variant in variants)
            cells += [str(shape.threads), _merge(shared_bytes), _merge(f"{share:.0f}" for share in occupancies)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _merge(values: Iterable[str]) -> str:
    values = list(values)
    return values[0] if len(set(values)) == 1 else " / ".join(values)


def fresh_page() -> str:
    """Return the page with a table of the present sources, compiled here for all architectures."""
    nvcc = find_nvcc("the table of GPU kernels")
    _, kernels = build_gpu("all")
    before, rest = PAGE.read_text().split(BEGIN)
    compiler = f"nvcc {nvcc_version(nvcc)}:"
    return f"{before}{BEGIN}\n\n{compiler}\n\n{table(kernels, read_launches())}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Write the page, and with --launches the file of launches before it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", action="store_true", help="run the tests of GPU operators to see launches")
    if parser.parse_args().launches:
        write_launches(observe_launches(), LAUNCHES)
    PAGE.write_text(fresh_page())


if __name__ == "__main__":
    main()
