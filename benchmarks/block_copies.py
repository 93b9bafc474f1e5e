# SPDX-License-Identifier: Apache-2.0
"""How fast are blocks of the KV cache copied to an arena and back, with their checksums, beside one thread's memcpy?"""

from __future__ import annotations

import ctypes
import itertools
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from benchmarks.report import Row
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.engine.memory_plan import MemoryPlan, allocate_kv_caches
from fastdeploy.kv_cache.arena import Arena
from fastdeploy.ops.block_moves import BlockRegion, BlockRegions
from fastdeploy.ops.caches import LayerCache
from fastdeploy.ops.registry import select_backend, selected_backend
from fastdeploy.worker.block_mover import BlockMover, CachePart

BLOCK_SIZE = 64
PYTHON_LOOPS = 2000  # of a loop that needs the interpreter


@dataclass
class Caches:
    """KV caches of as many blocks as a prompt has, with their mover."""

    caches: list[LayerCache]  # which own the memory
    regions: list[BlockRegion]
    mover: BlockMover

    @classmethod
    def allocate(cls, config: ModelConfig, num_blocks: int) -> Caches:
        """Return caches whose pages are in memory."""
        caches = allocate_kv_caches(config, MemoryPlan(num_blocks, BLOCK_SIZE, 0))
        regions = [r for cache in caches for r in selected_backend().block_regions(cache, num_blocks)]
        for i, region in enumerate(regions):
            ctypes.memset(region.address, i % 251 + 1, num_blocks * region.block_bytes)
        return cls(caches, regions, BlockMover([CachePart("target", "bench", BlockRegions(regions))]))

    def bytes_of(self, block_id: int) -> bytes:
        """Return the content of a block."""
        parts = ((r.address + block_id * r.block_bytes, r.block_bytes) for r in self.regions)
        return b"".join(ctypes.string_at(*part) for part in parts)


def measure(shape: str, kv_cache_dtype: str, num_tokens: int, rounds: int) -> Row:
    """Alternate between export and import of a prompt's blocks and memcpy of the same bytes between the same memory.

    Returns:
        Speeds as ratios to memcpy; `python_share` is the speed of a Python loop beside an export, over that alone.
    """
    select_backend("cpu")
    config = ModelConfig.from_pretrained(shape, kv_cache_dtype=kv_cache_dtype)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    source, target = Caches.allocate(config, num_blocks), Caches.allocate(config, num_blocks)
    arena = Arena.create(num_blocks, source.mover.slot_parts)
    ids = random.Random(0).sample(range(num_blocks), num_blocks)
    generations = [0] * num_blocks

    def export() -> Future[None]:
        return source.mover.export_blocks(arena, ids, range(num_blocks))

    def move() -> list[float]:
        export_s = _seconds(lambda: export().result())
        import_s = _seconds(lambda: _check(target.mover.import_blocks(arena, range(num_blocks), generations, ids)))
        return [export_s, import_s]

    def copy() -> list[float]:
        return [_seconds(lambda: _memcpy(source, arena, True)), _seconds(lambda: _memcpy(target, arena, False))]

    times: dict[str, list[list[float]]] = {"move": [], "copy": []}
    for i in range(rounds + 1):
        ways = [("move", move), ("copy", copy)]
        for name, run in random.Random(i).sample(ways, 2):
            times[name].append(run())
    ratios = [[c / m for c, m in zip(*pair)] for pair in zip(times["copy"][1:], times["move"][1:])]
    move()
    assert all(source.bytes_of(block) == target.bytes_of(block) for block in ids), "blocks must arrive unchanged"
    share = _python_share(export)
    for caches in (source, target):
        caches.mover.close()
    num_bytes = num_blocks * source.mover.slot_parts[0].num_bytes
    result = {
        "cache": kv_cache_dtype,
        "mb": num_bytes / 1e6,
        "memcpy_gb_per_s": num_bytes / 1e9 / statistics.median(out for out, _ in times["copy"][1:]),
        "export": statistics.median(out for out, _ in ratios),
        "import": statistics.median(back for _, back in ratios),
        "python_share": share,
    }
    arena.close()
    return result


def _check(arrived: Future[Any]) -> None:
    assert not arrived.result().failures, "every block must arrive"


def _memcpy(caches: Caches, arena: Arena, to_arena: bool) -> None:
    """Copy all bytes of the caches between their memory and the arena's slots, one region after the other."""
    address = arena.address(0)
    for region in caches.regions:
        num_bytes = region.num_blocks * region.block_bytes
        pair = (address, region.address) if to_arena else (region.address, address)
        ctypes.memmove(*pair, num_bytes)
        address += num_bytes


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _python_share(start: Callable[[], Future[None]]) -> float:
    """Return how fast Python runs beside a copy, over how fast it runs alone."""

    def loops_per_s(goes_on: Callable[[], bool]) -> float:
        begin, num_loops = time.perf_counter(), 0
        for _ in itertools.takewhile(lambda _: goes_on(), itertools.count()):
            num_loops += sum(1 for _ in range(PYTHON_LOOPS))
        return num_loops / (time.perf_counter() - begin)

    shares = []
    for _ in range(5):
        copied = start()
        beside = loops_per_s(lambda copied=copied: not copied.done())  # type: ignore[misc]
        end = time.perf_counter() + 0.02
        shares.append(beside / loops_per_s(lambda end=end: time.perf_counter() < end))  # type: ignore[misc]
    return statistics.median(shares)
