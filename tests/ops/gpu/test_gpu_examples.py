# SPDX-License-Identifier: Apache-2.0
"""Every operator of the registry that a GPU has, executed by the emulator: the reference's results in any order."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy.ops import registry
from fastdeploy.ops.backends.gpu.backend import GpuBackend
from tests.ops.gpu.emulated import SEEDS, emulate
from tests.ops.test_examples import CASES, PREPARATION, dtype_of, wide

KERNELS = GpuBackend.kernels.keys()
GPU_CASES = [(name, i) for name, i in CASES if name in KERNELS]


@pytest.mark.parametrize(("name", "index"), GPU_CASES)
def test_an_emulated_result_is_within_tolerance_of_the_reference_in_any_order(name: str, index: int) -> None:
    entry = registry.entries()[name]
    example = entry.examples[index]
    if "gpu" not in registry.backends_of(example):
        with pytest.raises(ValueError, match=r"expected|needs"):
            example(emulate())
        return
    expected = example(registry.lookup("reference"))
    results = [example(emulate(seed)) for seed in SEEDS]
    for got, want in zip(results[0], expected, strict=True):
        error = np.abs(wide(got) - wide(want)) / (1 + np.abs(wide(want)))
        assert error.max() <= entry.tolerance.get(dtype_of(got), 0.0)
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert got.numpy().tobytes() == want.numpy().tobytes()


def test_examples_that_a_gpu_takes_exist_for_every_kernel() -> None:
    taken = {name for name, i in GPU_CASES if "gpu" in registry.backends_of(registry.entries()[name].examples[i])}
    assert KERNELS - taken - PREPARATION == set()
