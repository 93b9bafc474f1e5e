# SPDX-License-Identifier: Apache-2.0
"""What a node has to tell owners and was not able to write yet."""

from __future__ import annotations

from collections import deque

from fastdeploy.scheduler.node_events import Send
from fastdeploy.scheduler.request_states import FromNode


class Outbox:
    """Messages by owner, each owner's in order; one write per owner at a time, repeated until it has succeeded."""

    def __init__(self, max_unsent: int) -> None:
        self._max_unsent = max_unsent
        self._unsent: dict[str, deque[FromNode]] = {}
        self._num_sending: dict[str, int] = {}  # messages of the `Send` whose result is not known

    @property
    def owners(self) -> set[str]:
        """Return the owners for which there are messages."""
        return set(self._unsent)

    def add(self, owner: str, message: FromNode) -> None:
        """Append a message; beyond the limit it is dropped, and the owner finds a gap."""
        unsent = self._unsent.setdefault(owner, deque())
        if len(unsent) < self._max_unsent:
            unsent.append(message)

    def discard(self, owner: str) -> None:
        """Drop the messages for an owner that is gone."""
        self._unsent.pop(owner, None)
        self._num_sending.pop(owner, None)

    def clear(self) -> None:
        """Drop all messages."""
        self._unsent.clear()
        self._num_sending.clear()

    def note_sent(self, owner: str, result: str) -> None:
        """Take the result of the last `Send` to an owner."""
        count = self._num_sending.pop(owner, 0)
        if result == "failed" or owner not in self._unsent:
            return
        for _ in range(count):
            self._unsent[owner].popleft()
        if not self._unsent[owner]:
            del self._unsent[owner]

    def flush(self) -> list[Send]:
        """Return one write for each owner that has messages and no write in progress."""
        sends = [Send(owner, tuple(unsent)) for owner, unsent in self._unsent.items() if owner not in self._num_sending]
        self._num_sending |= {send.owner: len(send.messages) for send in sends}
        return sends
