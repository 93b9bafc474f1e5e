# SPDX-License-Identifier: Apache-2.0
"""The environment chooses the build of the emulated library, its order and its checks when the backend is loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from custom_ops.tools.emulated_library import build_emulated
from fastdeploy.ops.backends.gpu import plugin
from fastdeploy.ops.backends.gpu.library import Address, DeviceError, DeviceLibrary, active
from fastdeploy.ops.backends.gpu_emulated.backend import EmulatedGpuBackend
from tests.ops.gpu.emulated import emulate

KERNEL = Path(__file__).parents[2] / "emulation" / "kernel.cc"
SEEDS = range(20)


class BackendOfTestKernels(EmulatedGpuBackend):
    """Loads the small kernels of tests/emulation, which show the order and break rules."""

    def library_path(self) -> Path:
        return build_emulated("test_kernel_True", [KERNEL], True)


def load(monkeypatch: pytest.MonkeyPatch, **variables: str) -> DeviceLibrary:
    """Load the backend anew in an environment."""
    for name in ("FD_EMULATION_SEED", "FD_EMULATION_CHECKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    BackendOfTestKernels().load()
    return active()


@pytest.fixture(autouse=True)
def other_tests_get_their_library() -> Iterator[None]:
    yield
    emulate()


def address(array: np.ndarray) -> Address:
    return Address(array.ctypes.data)


def last_block(library: DeviceLibrary) -> int:
    """Return the block that ran last of eight."""
    arrivals, result = np.zeros(1, np.int32), np.zeros(2, np.int32)
    library.call_void("fd_emulation_reset_counters")
    grid = [ctypes.c_uint(number) for number in (8, 1, 1, 32)]
    function = library._library.fd_test_count_blocks
    assert function(*grid, ctypes.c_size_t(0), *(ctypes.c_void_p(a.ctypes.data) for a in (arrivals, result)), None) == 0
    return int(result[1])


def test_the_seed_of_the_environment_is_the_order_of_emulated_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    of_environment = [last_block(load(monkeypatch, FD_EMULATION_SEED=str(seed))) for seed in SEEDS]
    library, expected = active(), []
    for seed in SEEDS:
        library.call_void("fd_emulation_configure", seed, 0)
        expected.append(last_block(library))
    assert of_environment == expected
    assert len(set(expected)) > 4
    assert last_block(load(monkeypatch)) == expected[0], "0 unless something else is said"


def test_the_environment_decides_whether_emulated_accesses_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = np.ones(4, np.float32), np.ones(4, np.float32)
    library = load(monkeypatch)
    library.launch("fd_test_add", address(a), address(b), address(a), 4)
    library = load(monkeypatch, FD_EMULATION_CHECKS="1")
    with pytest.raises(DeviceError, match="writes an array that is an input"):
        library.launch("fd_test_add", address(a), address(b), address(a), 4)


def test_the_environment_chooses_the_build_of_the_emulated_library(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []
    for value in ("0", "1"):
        monkeypatch.setenv("FD_EMULATION_CHECKS", value)
        paths.append(EmulatedGpuBackend().library_path())
    assert paths == [plugin.build_emulated(False), plugin.build_emulated(True)]
    assert paths[0] != paths[1]
