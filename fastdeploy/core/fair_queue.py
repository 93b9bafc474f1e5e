# SPDX-License-Identifier: Apache-2.0
"""A queue that serves its clients in turn, so that the items of one client do not delay those of another."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items by client: each client's in order of arrival, the clients in proportion to their weights.

    This is start-time fair queueing (Goyal, Vin and Cheng, 1996) with items of equal cost: an item is due at the
    virtual time at which its client's previous item ends, but not before the virtual time of its arrival. The item that
    is due first is next. A client that was idle gains no credit. Not thread-safe.
    """

    def __init__(self) -> None:
        self._items: dict[str, deque[tuple[T, float]]] = {}  # the waiting items of each client, with their weights
        self._due: list[tuple[float, int, str]] = []  # heap: one entry per client with items
        self._ends: dict[str, float] = {}  # client -> virtual end of its last item in this busy period
        self._now = 0.0
        self._num_pushed = 0

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def push(self, client_id: str, item: T, weight: float = 1.0) -> None:
        """Append an item of a client; a client of weight 2 is served twice as often as one of weight 1."""
        if client_id in self._items:
            self._items[client_id].append((item, weight))
        else:
            self._items[client_id] = deque([(item, weight)])
            self._schedule(client_id)

    def peek(self) -> T:
        """Return the next item without removing it; raise IndexError if there is none."""
        return self._items[self._due[0][2]][0][0]

    def pop(self) -> T:
        """Remove and return the next item; raise IndexError if there is none."""
        self._now, _, client_id = heappop(self._due)
        items = self._items[client_id]
        item, weight = items.popleft()
        self._ends[client_id] = self._now + 1 / weight
        if items:
            self._schedule(client_id)
        else:
            del self._items[client_id]
            if not self._items:  # the end of a busy period: nothing is owed
                self._ends.clear()
                self._now = 0.0
        return item

    def _schedule(self, client_id: str) -> None:
        start = max(self._now, self._ends.get(client_id, 0.0))
        heappush(self._due, (start, self._num_pushed, client_id))
        self._num_pushed += 1
