# SPDX-License-Identifier: Apache-2.0
"""Allocation, release, reference counts and publication of blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from fastdeploy.kv_cache.block_pool import BlockPool


@dataclass
class Memory:
    """Memory for the first `limit` blocks; records which blocks have been touched."""

    limit: int
    touched: list[int] = field(default_factory=list)

    @property
    def resident_bytes(self) -> int:
        return len(self.touched)

    def touch(self, first: int, last: int) -> int:
        if last > self.limit:
            return self.limit
        self.touched += range(first, last)
        return last


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


def test_freed_blocks_without_a_prefix_come_before_untouched_ones_and_published_ones_last() -> None:
    memory = Memory(6)
    pool = BlockPool(6, memory)
    blocks = pool.allocate(4)
    assert blocks == [0, 1, 2, 3]
    pool.publish(0, b"x")
    pool.publish(1, b"y")
    pool.release(blocks)
    assert memory.touched == [0, 1, 2, 3]
    assert pool.num_free == 6
    assert [pool.allocate(1) for _ in range(6)] == [[3], [2], [4], [5], [1], [0]]
    assert memory.touched == [0, 1, 2, 3, 4, 5]


def test_sequences_by_turns_touch_no_more_memory_than_one_of_them() -> None:
    memory = Memory(1000)
    pool = BlockPool(1000, memory)
    for count in (3, 1, 2, 3, 3):
        pool.release(pool.allocate(count) or [])
    assert (memory.touched, pool.resident_bytes) == ([0, 1, 2], 3)


def test_the_pool_ends_where_memory_is_short() -> None:
    pool = BlockPool(10, Memory(4))
    blocks = pool.allocate(3)
    assert blocks is not None
    assert (pool.num_blocks, pool.num_free, pool.is_cut) == (10, 7, False)
    assert pool.allocate(2) is None
    assert (pool.num_blocks, pool.num_free, pool.is_cut) == (4, 1, True)
    pool.check_integrity(dict.fromkeys(blocks, 1))
    pool.release(blocks)
    assert pool.allocate(5) is None
    assert pool.allocate(4) == [*blocks[::-1], 3]


def test_published_blocks_are_taken_where_memory_is_short() -> None:
    pool = BlockPool(10, Memory(2))
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.publish(blocks[0], b"x")
    pool.release(blocks)
    assert pool.allocate(2) == [1, 0], "the untouched blocks have no memory"
    assert (pool.find(b"x"), pool.num_blocks) == (None, 2)


@pytest.mark.parametrize("limit", [0, 7, 40])
def test_random_allocations_touch_each_block_once_and_in_order(limit: int) -> None:
    random, memory, held = Random(limit), Memory(limit), list[list[int]]()
    pool = BlockPool(30, memory)
    for number in range(2000):
        if held and random.random() < 0.5:
            pool.release(held.pop(random.randrange(len(held))))
        elif (blocks := pool.allocate(random.randrange(1, 6))) is not None:
            for block_id in blocks:
                if random.random() < 0.3:
                    pool.publish(block_id, bytes([number % 50]))
            held.append(blocks)
        assert memory.touched == list(range(len(memory.touched)))
        pool.check_integrity({block_id: 1 for blocks in held for block_id in blocks})
        assert pool.num_free == pool.num_blocks - sum(map(len, held))
    assert len(memory.touched) == pool.num_blocks <= limit
    assert pool.is_cut == (limit < 30)
