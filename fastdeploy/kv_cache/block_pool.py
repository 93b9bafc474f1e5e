# SPDX-License-Identifier: Apache-2.0
"""A fixed number of blocks with reference counts, and an index from content hash to block."""

from __future__ import annotations

from collections import OrderedDict


class BlockPool:
    """Hands out block ids and takes them back.

    A block is *held* (reference count >= 1) or *free*. A free block may still be *published*: findable by the hash of
    the tokens it holds, until it is handed out again. Free blocks are reused in the order in which they were released,
    so that what was used last stays findable longest.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no request holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks held once each, or None if so many are not free (nothing is taken then)."""
        if count > len(self._free):
            return None
        block_ids = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in block_ids:
            self._unpublish(block_id)
            self._ref_counts[block_id] = 1
        return block_ids

    def retain(self, block_id: int) -> None:
        """Hold a published block once more."""
        self._free.pop(block_id, None)
        self._ref_counts[block_id] += 1

    def release(self, block_ids: list[int]) -> None:
        """Let go of blocks; the last of the list is reused first: a sequence loses its tail before its head."""
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None

    def publish(self, block_id: int, content_hash: bytes) -> None:
        """Make a held block findable, unless another one that holds the same content is already."""
        if content_hash not in self._block_of:
            self._block_of[content_hash] = block_id
            self._hash_of[block_id] = content_hash

    def find(self, content_hash: bytes) -> int | None:
        """Return the block published under this hash."""
        return self._block_of.get(content_hash)

    def check_integrity(self, held: dict[int, int]) -> None:
        """Raise AssertionError unless reference counts equal `held` (block id -> holders) and the index is sound."""
        for block_id, count in enumerate(self._ref_counts):
            assert count == held.get(block_id, 0), f"block {block_id}: counted {count}, held {held.get(block_id, 0)}"
            assert (count == 0) == (block_id in self._free), f"block {block_id}: count {count} against the free list"
        assert len(self._hash_of) == len(self._block_of)
        for content_hash, block_id in self._block_of.items():
            assert self._hash_of[block_id] == content_hash, f"block {block_id}: index does not agree with itself"

    def _unpublish(self, block_id: int) -> None:
        content_hash = self._hash_of.pop(block_id, None)
        if content_hash is not None:
            del self._block_of[content_hash]
