# SPDX-License-Identifier: Apache-2.0
"""Reads what ptxas says about kernels (`-Xptxas=-v`), and computes how many of their warps a multiprocessor holds."""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

LAUNCHES = Path(__file__).with_name("gpu_launches.csv")
REGISTERS = 65536  # of a multiprocessor, and the most that a block may have
_REGISTER_UNIT, _WARP_UNIT, _SHARED_UNIT, _RESERVED_SHARED = 256, 4, 128, 1024
_COMPILED = re.compile(
    r"Compiling entry function '(\w+)' for 'sm_(\d+)a?'.*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Multiprocessor:
    """What a multiprocessor of an architecture holds."""

    max_warps: int
    max_blocks: int
    shared_bytes: int


MULTIPROCESSORS = {
    80: Multiprocessor(64, 32, 164 * 1024),
    86: Multiprocessor(48, 16, 100 * 1024),
    87: Multiprocessor(48, 16, 164 * 1024),
    89: Multiprocessor(48, 24, 100 * 1024),
    90: Multiprocessor(64, 32, 228 * 1024),
    100: Multiprocessor(64, 32, 228 * 1024),
    103: Multiprocessor(64, 32, 228 * 1024),
    120: Multiprocessor(48, 24, 100 * 1024),
    121: Multiprocessor(48, 24, 100 * 1024),
}


@dataclass(frozen=True)
class LaunchShape:
    """A block as a kernel is launched with it; its shared memory is dynamic."""

    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel for one architecture.

    Attributes:
        family: the source's name without its ending.
        name: with template arguments, without parameters.
        static_shared_bytes, stack_bytes, spilled_bytes: per block, per thread, per thread.
    """

    family: str
    name: str
    architecture: int
    registers: int
    static_shared_bytes: int
    stack_bytes: int
    spilled_bytes: int

    def occupancy(self, shape: LaunchShape) -> float | None:
        """Return the share of a multiprocessor's warps that run; None for an architecture that is not listed."""
        limits = MULTIPROCESSORS.get(self.architecture)
        if limits is None:
            return None
        warps = -(-shape.threads // 32)
        registers = _round_up(self.registers * 32, _REGISTER_UNIT)
        shared = _round_up(shape.shared_bytes + self.static_shared_bytes, _SHARED_UNIT) + _RESERVED_SHARED
        by_registers = REGISTERS // registers // _WARP_UNIT * _WARP_UNIT // warps
        blocks = min(limits.max_blocks, limits.max_warps // warps, by_registers, limits.shared_bytes // shared)
        return blocks * warps / limits.max_warps


def read_output(family: str, output: str) -> list[CompiledKernel]:
    """Return the kernels of one source that ptxas has compiled, by its output."""
    found = _COMPILED.findall(output)
    names = _demangle([symbol for symbol, *_ in found])
    kernels = []
    for name, (_, architecture, stack, stores, loads, registers, rest) in zip(names, found):
        shared = re.search(r"(\d+) bytes smem", rest)
        counts = int(registers), int(shared[1]) if shared else 0, int(stack), int(stores) + int(loads)
        kernels.append(CompiledKernel(family, name, int(architecture), *counts))
    return kernels


def short_name(demangled: str) -> str:
    """Return a kernel's name without namespaces, result and parameters, equal for nvcc and g++.

    >>> short_name("void _GLOBAL__N__1_4_x_cu_2::product<(int)2, true>(fd::gpu::In<float>, int)")
    'product<2, true>'
    """
    depth, end = 0, len(demangled)
    text = demangled.replace("(anonymous namespace)", "anonymous")
    text = re.sub(r"\((?:unsigned )?[\w:]+\)(-?\w+)", r"\1", text)  # casts of template arguments
    for place, character in enumerate(text):
        depth += (character == "<") - (character == ">")
        if character == "(" and depth == 0:
            end = place
            break
    else:
        end = len(text)
    text = text[:end]
    outside = text.partition("<")[0]
    name = re.split(r"::|\s", outside)[-1]
    arguments = re.sub(r"(\d)u\b", r"\1", text[len(outside) :])
    arguments = re.sub(r"(?:\w+::)+", "", arguments)
    return name + arguments


def read_launches() -> dict[str, LaunchShape]:
    """Return how kernels are launched, by name, as scripts/make_gpu_table.py has seen it in the emulator."""
    if not LAUNCHES.exists():
        return {}
    with LAUNCHES.open(newline="") as file:
        return {
            row["kernel"]: LaunchShape(int(row["threads"]), int(row["shared_bytes"])) for row in csv.DictReader(file)
        }


def find_problems(kernels: Iterable[CompiledKernel], launches: Mapping[str, LaunchShape]) -> list[str]:
    """Return one line per kernel that spills registers, or whose blocks need more of them than there are."""
    problems = []
    for kernel in kernels:
        where, shape = f"{kernel.family}.cu: {kernel.name} for sm_{kernel.architecture}", launches.get(kernel.name)
        if kernel.spilled_bytes:
            problems.append(f"{where} spills {kernel.spilled_bytes} bytes of registers")
        if shape and shape.threads * _round_up(kernel.registers, 8) > REGISTERS:
            problems.append(f"{where} cannot be launched: {shape.threads} threads of {kernel.registers} registers")
    return problems


def table_rows(kernels: Iterable[CompiledKernel], launches: Mapping[str, LaunchShape]) -> list[tuple[str, ...]]:
    """Return the table of kernels: a head, and a row for each; what depends on an unknown launch is empty."""
    rows = [("family", "kernel", "for", "registers", "spilled bytes", "threads", "shared bytes", "occupancy")]
    for kernel in sorted(kernels, key=lambda kernel: (kernel.family, kernel.name, kernel.architecture)):
        shape = launches.get(kernel.name)
        occupancy = kernel.occupancy(shape) if shape else None
        rows.append(
            (
                kernel.family,
                kernel.name,
                f"sm_{kernel.architecture}",
                str(kernel.registers),
                str(kernel.spilled_bytes),
                str(shape.threads) if shape else "",
                str(shape.shared_bytes + kernel.static_shared_bytes) if shape else str(kernel.static_shared_bytes),
                "" if occupancy is None else f"{occupancy:.0%}",
            )
        )
    return rows


def format_table(rows: list[tuple[str, ...]]) -> str:
    """Return rows as lines of aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _demangle(symbols: list[str]) -> list[str]:
    if not symbols:
        return []
    done = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True)
    return [short_name(line) for line in done.stdout.splitlines()]


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
