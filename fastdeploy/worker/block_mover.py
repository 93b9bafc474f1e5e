# SPDX-License-Identifier: Apache-2.0
"""Copies blocks between the caches of this engine and arenas, in a thread beside the steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from fastdeploy.kv_cache.arena import Arena, SlotPart, page_aligned
from fastdeploy.ops.block_moves import BlockRegions

ALIGNMENT = 64  # bytes, of the parts of a slot


@dataclass(frozen=True)
class CachePart:
    """Caches whose blocks travel together: those of the target, of the drafting model, or its input states.

    Attributes:
        digest: of everything that the meaning of their bytes depends on; engines of unlike digests do not exchange this
            part.
    """

    name: str
    digest: str
    regions: BlockRegions


class Arrived(NamedTuple):
    """The outcome of an import.

    Attributes:
        parts: per slot, the names of the parts that arrived.
        failures: number of slots by why a part of them did not arrive: `stale`, and per part `PART_layout` (the peer's
            digest is another one) and `PART_checksum`.
    """

    parts: list[frozenset[str]]
    failures: Counter[str]


class BlockMover:
    """Moves the blocks of several parts.

    Calls return futures and are done in order. The caller holds the blocks until the future is done.

    Attributes:
        slot_parts: the parts of a slot in arenas of this engine.
    """

    def __init__(self, parts: Sequence[CachePart]) -> None:
        self._parts = tuple(parts)
        self.slot_parts = _slot_parts(parts)
        self._thread = ThreadPoolExecutor(1, "kv-blocks")

    def export_blocks(self, arena: Arena, block_ids: Sequence[int], slots: Sequence[int]) -> Future[None]:
        """Copy blocks to slots of an arena of this engine, and write the slots' checksums."""
        return self._thread.submit(self._export, arena, list(block_ids), list(slots))

    def import_blocks(
        self, arena: Arena, slots: Sequence[int], generations: Sequence[int], block_ids: Sequence[int]
    ) -> Future[Arrived]:
        """Copy slots of a peer's arena to blocks.

        Returns:
            A future. Parts of equal digests arrive if their checksums are right. A slot whose generation is not the
            given one, or that does not exist, delivers nothing.
        """
        return self._thread.submit(self._import, arena, list(slots), list(generations), list(block_ids))

    def can_import(self, arena: Arena, name: str) -> bool:
        """Return whether the part of this name in slots of an arena has the layout of ours."""
        place = arena.parts.get(name)
        return place is not None and any(part.name == name and _has_layout(place, part) for part in self._parts)

    def close_arena(self, arena: Arena) -> Future[None]:
        """Unmap an arena of a peer after the copies from it that have been submitted."""
        return self._thread.submit(arena.close)

    def close(self) -> None:
        """Wait for the last copy and end the thread."""
        self._thread.shutdown()

    def _export(self, arena: Arena, block_ids: list[int], slots: list[int]) -> None:
        for part, place in zip(self._parts, self.slot_parts, strict=True):
            addresses = [arena.address(slot) + place.offset for slot in slots]
            last = place.first_checksum + place.num_checksums
            arena.checksums[slots, place.first_checksum : last] = part.regions.export_blocks(block_ids, addresses)

    def _import(self, arena: Arena, slots: list[int], generations: list[int], block_ids: list[int]) -> Arrived:
        arrived, failures = [set[str]() for _ in slots], list[tuple[int, str]]()
        exists = [i for i, slot in enumerate(slots) if 0 <= slot < arena.num_slots]
        for part in self._parts:
            place = arena.parts.get(part.name)
            if place is None:
                continue
            if not _has_layout(place, part):
                failures += [(i, f"{part.name}_layout") for i in exists]
                continue
            addresses = [arena.address(slots[i]) + place.offset for i in exists]
            received = part.regions.import_blocks([block_ids[i] for i in exists], addresses)
            last = place.first_checksum + place.num_checksums
            expected = arena.checksums[[slots[i] for i in exists], place.first_checksum : last]
            for i, is_right in zip(exists, (received == expected).all(axis=1).tolist()):
                if is_right:
                    arrived[i].add(part.name)
                else:
                    failures.append((i, f"{part.name}_checksum"))
        # A slot that was reused meanwhile has another generation by now.
        valid = {i for i in exists if int(arena.generations[slots[i]]) == generations[i]}
        counts = Counter(reason for i, reason in failures if i in valid)
        if len(valid) < len(slots):
            counts["stale"] = len(slots) - len(valid)
        nothing = frozenset[str]()
        return Arrived([frozenset(names) if i in valid else nothing for i, names in enumerate(arrived)], counts)


def _has_layout(place: SlotPart, part: CachePart) -> bool:
    regions = part.regions
    layout = part.digest, regions.slot_bytes, regions.num_checksums
    return (place.digest, place.num_bytes, place.num_checksums) == layout


def _slot_parts(parts: Sequence[CachePart]) -> list[SlotPart]:
    places, offset, first_checksum = [], 0, 0
    for part in parts:
        num_bytes, num_checksums = part.regions.slot_bytes, part.regions.num_checksums
        places.append(SlotPart(part.name, part.digest, offset, num_bytes, first_checksum, num_checksums))
        offset += _aligned(num_bytes)
        first_checksum += num_checksums
    return places


def slot_bytes(part_bytes: Iterable[int]) -> int:
    """Return the memory that a slot of these parts takes in an arena."""
    return page_aligned(sum(map(_aligned, part_bytes)))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
