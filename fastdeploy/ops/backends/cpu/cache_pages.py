# SPDX-License-Identifier: Apache-2.0
"""The pages of caches in the host's memory, which take memory when they are first written."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fastdeploy.ops.backends.cpu.memory import HUGE_PAGE, has_huge_pages, release_range
from fastdeploy.ops.block_moves import BlockRegion


class HostCachePages:
    """Touches the pages of blocks, and gives them back; see `fastdeploy.ops.backend.CachePages`."""

    def __init__(self, regions: Sequence[BlockRegion]) -> None:
        self._regions = [(_bytes_of(region), region.block_bytes) for region in regions]
        self._page_bytes = HUGE_PAGE if has_huge_pages() else mmap.PAGESIZE

    def touch(self, first: int, last: int) -> None:
        """Write zeros to blocks [first, last), which nobody has written to."""
        for memory, block_bytes in self._regions:
            begin, end = first * block_bytes, last * block_bytes
            memory[begin : end : mmap.PAGESIZE] = 0
            memory[end - 1] = 0

    def release(self) -> None:
        """Give back all pages of all blocks, which then hold zeros again."""
        for memory, _ in self._regions:
            release_range(memory.ctypes.data, memory.size)

    def num_bytes(self, first: int, last: int) -> int:
        """Return the memory that touching blocks [first, last) takes at most, if all before them have been touched."""
        return sum(
            self._whole_pages(last * size, memory.size) - self._whole_pages(first * size, memory.size)
            for memory, size in self._regions
        )

    def _whole_pages(self, num_bytes: int, capacity: int) -> int:
        return min(-(-num_bytes // self._page_bytes) * self._page_bytes, capacity)


def _bytes_of(region: BlockRegion) -> NDArray[np.uint8]:
    memory = (ctypes.c_ubyte * (region.num_blocks * region.block_bytes)).from_address(region.address)
    return np.frombuffer(memoryview(memory), np.uint8)
