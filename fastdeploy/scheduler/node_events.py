# SPDX-License-Identifier: Apache-2.0
"""What the state machine of a node is told, and what it asks for."""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy.core.outputs import TokenDelta
from fastdeploy.scheduler.request_states import (
    Claimed,
    FromNode,
    Looked,
    RedisLost,
    RedisReturned,
    Refused,
    Role,
    Tell,
    Tick,
    Ticket,
    ToNode,
)

Key = tuple[str, int]
"""Owner and number of a request; a node has at most one leg of each besides the images of earlier legs."""
RunId = tuple[str, int, int]
"""Owner, number and leg of a ticket."""


@dataclass(frozen=True, slots=True)
class TicketRead:
    """An entry of a queue: new, pending for this consumer, or taken over from one that is idle.

    Attributes:
        ticket: its content.
        entry: stream and id, to acknowledge and delete it.
        export_slots, import_slots: slots that an image made here, or fetched, needs.
    """

    ticket: Ticket
    entry: str
    export_slots: int = 0
    import_slots: int = 0


@dataclass(frozen=True, slots=True)
class ClaimWritten:
    """The transaction of a `Claim` was executed."""

    key: Key
    leg: int


@dataclass(frozen=True, slots=True)
class RecordWritten:
    """A heartbeat with this incarnation was written."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Sent:
    """The result of a `Send`: `written`, `no_reader` if the owner's stream is missing, or `failed`."""

    owner: str
    result: str


@dataclass(frozen=True, slots=True)
class OwnersLooked:
    """Sync period: these owners have a key in Redis."""

    alive: frozenset[str]


@dataclass(frozen=True, slots=True)
class Fetched:
    """A `Fetch` has ended, with or without success: nothing writes to its slots any more."""

    key: Key
    leg: int


@dataclass(frozen=True, slots=True)
class EngineTokens:
    """The engine emitted tokens for one choice."""

    key: Key
    leg: int
    first_index: int
    delta: TokenDelta


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """The engine has computed so many tokens of the context."""

    key: Key
    leg: int
    num_computed: int


@dataclass(frozen=True, slots=True)
class EngineHandedOver:
    """The engine has ended a leg that another node should go on with.

    `content` describes the image and `num_slots` is its size; None if there is no image. `num_cached_tokens` is as in
    `RequestMetrics`.
    """

    key: Key
    leg: int
    content: bytes | None
    num_slots: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineRejected:
    """The engine refused a request: `invalid` (with the field) or `room`."""

    key: Key
    leg: int
    kind: str
    field: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class SetRole:
    """Take other tickets from now on."""

    role: Role


@dataclass(frozen=True, slots=True)
class Claim:
    """Write `message` to the owner and acknowledge and delete the entry, in one transaction; then `ClaimWritten`."""

    owner: str
    message: Claimed | Refused
    entry: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Acknowledge and delete the entry."""

    entry: str


@dataclass(frozen=True, slots=True)
class Send:
    """Write these messages to the owner, if its stream exists; then `Sent`."""

    owner: str
    messages: tuple[FromNode, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Find the prefix in the cache and fetch the rest of the image, within a deadline; then `Fetched`."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class StartEngine:
    """Give the ticket to the engine; with `hands_over` it ends after the first token, with an image."""

    ticket: Ticket
    hands_over: bool


@dataclass(frozen=True, slots=True)
class StopEngine:
    """Abort this leg in the engine."""

    key: Key
    leg: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """Ask the engine to end this leg with an image; then `EngineHandedOver`."""

    key: Key
    leg: int


@dataclass(frozen=True, slots=True)
class FreeImage:
    """Free the slots of the image that this leg made."""

    key: Key
    leg: int


@dataclass(frozen=True, slots=True)
class ReadPending:
    """Read the entries that are pending for this consumer, and take over those idle longer than the expire period."""


@dataclass(frozen=True, slots=True)
class Register:
    """Write the membership record, and create groups and the input stream where they are missing."""

    incarnation: int


NodeEvent = (
    TicketRead
    | ClaimWritten
    | RecordWritten
    | Sent
    | OwnersLooked
    | Fetched
    | EngineTokens
    | EngineProgress
    | EngineHandedOver
    | EngineRejected
    | SetRole
    | ToNode
    | Tick
    | Looked
    | RedisLost
    | RedisReturned
)
NodeAction = (
    Claim | Drop | Send | Fetch | StartEngine | StopEngine | HandOver | FreeImage | ReadPending | Register | Tell
)
