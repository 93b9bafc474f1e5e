# SPDX-License-Identifier: Apache-2.0
"""Blocks are copied whole, and their checksums are CRC-32C of what was copied."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from fastdeploy.ops.block_moves import BlockRegion, BlockRegions

POLYNOMIAL = 0x82F63B78


def crc32c(data: bytes) -> int:
    """Compute CRC-32C bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (POLYNOMIAL if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def make_caches(shapes: list[tuple[int, int, int]], seed: int = 0) -> list[np.ndarray]:
    """Return one [num_blocks, num_heads, head_bytes] array per shape."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, shape, np.uint8) for shape in shapes]


def make_regions(caches: list[np.ndarray], first_checksums: list[int]) -> BlockRegions:
    return BlockRegions(
        [BlockRegion(cache.ctypes.data, *cache.shape, first) for cache, first in zip(caches, first_checksums)]
    )


def addresses(slots: np.ndarray) -> list[int]:
    return [slot.ctypes.data for slot in slots]


def test_the_reference_has_the_check_value_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize(("num_heads", "head_bytes"), list(product((1, 2, 3, 8), (1, 7, 8, 64))))
def test_a_slot_holds_the_block_of_every_region_and_its_checksums_cover_it(num_heads: int, head_bytes: int) -> None:
    caches = make_caches([(5, num_heads, head_bytes), (5, num_heads, head_bytes + 3), (5, 1, 24)])
    regions = make_regions(caches, [0, 0, num_heads])
    block_ids = [3, 0, 4, 1]
    slots = np.zeros((4, regions.slot_bytes), np.uint8)
    checksums = regions.export_blocks(block_ids, addresses(slots))
    assert checksums.shape == (4, num_heads + 1)
    for slot, block, found in zip(slots, block_ids, checksums, strict=True):
        assert slot.tobytes() == b"".join(cache[block].tobytes() for cache in caches)
        heads = [caches[0][block, h].tobytes() + caches[1][block, h].tobytes() for h in range(num_heads)]
        assert found.tolist() == [crc32c(data) for data in (*heads, caches[2][block].tobytes())]


def test_blocks_come_back_in_other_places_and_the_other_blocks_are_untouched() -> None:
    source, target = make_caches([(6, 2, 40), (6, 2, 56)]), make_caches([(9, 2, 40), (9, 2, 56)], seed=1)
    before = [cache.copy() for cache in target]
    exporting, importing = make_regions(source, [0, 0]), make_regions(target, [0, 0])
    slots = np.zeros((3, exporting.slot_bytes), np.uint8)
    sent = exporting.export_blocks([5, 2, 0], addresses(slots))
    received = importing.import_blocks([8, 0, 3], addresses(slots))
    assert np.array_equal(sent, received)
    for cache, old, original in zip(target, before, source, strict=True):
        assert np.array_equal(cache[[8, 0, 3]], original[[5, 2, 0]])
        others = [1, 2, 4, 5, 6, 7]
        assert np.array_equal(cache[others], old[others])


def test_a_flipped_bit_changes_the_checksum_of_its_head_alone() -> None:
    caches = make_caches([(2, 4, 32)])
    regions = make_regions(caches, [0])
    slots = np.zeros((1, regions.slot_bytes), np.uint8)
    sent = regions.export_blocks([1], addresses(slots))
    slots[0, 2 * 32 + 5] ^= 1
    received = regions.import_blocks([0], addresses(slots))
    assert (sent != received).tolist() == [[False, False, True, False]]


@pytest.mark.parametrize("block_ids", [[-1, 0], [0, 5]])
def test_a_block_outside_of_the_caches_is_refused(block_ids: list[int]) -> None:
    regions = make_regions(make_caches([(5, 1, 8)]), [0])
    slots = np.zeros((2, 8), np.uint8)
    with pytest.raises(ValueError, match=r"block_ids: expected ids in \[0, 4\]"):
        regions.export_blocks(block_ids, addresses(slots))
    assert not slots.any()


def test_as_many_slots_as_blocks_are_needed() -> None:
    regions = make_regions(make_caches([(5, 1, 8)]), [0])
    with pytest.raises(ValueError, match="slots: expected one per block, 2, got 1"):
        regions.import_blocks([0, 1], [0])
