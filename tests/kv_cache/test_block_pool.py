# SPDX-License-Identifier: Apache-2.0
"""Blocks are handed out once, come back, and stay findable until they are reused."""

from __future__ import annotations

import pytest

from fastdeploy.kv_cache.block_pool import BlockPool


def test_allocation_takes_nothing_when_too_few_are_free() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(1) is None


def test_released_published_block_is_found_until_it_is_reused() -> None:
    pool = BlockPool(2)
    first = pool.allocate(1)
    assert first is not None
    pool.publish(first[0], b"x")
    pool.release(first)
    assert pool.find(b"x") == first[0]
    assert pool.allocate(2) is not None
    assert pool.find(b"x") is None


def test_tail_of_a_sequence_is_reused_before_its_head() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    assert blocks is not None
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[-1]]


def test_retained_block_is_free_only_after_both_holders_let_go() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1) or []
    pool.retain(block)
    pool.release([block])
    assert pool.num_free == 0
    pool.release([block])
    assert pool.num_free == 1


def test_integrity_check_notices_a_leak() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1) or []
    pool.check_integrity({block: 1})
    with pytest.raises(AssertionError, match="counted 1, held 0"):
        pool.check_integrity({})
