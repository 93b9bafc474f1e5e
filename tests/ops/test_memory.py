# SPDX-License-Identifier: Apache-2.0
"""Streamed memory: aligned tensors that never overlap."""

import numpy as np
import pytest

from fastdeploy.ops.backends.cpu.memory import allocate_streamed


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
def test_tensors_share_slabs_without_overlap(dtype: str) -> None:
    sizes = [1, 33, 1000, 3_000_000, 64, 5_000_000, 7]
    tensors = [allocate_streamed([size], dtype) for size in sizes]
    for index, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        assert tensor.is_contiguous()
        tensor.fill_(float(index))
    for index, (size, tensor) in enumerate(zip(sizes, tensors, strict=True)):
        values = tensor.astype("float32").numpy()
        assert values.shape == (size,) and np.array_equal(values, np.full(size, index))


def test_small_tensors_share_a_slab() -> None:
    first, second = (allocate_streamed([100, 3], "float32") for _ in range(2))
    assert list(first.shape) == [100, 3]
    assert 0 < second.data_ptr() - first.data_ptr() <= 1 << 27


def test_a_large_tensor_starts_on_a_huge_page() -> None:
    assert allocate_streamed([1 << 23], "float32").data_ptr() % (1 << 21) == 0
