# SPDX-License-Identifier: Apache-2.0
"""A fixed number of blocks with reference counts, and an index from content hash to block id."""

from __future__ import annotations

from collections import OrderedDict


class BlockPool:
    """Allocates and releases block ids.

    A block is *held* (reference count >= 1) or *free*. A free block may still be *published*: `find` returns it for the
    hash of its content until it is allocated again. Free blocks are allocated in the order in which they were released,
    so the block that was used last stays published longest.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks with a reference count of 1, or None without any change if fewer are free."""
        if count > len(self._free):
            return None
        block_ids = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in block_ids:
            self._unpublish(block_id)
            self._ref_counts[block_id] = 1
        return block_ids

    def retain(self, block_id: int) -> None:
        """Increment the reference count of a published block, which may be free."""
        self._free.pop(block_id, None)
        self._ref_counts[block_id] += 1

    def release(self, block_ids: list[int]) -> None:
        """Decrement reference counts; the last block of the list becomes free first.

        A sequence thereby loses the end of its cached prefix before the beginning.
        """
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None

    def publish(self, block_id: int, content_hash: bytes) -> None:
        """Enter a held block into the index, unless another block with the same content is published."""
        if content_hash not in self._block_of:
            self._block_of[content_hash] = block_id
            self._hash_of[block_id] = content_hash

    def find(self, content_hash: bytes) -> int | None:
        """Return the block that is published under this hash, or None."""
        return self._block_of.get(content_hash)

    def check_integrity(self, held: dict[int, int]) -> None:
        """Check the reference counts, the free list and the index.

        Args:
            held: block id -> expected reference count; blocks that are missing are free.

        Raises:
            AssertionError: with the block that is wrong.
        """
        for block_id, count in enumerate(self._ref_counts):
            expected, is_free = held.get(block_id, 0), block_id in self._free
            assert count == expected, f"block {block_id}: reference count {count}, expected {expected}"
            assert (count == 0) == is_free, f"block {block_id}: reference count {count} contradicts the free list"
        assert len(self._hash_of) == len(self._block_of)
        for content_hash, block_id in self._block_of.items():
            assert self._hash_of[block_id] == content_hash, f"block {block_id}: published under another hash"

    def _unpublish(self, block_id: int) -> None:
        content_hash = self._hash_of.pop(block_id, None)
        if content_hash is not None:
            del self._block_of[content_hash]
