# SPDX-License-Identifier: Apache-2.0
"""What a GPU can do at most is measured with kernels that copy and multiply as they say."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import paddle
import pytest

from fastdeploy.ops.backends.gpu import peaks
from fastdeploy.ops.backends.gpu.library import active
from tests.ops.gpu.emulated import count, emulate, load

BLOCK = 256  # threads


@pytest.mark.parametrize("num_chunks", [1, 255, 257, 1000])
def test_chunks_are_copied_by_any_number_of_blocks_on_the_emulated_gpu(num_chunks: int) -> None:
    source = paddle.to_tensor(np.random.default_rng(1).integers(0, 256, 16 * num_chunks).astype(np.uint8))
    for num_blocks in (1, 3, 8):
        emulate()
        target = paddle.zeros([16 * num_chunks], "uint8")
        active().launch("fd_copy_chunks", source, target, num_chunks, num_blocks)
        assert np.array_equal(target.numpy(), source.numpy())


def sums_of(num_steps: int) -> np.ndarray:
    """Return what 2 blocks have added up."""
    sums = paddle.full([2 * BLOCK], float("nan"), "float32")
    active().launch("fd_multiply_registers", sums, 2, num_steps)
    return sums.numpy()


def test_each_step_adds_the_same_products_on_the_emulated_gpu() -> None:
    emulate()
    once = sums_of(1)
    assert (once >= 2 * 4 * 4 * 16).all(), "32 sums of 16 products, each at least 1"
    assert np.allclose(sums_of(4), 4 * once, rtol=1e-6)


def test_the_operations_of_a_step_are_counted_by_the_emulator() -> None:
    emulate()
    counted = count(lambda: sums_of(3))
    assert counted["mma"] * 2 * 16 * 8 * 16 == 2 * 3 * peaks._OPS_PER_STEP


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets how long each call takes."""

    def set_seconds(each: float) -> None:
        ticks = itertools.count()
        monkeypatch.setattr(peaks.time, "perf_counter", lambda: next(ticks) * each)

    return set_seconds


def test_peaks_are_per_second_of_one_call_on_the_emulated_gpu(seconds: Callable[[float], None]) -> None:
    emulate()
    library = load(True)
    seconds(0.5)
    assert peaks.copied_bytes_per_second(library, 4096) == 2 * 4096 / 0.5
    seconds(0.25)
    num_blocks = library.properties().num_multiprocessors * 4
    assert peaks.products_per_second(library, 1) == num_blocks * peaks._OPS_PER_STEP / 0.25
