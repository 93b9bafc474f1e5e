# SPDX-License-Identifier: Apache-2.0
"""What the caches of both kinds hold, and how their blocks lie in memory."""

from __future__ import annotations

from dataclasses import dataclass

import paddle
import pytest

from fastdeploy.config.cache_spec import CacheSpec
from fastdeploy.ops.backends.gpu.backend import GpuBackend
from fastdeploy.ops.block_moves import BlockRegion, BlockRegions
from fastdeploy.ops.caches import allocate_cache
from fastdeploy.ops.registry import selected_backend


@dataclass(frozen=True)
class Rows:
    """A cache of latent rows."""

    tensors: tuple[paddle.Tensor, ...]
    num_blocks: int
    block_size: int


def bytes_of(tensor: paddle.Tensor) -> int:
    return int(tensor.size) * int(tensor.element_size())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("head_dim", [24, 64])
def test_kv_bytes_per_token_are_those_of_an_allocated_cache(dtype: str, head_dim: int) -> None:
    spec = CacheSpec("grouped", 2, head_dim, dtype)
    cache = allocate_cache(3, 16, spec)
    assert (cache.num_blocks, cache.block_size) == (3, 16)
    assert selected_backend().kv_bytes_per_token(spec) * 3 * 16 == sum(map(bytes_of, cache.tensors))


@pytest.mark.parametrize(
    ("latent_dim", "rope_dim", "dtype", "num_bytes"),
    [(512, 64, "bfloat16", 1152), (512, 64, "float32", 2304), (40, 8, "bfloat16", 96), (24, 16, "float32", 160)],
)
def test_a_latent_row_is_cached_without_padding(latent_dim: int, rope_dim: int, dtype: str, num_bytes: int) -> None:
    spec = CacheSpec("latent", 1, latent_dim + rope_dim, dtype, rope_dim)
    assert selected_backend().kv_bytes_per_token(spec) == num_bytes


def test_a_gpu_has_no_cache_of_latent_rows() -> None:
    assert GpuBackend().kv_bytes_per_token(CacheSpec("grouped", 2, 64, "bfloat16")) == 512
    with pytest.raises(ValueError, match=r"kv_bytes_per_token: spec\.kind: expected grouped on a GPU, got latent"):
        GpuBackend().kv_bytes_per_token(CacheSpec("latent", 1, 576, "bfloat16", 64))


def test_keys_and_values_of_a_head_share_a_checksum() -> None:
    cache = allocate_cache(5, 16, CacheSpec("grouped", 2, 24, "float32"))
    found = selected_backend().block_regions(cache, 3)
    key, value = (tensor.data_ptr() for tensor in cache.tensors)
    assert found == [BlockRegion(key, 3, 2, 16 * 24 * 4, 0), BlockRegion(value, 3, 2, 16 * 32 * 4, 0)]
    assert BlockRegions(found).num_checksums == 2


@pytest.mark.parametrize("shape", [[5, 16, 48], [5, 3, 16, 16], [5, 768]])
def test_a_block_of_latent_rows_is_one_head_with_one_checksum(shape: list[int]) -> None:
    rows = paddle.zeros(shape, "bfloat16")
    found = selected_backend().block_regions(Rows((rows,), 5, 16), 3)
    assert found == [BlockRegion(rows.data_ptr(), 3, 1, 16 * 48 * 2, 0)]
    assert BlockRegions(found).num_checksums == 1
