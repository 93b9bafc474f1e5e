# SPDX-License-Identifier: Apache-2.0
"""Lets the blocks of a KV cache in the host's memory take their memory when they are first used.

The plan of the cache promises memory that is free at the start. Other processes can take it before the blocks do, so
that the available memory is read again while the cache grows.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable

from fastdeploy.config.engine_config import CacheConfig
from fastdeploy.engine.memory_plan import MemoryPlan
from fastdeploy.ops.backend import CachePages
from fastdeploy.ops.block_moves import BlockRegion
from fastdeploy.ops.registry import selected_backend
from fastdeploy.spec_decode.drafting.base import Drafter
from fastdeploy.worker.model_runner import ModelRunner

STEP_BYTES = 64 << 20  # of the cache, between two readings of the available memory
RESERVE_BYTES = 64 << 20  # that must stay available for everything else

logger = logging.getLogger("fastdeploy.engine")


class CacheMemory:
    """The memory of the blocks of a cache; see `fastdeploy.kv_cache.block_pool.BlockMemory`."""

    def __init__(
        self, pages: CachePages, num_blocks: int, block_bytes: int, available_bytes: Callable[[], int]
    ) -> None:
        """Start with blocks of which none has been touched."""
        self._pages = pages
        self._num_blocks = num_blocks
        self._blocks_per_step = max(1, STEP_BYTES // block_bytes)
        self._available_bytes = available_bytes
        self._num_granted = 0  # first blocks for which there was memory when it was read last
        self._num_touched = 0

    @property
    def resident_bytes(self) -> int:
        """Memory that blocks have taken, in whole pages."""
        return self._pages.num_bytes(0, self._num_touched)

    def touch(self, first: int, last: int) -> int:
        """Touch blocks [first, last), after all before them, and return `last`.

        If memory is short, nothing is touched, and the end of the blocks for which there is memory is returned.
        """
        if last > self._num_granted:
            available = self._available_bytes()
            self._num_granted = self._end_of_room(first, last, available)
            if last > self._num_granted:
                self._log_end(available)
                return self._num_granted
        self._pages.touch(first, last)
        self._num_touched = last
        return last

    def _end_of_room(self, first: int, last: int, available: int) -> int:
        """Return the end of the blocks from `first` on that may be touched before memory is read again."""
        ends = range(first, min(self._num_blocks, max(last, first + self._blocks_per_step)) + 1)
        room = max(0, available - RESERVE_BYTES)
        return first - 1 + bisect_right(ends, room, key=lambda end: self._pages.num_bytes(first, end))

    def _log_end(self, available: int) -> None:
        logger.warning(
            "the KV cache ends at %d of %d blocks: %d MiB of memory are available, of which %d MiB stay free "
            "(--kv-cache-memory takes the memory at the start)",
            self._num_granted,
            self._num_blocks,
            available >> 20,
            RESERVE_BYTES >> 20,
        )


def block_regions(runner: ModelRunner, drafter: Drafter | None) -> dict[str, list[BlockRegion]]:
    """Describe the blocks of all caches, by the part of a slot in an arena."""
    return {"target": runner.block_regions(), **(drafter.block_regions() if drafter is not None else {})}


def make_cache_pages(
    runner: ModelRunner, drafter: Drafter | None, config: CacheConfig, memory: MemoryPlan
) -> CachePages | None:
    """Return the pages of all caches that take their memory when they are used; None if they have it from the start.

    They have it in a device's own memory. If a flag gives their size, they are touched here.
    """
    backend = selected_backend()
    if not backend.shares_memory:
        return None
    pages = backend.cache_pages([r for regions in block_regions(runner, drafter).values() for r in regions])
    if pages is None or not config.has_given_size:
        return pages
    pages.touch(0, memory.num_blocks)
    return None
