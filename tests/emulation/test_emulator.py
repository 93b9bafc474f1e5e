# SPDX-License-Identifier: Apache-2.0
"""The emulator computes what a kernel computes on a GPU, counts its traffic, and refuses a kernel that is broken."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from custom_ops.tools.emulated_library import build_emulated

HERE = Path(__file__).parent
SEEDS = range(4)
DEPTH = 528  # not a multiple of the piece of a block, nor of the stage of a loop; rows begin with a sector
PIECES = 3
FAR_BYTES = 8192  # more than a mutant misses an array by
FAULT = re.compile(r"product<\d+>(?:: block \(\d, 0, 0\)(?:, thread \d+(?:, \S+kernel\.cc:\d+)?)?)?: (.+)")
WRONG_RESULT = "a wrong result"
NO_BARRIER, UNREADY = "without a barrier between them", "(?:asynchronous copy|nothing has written)"
REFUSED = {
    "no barrier after the wait": f"{NO_BARRIER}|{UNREADY}",
    "no barrier before memory is used again": NO_BARRIER,
    "no wait": "reads what an asynchronous copy has not brought yet",
    "no commit": "reads what an asynchronous copy has not brought yet",
    "no mask": "reads outside of its arrays|beyond the end of an array",
    "one stage too many": WRONG_RESULT,
    "wrong stride": f"reads outside of its arrays|beyond the end of an array|{WRONG_RESULT}",
    "misaligned address": "not a multiple of the 16 bytes",
    "too little shared memory": "needs 7168 bytes of shared memory, the launch has 7164",
    "barrier in a branch": f"{NO_BARRIER}|wait forever",
    "two writers": f"has written, {NO_BARRIER}",
    "lane missing in a shuffle": "takes part in another operation than lanes of its warp",
    "copy read too early": "reads what an asynchronous copy has not brought yet|nothing has written",
    "output of another block": "reads what block \\d writes in this launch|nothing has written",
    "no barrier before sums are read": f"{NO_BARRIER}|nothing has written",
    "scratch read before it is written": "reads memory that nothing has written",
    "read-only load of what is written": "reads as read-only what this launch writes",
    "counter read": "reads a counter that this launch changes",
    "input written": "writes an array that is an input",
    "output exceeded": "writes outside of its arrays|beyond the end|has written in this launch",
    "end before a barrier": "ends while other threads wait|after other threads have ended|after other lanes have ended",
    "last wait too short": "reads what an asynchronous copy has not brought yet",
    "too few blocks counted": "nothing has written|writes in this launch",
    "no last block": f"{NO_BARRIER}|nothing has written|writes in this launch",
    "matrix in a branch": "wait forever|another operation",
    "shared memory exceeded": "writes outside of its arrays|beyond the end",
    "barrier of a warp for one of the block": f"{NO_BARRIER}|{UNREADY}",
    "part of a warp": "a block has whole warps and at most 1024 threads, got 56",
    "empty grid": "the grid is empty",
    "copy that nobody awaits": "ends with asynchronous copies that nobody waits for",
    "another barrier": "waits at another barrier than other threads",
    "division by zero": "divides an integer by zero",
    "shift by the width": "shifts by a negative number or by at least the width",
    "float beyond integers": "converts a number to an integer type that cannot hold it",
    "conversion of NaN": "converts a number to an integer type that cannot hold it",
}
"""What is broken, in the order of kernel.cc -> what the emulator says."""


@dataclass
class Result:
    """What a run of the kernel leaves behind; `fault` is empty if there is none."""

    fault: str
    out: np.ndarray
    counts: list[int]
    arrivals: int


def aligned(array: np.ndarray) -> np.ndarray:
    """Return a copy that begins with a sector of memory, as allocations on a device do, far from all other arrays."""
    memory = np.empty(array.nbytes + 64 + 2 * FAR_BYTES, np.uint8)
    begin = FAR_BYTES + -(memory.ctypes.data + FAR_BYTES) % 64
    copy = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class Kernel:
    """The kernel of kernel.cc with its inputs, whose products and sums are integers that fp32 represents."""

    def __init__(self, has_checks: bool) -> None:
        path = build_emulated(f"test_kernel_{has_checks}", [HERE / "kernel.cc"], has_checks)
        self.library = ctypes.CDLL(str(path))
        self.library.fd_emulation_fault.restype = ctypes.c_char_p
        self.has_checks = has_checks
        draw = np.random.default_rng(5)
        self.a, self.b = (draw.integers(-3, 4, (rows, DEPTH)).astype(np.float32) for rows in (16, 8))
        self.product = self.a @ self.b.T
        sums = [self.a[:, i : i + 192] @ self.b[:, i : i + 192].T for i in range(0, DEPTH, 192)]
        self.num_negative = sum(int((part < 0).sum()) for part in sums)

    def configure(self, seed: int) -> None:
        self.library.fd_emulation_configure(ctypes.c_uint64(seed), int(self.has_checks))

    def run(self, mutant: int = 0, seed: int = 0) -> Result:
        self.configure(seed)
        a, b = (aligned((matrix.view(np.uint32) >> 16).astype(np.uint16)) for matrix in (self.a, self.b))
        pieces, out = (aligned(np.full(shape, np.nan, np.float32)) for shape in ((PIECES, 128), (16, 8)))
        arrivals, counts = np.zeros(1, np.int32), np.zeros(2, np.int32)
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (a, b, pieces, arrivals, counts, out)]
        failed = self.library.fd_test_product(mutant, *pointers, DEPTH)
        fault = self.library.fd_emulation_fault().decode() if failed else ""
        return Result(fault, out, counts.tolist(), int(arrivals[0]))

    def count_blocks(
        self, grid: tuple[int, int, int], threads: int = 32, shared_bytes: int = 0
    ) -> tuple[int, int, str]:
        """Return the number of blocks that ran, the last of them, and the fault."""
        arrivals, result = np.zeros(1, np.int32), np.array([0, -1], np.int32)
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (arrivals, result)]
        failed = self.library.fd_test_count_blocks(*grid, threads, ctypes.c_size_t(shared_bytes), *pointers, None)
        fault = self.library.fd_emulation_fault().decode() if failed else ""
        return int(result[0]), int(result[1]), fault


@pytest.fixture(scope="module")
def checked() -> Kernel:
    return Kernel(has_checks=True)


@pytest.fixture(scope="module")
def fast() -> Kernel:
    return Kernel(has_checks=False)


@pytest.fixture(scope="module", params=[True, False], ids=["checked", "fast"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return Kernel(request.param)


def test_a_product_over_several_blocks_is_right_for_every_order(kernel: Kernel) -> None:
    for seed in SEEDS:
        result = kernel.run(seed=seed)
        assert result.fault == ""
        np.testing.assert_array_equal(result.out, kernel.product)
        assert result.counts == [kernel.num_negative, PIECES * 128 - kernel.num_negative]
        assert result.arrivals == 0, "the counter of last_block is ready for the next launch"


def test_traffic_is_counted(checked: Kernel) -> None:
    checked.library.fd_emulation_reset_counters()
    checked.library.fd_emulation_count_accesses(1)
    checked.run()
    checked.library.fd_emulation_count_accesses(0)
    values = (ctypes.c_int64 * 12)()
    checked.library.fd_emulation_counters(values, len(values))
    launches, blocks, barriers, mma, read, written, *others = values
    read_sectors, written_sectors, wavefronts, least, shared_wavefronts, least_shared = others
    assert (launches, blocks) == (1, PIECES)
    assert barriers == PIECES * (3 * 2 + 1 + 2), "two per stage, one before the sums, two in last_block"
    assert mma == PIECES * 3 * 2 * 2, "stages, warps, steps"
    inputs = 24 * DEPTH * 2  # a and b, each once
    assert read == inputs + PIECES * 128 * 4
    assert written == PIECES * 128 * 4 + 128 * 4
    assert (read_sectors * 32, written_sectors * 32) == (read, written), "no byte of a sector is left out"
    assert wavefronts == least > 0, "the swizzle keeps the rows of a matrix in different banks"
    stores, loads = PIECES * 2 * 4, PIECES * 2 * 2 * 2  # of sums: blocks, warps, sums of a thread; turns, warps
    assert least_shared == stores + loads
    assert shared_wavefronts == 2 * stores + loads, "stores of rows r and r + 4 of the sums wait for each other"


@pytest.mark.parametrize("mutant", range(1, len(REFUSED) + 1), ids=list(REFUSED))
def test_a_broken_kernel_is_refused(checked: Kernel, mutant: int) -> None:
    expected = [*REFUSED.values()][mutant - 1]
    for seed in SEEDS:
        result = checked.run(mutant, seed)
        if WRONG_RESULT in expected and not result.fault:
            assert not np.array_equal(result.out, checked.product)
            continue
        found = FAULT.fullmatch(result.fault)
        assert found and re.search(expected, found[1]), result.fault


def test_every_way_to_break_it_is_listed(checked: Kernel) -> None:
    assert checked.library.fd_test_num_mutants() == len(REFUSED) + 1


def test_a_fault_does_not_disturb_the_next_launch(checked: Kernel) -> None:
    run: Callable[..., Result] = checked.run
    assert run(mutant=2).fault
    np.testing.assert_array_equal(run().out, checked.product)


TOO_MUCH = [
    ({"grid": (1, 1, 1), "threads": 1056}, "a block has whole warps and at most 1024 threads, got 1056"),
    ({"grid": (1, 1, 1), "threads": 0}, "a block has whole warps and at most 1024 threads, got 0"),
    ({"grid": (1, 65536, 1)}, "the y and z of a grid are at most 65535, and x less than 2^31, got (1, 65536, 1)"),
    ({"grid": (1, 1, 65536)}, "the y and z of a grid are at most 65535, and x less than 2^31, got (1, 1, 65536)"),
    ({"grid": (2**31, 1, 1)}, "the y and z of a grid are at most 65535, and x less than 2^31, got (2147483648, 1, 1)"),
    *[({"grid": grid}, "the grid is empty") for grid in ((0, 1, 1), (1, 0, 1), (1, 1, 0))],
    (
        {"grid": (1, 1, 1), "shared_bytes": 99 * 1024 + 1},
        "a block has at most 101376 bytes of shared memory, got 101377",
    ),
]


@pytest.mark.parametrize(("launch", "expected"), TOO_MUCH)
def test_a_launch_beyond_the_limits_of_the_card_is_refused(kernel: Kernel, launch: dict, expected: str) -> None:
    assert kernel.count_blocks(**launch) == (0, -1, f"count_blocks: {expected}")


AT_THE_LIMITS = (
    {"grid": (1, 65535, 1)},
    {"grid": (1, 1, 65535)},
    {"grid": (2, 3, 4), "threads": 1024, "shared_bytes": 99 * 1024},
)


@pytest.mark.parametrize("launch", AT_THE_LIMITS)
def test_a_launch_at_the_limits_of_the_card_runs(fast: Kernel, launch: dict) -> None:
    num_blocks, last, fault = fast.count_blocks(**launch)
    assert (num_blocks, fault) == (np.prod(launch["grid"]), "")
    assert 0 <= last < num_blocks


def test_parameters_of_more_than_4_kib_do_not_compile(tmp_path: Path) -> None:
    root = HERE.parents[1]
    for words, is_refused in ((1023, False), (1025, True)):
        source = tmp_path / "large.cc"
        source.write_text(
            f"""#include "gpu_ops/device.h"
            struct Large {{ int words[{words}]; }};
            FD_KERNEL void kernel(Large) {{}}
            int run() {{ return fd::gpu::launch(kernel, {{1, 1, 1}}, 32, 0, nullptr, Large{{}}); }}"""
        )
        command = ["g++", "-std=c++17", "-Icustom_ops", "-fsyntax-only", str(source)]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=240)
        assert ("kMaxParameterBytes" in done.stderr) == is_refused == (done.returncode != 0)


def test_the_seed_changes_the_order_of_blocks(kernel: Kernel) -> None:
    def run(seed: int) -> int:
        kernel.library.fd_emulation_reset_counters()  # every launch of a process has an order of its own
        kernel.configure(seed)
        return kernel.count_blocks((8, 1, 1))[1]

    last = [run(seed) for seed in range(20)]
    assert [run(seed) for seed in range(20)] == last
    assert len(set(last)) > 4


@pytest.mark.parametrize("is_broken", [False, True])
def test_blocks_that_arrive_at_several_counters_are_ordered_by_each(checked: Kernel, is_broken: bool) -> None:
    for seed in SEEDS:
        checked.configure(seed)
        arrays = [np.zeros(size, np.int32) for size in (10, 2, 2)]
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in arrays]
        failed = checked.library.fd_test_arrive_twice(*pointers, 5, int(is_broken))
        if is_broken:
            fault = checked.library.fd_emulation_fault().decode()
            assert failed and re.search("nothing has written|writes in this launch", fault)
        else:
            assert not failed and arrays[2].tolist() == [10, 15]


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        (0, ""),
        (1, "reads a counter that this launch changes|has read, without a barrier"),
        (2, "changes memory that nothing has written"),
    ],
)
def test_what_is_changed_atomically_in_shared_memory_is_read_after_a_barrier(
    checked: Kernel, broken: int, fault: str
) -> None:
    numbers = np.arange(64, dtype=np.int32) // 3 % 7
    for seed in SEEDS:
        checked.configure(seed)
        arrays = [numbers, np.zeros(8, np.int32), np.zeros(1, np.uint32)]
        failed = checked.library.fd_test_count_remainders(*[a.ctypes.data_as(ctypes.c_void_p) for a in arrays], broken)
        if fault:
            assert failed and re.search(fault, checked.library.fd_emulation_fault().decode())
        else:
            assert not failed and arrays[1].tolist() == np.bincount(numbers, minlength=8).tolist()
            assert arrays[2].tolist() == [0b1111111]
