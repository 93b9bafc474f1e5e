# SPDX-License-Identifier: Apache-2.0
"""How a request moves between nodes, and the vocabulary of the two state machines that move it.

Read this page first. `OwnerStates` (`owner_states.py`) and `NodeStates` (`node_states.py`) are the machines. They read
no clock, do no I/O and draw no random numbers: `handle(event, now)` changes the state and returns actions. The I/O of
owner and agent translates; the property test (`tests/scheduler`) runs the same machines over a model of Redis.

Who is who. The API process that holds a client's connection *owns* the request: it keeps the prompt, the seed and every
delivered token, so everything elsewhere is a copy that may be lost. A *node* is an agent with its engine. Owners put
*tickets* into the queues of Redis; nodes claim them and answer with messages.

A request has one *leg* at a time, numbered by its owner: a ticket, or a run on the owner's own engine (LOCAL). Another
try or a hand-over is the next leg and resumes behind the delivered tokens, which exactness makes invisible. A ticket
that Redis lost is put in again under the same leg. The owner accepts messages of the present leg from its one
*claimant* (node and incarnation) only; whoever sends others is told to abort. So it does no harm if a message or ticket
arrives twice or late, or if two nodes hold one leg.

    owner, per request                                        node, per ticket

    WAITING ──(no other node, or Redis away)──> LOCAL         (read, with room)
       │ enqueue                                 │              │
       v          node lost, refused: next leg   │            CLAIMED     being announced, in one transaction that
    QUEUED <──────────────────────────┐          │              │         deletes the ticket
       │ claimed                      │          │            ANNOUNCED   waits for slots, if it hands over
       v                              │          │            PULLING     reads the image of the former leg, if any
    RUNNING ──handed over (image)─────┘          │            RUNNING     deltas go to the owner
       │ all choices ended                       │              │ prefill done, or draining
       v                                         v            HANDING     the image is leased until released
     ended <─────────────────────────────────────┘              v
       ^── from any state: client left, 400, 429, 503, 504    gone        remembered for a minute

What can go wrong, and what notices it:

| loss | noticed by |
| --- | --- |
| node | its key is missing in two looks, or one that began after the claim shows another incarnation: next leg |
| owner | its key is missing in two looks: nodes drop its tickets and images, and send a last, empty `Holding` |
| process that stood still | its own clock: a node takes a new incarnation, an owner starts next legs |
| ticket in Redis | an *audit* compares the queues with what should stand in them |
| claim never announced | the entry is still pending: its consumer, or after a while another one, reads it again |
| claim or end of a ticket | `Holding`, the list of all that a node has for an owner, sent at intervals |
| tokens | the next delta begins too far, or `Holding` says so: `Resend`, or the next leg |
| writes, after which the client library reconnects in silence | `Heartbeat`: audit and `Holding` |
| release or abort | `Holding` shows a leg that is not the present one: abort |

After Redis was away or has lost writes, nobody is judged dead for one expire period: keys need time to come back.

Incarnations of a node are compared for equality only: they come from no clock. A node writes its record before it
announces claims of a new incarnation (`RecordWritten`). So a look that began after the claim arrived shows the
claimant's incarnation or a later one, while an earlier look may show an earlier one.

What the I/O has to do: carry out actions in their order, through one writer per process; in each sync period write the
heartbeat, then feed `Looked` (on a node between `RecordWritten` and `OwnersLooked`), then `Tick`, also while Redis is
away; read the keys of an owner's look before its heartbeat, which shows whether Redis may have had old ones;
feed `RedisLost` when a command fails as if Redis were away, and `RedisReturned` after the next heartbeat that succeeds
or when a `Heartbeat` or a missing group shows that writes were lost; read its own stream from the beginning after each
return.
Why the rules are as they are: docs/decisions/0014-requests-across-nodes.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, NamedTuple

import msgspec

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.outputs import TokenDelta

# What is read from Redis must be in these ranges (`messages.py`); nothing is checked where it is made.

MAX_INT = 2**63 - 1
MAX_CHOICES = 128
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
Leg = Annotated[int, msgspec.Meta(ge=1, le=MAX_INT)]
Choice = Annotated[int, msgspec.Meta(ge=0, lt=MAX_CHOICES)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,200}\Z")]
"""Of a node or owner."""


class Stage(StrEnum):
    """A queue of tickets; `--scheduler-name global` uses `decode` only."""

    PREFILL = "prefill"
    DECODE = "decode"


class Role(StrEnum):
    """Which tickets a node prefers; a draining node takes none and hands over what it runs."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    DRAINING = "draining"


@dataclass(frozen=True)
class Limits:
    """Times in seconds, and counts; None means no limit.

    Attributes:
        sync_s, expire_s: between heartbeats; until a silent node or owner is gone.
        stall_s: without progress on a living node until the next leg (`--scheduler-release-load-expire-period`).
        ttl_s: without progress until a request fails.
        patience_s: without Redis until streams that stand still go on locally.
        max_waiting_s, max_waiting: how long, and how many, requests may wait for their first claim.
        max_attempts, max_losses: lost legs without a token, and of any kind, that end a request.
        hint_s: how long only the hinted node may claim a ticket.
        tickets_per_node: tickets that stand in Redis per live node of a stage and owner.
        lease_s: how long an image is kept without renewal.
        holding_s: between two `Holding` of one node.
        refusal_s: how long a node that refused a ticket claims nothing of its stage.
        remember_s: how long a node remembers aborts and the deltas that it sent.
        step_tokens, min_prompt: a resumed context, or a new prompt, of at most so many tokens needs no prefill node.
        max_unsent: messages to one owner that a node keeps while they cannot be written.
    """

    sync_s: float = 0.5
    expire_s: float = 3.0
    stall_s: float = 600.0
    ttl_s: float = 900.0
    patience_s: float | None = 30.0
    max_waiting_s: float | None = None
    max_waiting: int | None = None
    max_attempts: int = 3
    max_losses: int = 10
    hint_s: float = 0.5
    tickets_per_node: int = 2
    lease_s: float = 10.0
    holding_s: float = 5.0
    refusal_s: float = 1.0
    remember_s: float = 60.0
    step_tokens: int = 2048
    min_prompt: int = 64
    max_unsent: int = 10_000


