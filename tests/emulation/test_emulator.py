# SPDX-License-Identifier: Apache-2.0
"""The emulator computes what a kernel computes on a GPU, counts its traffic, and refuses a kernel that is broken."""

from __future__ import annotations

import ctypes
import re
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
    """Return a copy that begins with a sector of memory, as allocations on a device do."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    begin = -memory.ctypes.data % 64
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

    def run(self, mutant: int = 0, seed: int = 0) -> Result:
        self.library.fd_emulation_configure(ctypes.c_uint64(seed), int(self.has_checks))
        a, b = (aligned((matrix.view(np.uint32) >> 16).astype(np.uint16)) for matrix in (self.a, self.b))
        pieces, out = (aligned(np.full(shape, np.nan, np.float32)) for shape in ((PIECES, 128), (16, 8)))
        arrivals, counts = np.zeros(1, np.int32), np.zeros(2, np.int32)
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (a, b, pieces, arrivals, counts, out)]
        failed = self.library.fd_test_product(mutant, *pointers, DEPTH)
        fault = self.library.fd_emulation_fault().decode() if failed else ""
        return Result(fault, out, counts.tolist(), int(arrivals[0]))


@pytest.fixture(scope="module")
def checked() -> Kernel:
    return Kernel(has_checks=True)


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
    checked.run()
    values = (ctypes.c_int64 * 10)()
    checked.library.fd_emulation_counters(values)
    launches, blocks, barriers, mma, read, written, read_sectors, written_sectors, wavefronts, least = values
    assert (launches, blocks) == (1, PIECES)
    assert barriers == PIECES * (3 * 2 + 1 + 2), "two per stage, one before the sums, two in last_block"
    assert mma == PIECES * 3 * 2 * 2, "stages, warps, steps"
    inputs = 24 * DEPTH * 2  # a and b, each once
    assert read == inputs + PIECES * 128 * 4
    assert written == PIECES * 128 * 4 + 128 * 4
    assert (read_sectors * 32, written_sectors * 32) == (read, written), "no byte of a sector is left out"
    assert wavefronts == least > 0, "the swizzle keeps the rows of a matrix in different banks"


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
