# SPDX-License-Identifier: Apache-2.0
"""What the state machine of an owner is told, and what it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.scheduler.request_states import FromNode, Looked, RedisLost, RedisReturned, Stage, Tell, Tick, Ticket


@dataclass(frozen=True, slots=True)
class Submit:
    """A client's request; `num_cached` prompt tokens are cached on the node `hint`."""

    number: int
    request: GenerationRequest
    hint: str = ""
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client has left, or somebody aborted the request."""

    number: int


@dataclass(frozen=True, slots=True)
class EnqueueFailed:
    """An `Enqueue` was not written, or nobody knows whether it was."""

    number: int
    leg: int


Standing = tuple[int, int, Stage, str]
"""A ticket in a queue: number, leg, stage, and the node that alone may claim it, or ""."""


@dataclass(frozen=True, slots=True)
class Audited:
    """The result of the `Audit` with this count: number, leg, stage and hint of every ticket of this owner."""

    count: int
    found: frozenset[Standing]


@dataclass(frozen=True, slots=True)
class LocalDied:
    """The owner's own engine has ended."""


@dataclass(frozen=True, slots=True)
class Enqueue:
    """Write the ticket to the queue of its stage, or to that of the node `hint`."""

    ticket: Ticket
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Dequeue:
    """Delete all entries of this leg's ticket, those that the last audit found too."""

    number: int
    leg: int


@dataclass(frozen=True, slots=True)
class Audit:
    """List this owner's tickets in all queues, after all that was written before."""

    count: int


@dataclass(frozen=True, slots=True)
class RunLocal:
    """Run this leg on the owner's own engine; its messages come from `LOCAL_CLAIMANT`."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class AbortLocal:
    """End this leg on the owner's own engine."""

    number: int
    leg: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give this delta to the client."""

    number: int
    delta: TokenDelta


@dataclass(frozen=True, slots=True)
class End:
    """The request has ended: with its last delta, or with an error.

    `kind`, if not empty: invalid (400, with the field), full or waited (429), attempts (503), stalled
    (504), or timeout (the request's own deadline).
    """

    number: int
    kind: str = ""
    field: str = ""
    message: str = ""
    losses: tuple[str, ...] = ()


class LossReason(StrEnum):
    """Why a leg was lost; the label of `cluster_attempts_total`."""

    NODE_LOST = "node_lost"
    NODE_RESTARTED = "node_restarted"
    FORGOTTEN = "forgotten"
    STALLED = "stalled"
    ENGINE_DIED = "engine_died"


@dataclass(frozen=True, slots=True)
class LegLost:
    """For metrics: a leg was lost."""

    reason: LossReason


@dataclass(frozen=True, slots=True)
class LegClaimed:
    """For metrics: a node has claimed a leg, so many seconds after the leg had begun or the request had arrived."""

    stage: Stage
    waited_s: float


OwnerEvent = (
    Submit | Cancelled | EnqueueFailed | Audited | LocalDied | FromNode | Tick | Looked | RedisLost | RedisReturned
)
OwnerAction = Enqueue | Dequeue | Audit | RunLocal | AbortLocal | Deliver | End | Tell
