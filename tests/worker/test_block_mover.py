# SPDX-License-Identifier: Apache-2.0
"""Blocks that one engine exports arrive in another one, part by part, or are reported as missing."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

from fastdeploy.kv_cache.arena import Arena
from fastdeploy.ops.block_moves import BlockRegion, BlockRegions
from fastdeploy.worker.block_mover import Arrived, BlockMover, CachePart

BOTH, TARGET, NOTHING = frozenset({"target", "drafting"}), frozenset({"target"}), frozenset[str]()


class Side:
    """An engine's caches of eight blocks and their mover."""

    def __init__(self, seed: int, digest: str = "same", has_drafting: bool = True) -> None:
        generator = np.random.default_rng(seed)
        self.target = generator.integers(0, 256, (8, 2, 48), np.uint8)
        self.drafting = generator.integers(0, 256, (8, 1, 40), np.uint8)
        parts = [CachePart("target", "t", self._regions(self.target))]
        if has_drafting:
            parts.append(CachePart("drafting", digest, self._regions(self.drafting)))
        self.mover = BlockMover(parts)

    def _regions(self, cache: np.ndarray) -> BlockRegions:
        return BlockRegions([BlockRegion(cache.ctypes.data, *cache.shape, 0)])


@pytest.fixture
def source() -> Iterator[Side]:
    side = Side(0)
    yield side
    side.mover.close()


@pytest.fixture
def arena(source: Side) -> Iterator[Arena]:
    arena = Arena.create(4, source.mover.slot_parts)
    arena.generations[:] = [7, 8, 9, 10]
    yield arena
    arena.close()


def receive(source: Side, arena: Arena, target: Side) -> Arrived:
    """Export blocks 5, 1, 3 to the slots 2, 0, 1 and import them as blocks 0, 6, 2."""
    source.mover.export_blocks(arena, [5, 1, 3], [2, 0, 1]).result()
    arrived = target.mover.import_blocks(arena, [2, 0, 1], [9, 7, 8], [0, 6, 2]).result()
    target.mover.close()
    return arrived


def flip_byte(arena: Arena, slot: int, part: str) -> None:
    (ctypes.c_uint8 * 1).from_address(arena.address(slot) + arena.parts[part].offset + 11)[0] ^= 255


def test_every_part_of_every_block_arrives(source: Side, arena: Arena) -> None:
    target = Side(1)
    assert receive(source, arena, target) == ([BOTH, BOTH, BOTH], {})
    assert np.array_equal(target.target[[0, 6, 2]], source.target[[5, 1, 3]])
    assert np.array_equal(target.drafting[[0, 6, 2]], source.drafting[[5, 1, 3]])


def test_a_part_of_another_digest_stays_out(source: Side, arena: Arena) -> None:
    target = Side(1, digest="other")
    before = target.drafting.copy()
    assert receive(source, arena, target) == ([TARGET, TARGET, TARGET], {"drafting_layout": 3})
    assert np.array_equal(target.drafting, before)
    assert target.mover.can_import(arena, "target") and not target.mover.can_import(arena, "drafting")


def test_an_engine_without_a_drafting_model_takes_the_rest(source: Side, arena: Arena) -> None:
    assert receive(source, arena, Side(1, has_drafting=False)) == ([TARGET, TARGET, TARGET], {})


def test_an_engine_that_drafts_takes_slots_without_drafting_caches() -> None:
    plain = Side(0, has_drafting=False)
    arena = Arena.create(4, plain.mover.slot_parts)
    arena.generations[:] = [7, 8, 9, 10]
    assert receive(plain, arena, Side(1)) == ([TARGET, TARGET, TARGET], {})
    arena.close()


@pytest.mark.parametrize(("part", "arrived"), [("drafting", TARGET), ("target", frozenset({"drafting"}))])
def test_a_flipped_byte_loses_its_part_of_its_block_alone(
    source: Side, arena: Arena, part: str, arrived: frozenset[str]
) -> None:
    target = Side(1)
    source.mover.export_blocks(arena, [5, 1], [2, 0]).result()
    flip_byte(arena, 2, part)
    received = target.mover.import_blocks(arena, [2, 0], [9, 7], [0, 6]).result()
    assert received == ([arrived, BOTH], {f"{part}_checksum": 1})
    target.mover.close()


def test_a_reused_slot_and_a_slot_that_does_not_exist_deliver_nothing(source: Side, arena: Arena) -> None:
    target = Side(1)
    source.mover.export_blocks(arena, [5, 1], [2, 0]).result()
    arena.generations[2] += 1
    flip_byte(arena, 2, "drafting")  # belongs to what the slot holds now, so it does not count
    arrived = target.mover.import_blocks(arena, [2, 0, 4, -1], [9, 7, 0, 0], [0, 6, 3, 4]).result()
    assert arrived == ([NOTHING, BOTH, NOTHING, NOTHING], {"stale": 3})
    target.mover.close()
