# SPDX-License-Identifier: Apache-2.0
"""One ticket as the node keeps it that has claimed it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

from fastdeploy.core.outputs import TokenDelta
from fastdeploy.scheduler.node_events import Key
from fastdeploy.scheduler.request_states import Held, Image, Ticket


class HeldState(Enum):
    """The states of the diagram in `request_states.py`; CLAIMED is ANNOUNCED once the owner was told."""

    CLAIMED = auto()
    ANNOUNCED = auto()
    PULLING = auto()
    RUNNING = auto()
    HANDING = auto()
    ABORTED = auto()  # until the transport no longer writes to its slots


@dataclass
class HeldTicket:
    """A ticket that a node has.

    Attributes:
        entry: where it stands in its queue.
        hands_over: whether it ends here with its first token.
        num_wanted_slots, num_slots: slots of the arena that it waits for, and that it has.
        next_indices, ended: per choice, the index behind the tokens that were sent, and whether the last was.
        sent: time, first index and delta of what was sent.
        image, lease_until: in the state HANDING, the image and how long it is kept.
    """

    ticket: Ticket
    entry: str
    hands_over: bool
    num_wanted_slots: int
    state: HeldState = HeldState.CLAIMED
    num_slots: int = 0
    next_indices: list[int] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    num_computed: int = 0
    sent: deque[tuple[float, int, TokenDelta]] = field(default_factory=deque)
    image: Image | None = None
    lease_until: float = 0.0

    def __post_init__(self) -> None:
        self.next_indices = [len(tokens or ()) for tokens in self.ticket.resumed]
        self.ended = [tokens is None for tokens in self.ticket.resumed]

    @property
    def key(self) -> Key:
        """Return whose request this is."""
        return self.ticket.key

    @property
    def leg(self) -> int:
        """Return the ticket's leg."""
        return self.ticket.leg

    @property
    def is_suspicious(self) -> bool:
        """Return whether one more loss without a token would end the request: its prompt may kill engines."""
        return self.ticket.num_attempts >= 2

    def report(self) -> Held:
        """Return what `Holding` says about it."""
        return Held(self.ticket.number, self.leg, list(self.next_indices), self.num_computed, self.image)

    def note_sent(self, now: float, first_index: int, delta: TokenDelta, remember_s: float) -> None:
        """Remember a delta for `sent_since`, and forget old ones."""
        self.next_indices[delta.index] = first_index + len(delta.token_ids)
        self.ended[delta.index] = delta.finish_reason is not None
        self.sent.append((now, first_index, delta))
        while self.sent[0][0] < now - remember_s:
            self.sent.popleft()

    def sent_since(self, choice: int, first_index: int) -> list[tuple[int, TokenDelta]] | None:
        """Return the deltas of a choice from this index on; None if they are no longer remembered."""
        sent = [(first, delta) for _, first, delta in self.sent if delta.index == choice]
        missing = [one for one in sent if one[0] + len(one[1].token_ids) > first_index or one[1].finish_reason]
        return missing if missing and missing[0][0] <= first_index else None
