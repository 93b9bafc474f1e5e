# SPDX-License-Identifier: Apache-2.0
"""Allocation, release, reference counts and publication of blocks."""

from __future__ import annotations

import pytest

from fastdeploy.kv_cache.block_pool import BlockPool


def test_allocation_of_too_many_blocks_changes_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(1) is None


def test_released_block_stays_published_until_it_is_allocated_again() -> None:
    pool = BlockPool(2)
    first = pool.allocate(1)
    assert first is not None
    pool.publish(first[0], b"x")
    pool.release(first)
    assert pool.find(b"x") == first[0]
    assert pool.allocate(2) is not None
    assert pool.find(b"x") is None


def test_last_block_of_a_sequence_is_allocated_again_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    assert blocks is not None
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[-1]]


def test_block_is_free_when_its_last_reference_is_released() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1) or []
    pool.retain(block)
    pool.release([block])
    assert pool.num_free == 0
    pool.release([block])
    assert pool.num_free == 1


def test_integrity_check_detects_a_leaked_block() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1) or []
    pool.check_integrity({block: 1})
    with pytest.raises(AssertionError, match="reference count 1, expected 0"):
        pool.check_integrity({})