class Member(NamedTuple):
    """A node as its key in Redis describes it; the incarnation differs from those of all its other processes."""

    incarnation: int
    role: Role


class Image(msgspec.Struct, frozen=True, array_like=True):
    """Computed blocks that a node keeps for the next leg.

    Attributes:
        node, incarnation, leg: who keeps it, and the leg that made it.
        content: what a connector needs to fetch it (`KVImage`); the state machines only pass it on.
    """

    node: Name
    incarnation: Count
    leg: Leg
    content: bytes = b""


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """One leg of a request, as it stands in a queue; (owner, number, leg) is its identity.

    Attributes:
        request: prompt and parameters.
        resumed: per choice: the tokens delivered so far; None if the choice has ended.
        num_attempts: lost legs that delivered no token.
        prompt_logprobs: whether the log-probabilities of the prompt are requested and not yet delivered.
        timeout_s: what is left of the request's deadline.
        image: computed blocks to fetch.
    """

    owner: Name
    number: Count
    leg: Leg
    stage: Stage
    request: GenerationRequest
    resumed: list[list[TokenId] | None]
    num_attempts: Count = 0
    prompt_logprobs: bool = False
    timeout_s: float | None = None
    image: Image | None = None

    @property
    def key(self) -> tuple[str, int]:
        """Return whose request this is: owner and number."""
        return self.owner, self.number

    def engine_request(self) -> GenerationRequest:
        """Return this leg as a request to an engine, without an image."""
        params = self.request.params
        if not self.prompt_logprobs and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)
        return replace(
            self.request,
            request_id=leg_id(self.owner, self.number, self.leg),
            params=params,
            timeout_s=self.timeout_s,
            resumed=self.resumed,
        )


def leg_id(owner: str, number: int, leg: int) -> str:
    """Return the engine's request id of a leg, which differs from those of all other legs."""
    return f"{owner}/{number}/{leg}"


class NodeMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From a node to the owner of request `number`; `seq` counts the messages of one incarnation."""

    number: Count
    leg: Leg
    node: Name
    incarnation: Count
    seq: Count


class Claimed(NodeMessage, frozen=True):
    """The node has taken the ticket out of the queue."""


class Tokens(NodeMessage, frozen=True):
    """Tokens of one choice, of which the first has the index `first_index` in the choice's output."""

    first_index: Count
    delta: TokenDelta


class Handed(NodeMessage, frozen=True):
    """The node is done with this leg, another one should go on; it found `num_cached_tokens` of the prompt cached."""

    image: Image | None
    num_cached_tokens: Count = 0


class Refused(NodeMessage, frozen=True):
    """The node does not run this leg: `invalid` (with the field) is final, `room` is not."""

    kind: str
    field: str = ""
    message: str = ""


class Held(msgspec.Struct, frozen=True, array_like=True):
    """One ticket of a `Holding`; `image` is set in the state HANDING.

    `next_indices` are per choice the indices behind the tokens sent, 0 before the first.
    """

    number: Count
    leg: Leg
    next_indices: list[Count]
    num_computed: Count = 0
    image: Image | None = None


class Holding(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From a node to one owner: all announced tickets that it has of it; `lost_writes` asks for an audit."""

    node: Name
    incarnation: Count
    seq: Count
    held: list[Held]
    lost_writes: bool = False


class OwnerMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To a node, about the ticket (owner, number, leg)."""

    owner: Name
    number: Count
    leg: Leg


class Abort(OwnerMessage, frozen=True):
    """Forget this leg and earlier ones, their images too; an unknown one is remembered as aborted."""


class Release(OwnerMessage, frozen=True):
    """Free the image that this leg made."""


class Renew(OwnerMessage, frozen=True):
    """Keep the image that this leg made for another lease."""


class Resend(OwnerMessage, frozen=True):
    """Send the tokens of a choice again, beginning with `first_index`."""

    choice: Choice
    first_index: Count


FromNode = Claimed | Tokens | Handed | Refused | Holding
ToNode = Abort | Release | Renew | Resend


# Events of both machines.


@dataclass(frozen=True, slots=True)
class Tick:
    """Sync period: time has passed; `local_room` is how many more requests an owner's own engine can take."""

    local_room: int = 0


@dataclass(frozen=True, slots=True)
class Looked:
    """Sync period: these nodes of the group have a key in Redis, which was read after `began_at`."""

    members: dict[str, Member]
    began_at: float


@dataclass(frozen=True, slots=True)
class RedisLost:
    """A command failed in a way that says that Redis is away, full or read-only."""


@dataclass(frozen=True, slots=True)
class RedisReturned:
    """The first heartbeat since `RedisLost` was written, or a heartbeat whose answer shows that writes were lost."""


# Actions of both machines.


@dataclass(frozen=True, slots=True)
class Tell:
    """Write to the input stream of a node, if that exists; failures need no answer."""

    node: str
    message: ToNode
