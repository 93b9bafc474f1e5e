# SPDX-License-Identifier: Apache-2.0
"""Blocks on a device are copied to slots and back through the staging buffer, as those in host memory are."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy.ops.backends.gpu import block_moves
from fastdeploy.ops.backends.gpu.block_moves import StagedBlockRegions
from fastdeploy.ops.block_moves import BlockRegion, BlockRegions
from tests.ops.gpu.emulated import emulate, load
from tests.ops.test_block_moves import addresses, make_caches

SHAPES = [(9, 2, 64), (9, 2, 96), (9, 1, 48)]
FIRST_CHECKSUMS = (0, 0, 2)


def regions_of(caches: list[np.ndarray]) -> list[BlockRegion]:
    return [BlockRegion(cache.ctypes.data, *cache.shape, first) for cache, first in zip(caches, FIRST_CHECKSUMS)]


@pytest.fixture(params=[1, 1000, 1 << 20], ids=["a block at a time", "two", "all"])
def caches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Caches whose blocks are staged in portions of this many bytes, 416 for a block of all regions."""
    monkeypatch.setattr(block_moves, "STAGING_BYTES", request.param)
    emulate()
    return make_caches(SHAPES)


def test_exported_blocks_on_a_gpu_have_the_bytes_and_checksums_of_the_host(caches: list[np.ndarray]) -> None:
    ids = [3, 0, 8, 1, 5]
    on_host, on_device = BlockRegions(regions_of(caches)), StagedBlockRegions(load(True), regions_of(caches))
    slots = np.zeros((2, len(ids), on_host.slot_bytes), np.uint8)
    expected = on_host.export_blocks(ids, addresses(slots[0]))
    np.testing.assert_array_equal(on_device.export_blocks(ids, addresses(slots[1])), expected)
    np.testing.assert_array_equal(slots[1], slots[0])


def test_imported_blocks_on_a_gpu_are_those_of_the_slots_and_no_others_change(caches: list[np.ndarray]) -> None:
    on_host, ids = BlockRegions(regions_of(caches)), [7, 2, 4]
    slots = np.zeros((3, on_host.slot_bytes), np.uint8)
    checksums = on_host.export_blocks([0, 1, 3], addresses(slots))
    others = make_caches(SHAPES, seed=1)
    before = [cache.copy() for cache in others]
    on_device = StagedBlockRegions(load(True), regions_of(others))
    np.testing.assert_array_equal(on_device.import_blocks(ids, addresses(slots)), checksums)
    for cache, other, old in zip(caches, others, before):
        np.testing.assert_array_equal(other[ids], cache[[0, 1, 3]])
        untouched = [block for block in range(9) if block not in ids]
        np.testing.assert_array_equal(other[untouched], old[untouched])


def test_a_block_outside_of_the_caches_of_a_gpu_is_refused(caches: list[np.ndarray]) -> None:
    with pytest.raises(ValueError, match=r"expected ids in \[0, 8\]"):
        StagedBlockRegions(load(True), regions_of(caches)).export_blocks([9], [0])
