# SPDX-License-Identifier: Apache-2.0
"""A fixed number of blocks with reference counts, and an index from content hash to block id."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Protocol


class BlockMemory(Protocol):
    """The memory of blocks, which takes pages when blocks are first allocated."""

    @property
    def resident_bytes(self) -> int:
        """Memory that blocks have taken."""

    def touch(self, first: int, last: int) -> int:
        """Let blocks [first, last) take their memory, and return `last`.

        If memory is short, none takes any, and the end of the blocks for which there is memory is returned.
        """


class BlockPool:
    """Allocates and releases block ids.

    A block is *held* (reference count >= 1) or *free*. A free block may still be *published*: `find` returns it for the
    hash of its content until it is allocated again. Free blocks that are not published are allocated first, then those
    that have never been allocated, in order, and published ones last; of each kind, those that were released first. The
    memory that the blocks take therefore grows only if all of it is of use, and the block that was used last stays
    published longest.

    If the memory for blocks that have never been allocated is short, the pool ends before them.

    Attributes:
        num_blocks: blocks of the pool, fewer once memory was short.
        is_cut: whether memory was short.
    """

    def __init__(self, num_blocks: int, memory: BlockMemory | None = None) -> None:
        """Start with free blocks; without `memory`, they have theirs already."""
        self.num_blocks = num_blocks
        self.is_cut = False
        self._memory = memory
        self._ref_counts = [0] * num_blocks
        self._num_allocated = 0  # blocks that have been allocated ever; the others follow them
        self._free_unpublished = deque[int]()
        self._free_published = OrderedDict[int, None]()
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return len(self._free_unpublished) + len(self._free_published) + self.num_blocks - self._num_allocated

    @property
    def resident_bytes(self) -> int | None:
        """Memory that blocks have taken; None if all of them have theirs from the start."""
        return None if self._memory is None else self._memory.resident_bytes

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks with a reference count of 1, or None without any change if fewer are free."""
        while count <= self.num_free:
            missing = min(count - len(self._free_unpublished), self.num_blocks - self._num_allocated)
            if missing <= 0 or self._touch(missing):
                break
        else:
            return None
        block_ids = [self._take() for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def retain(self, block_id: int) -> None:
        """Increment the reference count of a published block, which may be free."""
        self._free_published.pop(block_id, None)
        self._ref_counts[block_id] += 1

    def release(self, block_ids: list[int]) -> None:
        """Decrement reference counts; the last block of the list becomes free first.

        A sequence thereby loses the end of its cached prefix before the beginning.
        """
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if block_id in self._hash_of:
                    self._free_published[block_id] = None
                else:
                    self._free_unpublished.append(block_id)

    def publish(self, block_id: int, content_hash: bytes) -> None:
        """Enter a held block into the index, unless another block with the same content is published."""
        if content_hash not in self._block_of:
            self._block_of[content_hash] = block_id
            self._hash_of[block_id] = content_hash

    def find(self, content_hash: bytes) -> int | None:
        """Return the block that is published under this hash, or None."""
        return self._block_of.get(content_hash)

    def check_integrity(self, held: dict[int, int]) -> None:
        """Check the reference counts, the free lists and the index.

        Args:
            held: block id -> expected reference count; blocks that are missing are free.

        Raises:
            AssertionError: with the block that is wrong.
        """
        free = {*self._free_unpublished, *self._free_published, *range(self._num_allocated, len(self._ref_counts))}
        for block_id, count in enumerate(self._ref_counts):
            expected, is_free = held.get(block_id, 0), block_id in free
            assert count == expected, f"block {block_id}: reference count {count}, expected {expected}"
            assert (count == 0) == is_free, f"block {block_id}: reference count {count} contradicts the free lists"
        assert len(self._hash_of) == len(self._block_of)
        for content_hash, block_id in self._block_of.items():
            assert self._hash_of[block_id] == content_hash, f"block {block_id}: published under another hash"
        assert self._free_published.keys() == {block_id for block_id in self._hash_of if block_id in free}

    def _touch(self, count: int) -> bool:
        """Take the memory of blocks that have never been allocated; if it is short, end the pool where it ends."""
        last = self._num_allocated + count
        end = last if self._memory is None else self._memory.touch(self._num_allocated, last)
        if end < last:
            self.num_blocks, self.is_cut = end, True
        return end == last

    def _take(self) -> int:
        if self._free_unpublished:
            return self._free_unpublished.popleft()
        if self._num_allocated < self.num_blocks:
            self._num_allocated += 1
            return self._num_allocated - 1
        block_id, _ = self._free_published.popitem(last=False)
        del self._block_of[self._hash_of.pop(block_id)]
        return block_id
