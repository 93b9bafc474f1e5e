# SPDX-License-Identifier: Apache-2.0
"""Which slots of the engine's arena are free, and which belong to a leg or its image."""

from __future__ import annotations

from collections.abc import Collection

from fastdeploy.scheduler.node_events import RunId


class Slots:
    """The numbers of the slots; the engine maps them, the agent only hands them out."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))  # the last one is taken first
        self._taken: dict[RunId, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Return the number of free slots."""
        return len(self._free)

    def take(self, run: RunId, count: int) -> list[int]:
        """Give a leg this many slots, or as many as are free."""
        slots = [self._free.pop() for _ in range(min(count, len(self._free)))]
        self._taken.setdefault(run, []).extend(slots)
        return slots

    def keep(self, run: RunId, slots: Collection[int]) -> None:
        """Free what a leg has besides these slots."""
        taken = self._taken.pop(run, [])
        self._free += [slot for slot in taken if slot not in slots]
        if kept := [slot for slot in taken if slot in slots]:
            self._taken[run] = kept

    def free(self, run: RunId) -> None:
        """Free all that a leg or its image has."""
        self.keep(run, ())
