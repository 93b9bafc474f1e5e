# SPDX-License-Identifier: Apache-2.0
"""Messages between API processes (ZeroMQ DEALER) and the engine process (ROUTER), encoded with msgpack."""

from __future__ import annotations

from typing import Any

import msgspec

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.handover import Handover
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.stats import EngineStats, NodeStats


class Message(msgspec.Struct, tag=True, array_like=True):
    """Base of all messages; the class name is encoded with the fields."""


class Hello(Message):
    """Client: connect. The engine answers `Ready`, at once or when the model is loaded."""


class AddRequest(Message):
    """Client: generate. The engine answers with `Deltas`, or once with `Rejected`."""

    request: GenerationRequest


class Prepare(Message):
    """Agent: compile the form of a request and import the blocks of its image, which `AddRequest` then needs not do.

    The engine answers `Prepared` or `Rejected`.
    """

    request: GenerationRequest


class CancelPrepared(Message):
    """Agent: a prepared request will not be added; release what was imported for it. One that was added is aborted."""

    request_id: str


class HandOver(Message):
    """Agent: give up a request at the end of the step, with an image in these slots; the engine answers `HandedOver`.

    A request whose slots were given with `AddRequest` keeps them. The answer comes for a request that is unknown, too.
    """

    request_id: str
    export_slots: list[int]


class AttachArena(Message):
    """Agent: import from a peer's arena, served at this path, under this name; the engine answers `ArenaAttached`."""

    name: str
    path: str


class DetachArena(Message):
    """Agent: the peer is gone; unmap its arena once nothing is copied from it."""

    name: str


class SetRole(Message):
    """Client: change the role of this node; the engine passes it on to the agent."""

    role: str


class AgentReport(Message):
    """Agent: its counters, which the engine sends to all clients with its own."""

    stats: NodeStats


class AbortRequest(Message):
    """Client: abort this request; its last delta has the finish reason `abort`. An unknown id is ignored."""

    request_id: str


class AbortMany(Message):
    """Client: abort these requests of any client, and answer `Aborted` with the same call_id.

    An id, without marks, stands for the requests of all clients with this id, and for all of their prompts; None stands
    for all requests. Only those whose `cache_salt` begins with `salt_prefix` are aborted.
    """

    call_id: int
    request_ids: list[str] | None
    salt_prefix: str


class ClientDisconnected(Message):
    """Client: another client is gone; abort its requests and send it nothing more."""

    identity: bytes


class Shutdown(Message):
    """Client: end the engine process."""


class Progress(Message):
    """Engine: the current stage of start-up, and the fraction of it that is done."""

    what: str
    fraction: float


class Ready(Message):
    """Engine: the model is loaded."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    description: dict[str, Any]


class StartupFailed(Message):
    """Engine: the configuration was refused with a ConfigError, or the device cannot be used; the process ends."""

    field: str
    message: str
    is_configuration: bool = True


class Rejected(Message):
    """Engine: the request was refused; `kind` is `invalid` (with the field), `full` or `internal`."""

    request_id: str
    kind: str
    field: str
    message: str


class Aborted(Message):
    """Engine: the requests that an `AbortMany` aborted, without marks, and the number of tokens of each."""

    call_id: int
    num_tokens: list[tuple[str, int]]


PlainDelta = tuple[str, int, list[int], list[str], int, int]
"""The output of most steps, as in TokenDelta: request_id, index, token_ids, draft_sources, seed, first_index."""


class Deltas(Message):
    """Engine: the tokens emitted for this client's requests.

    Most deltas are plain, which is cheaper to decode. The plain deltas of a request precede its others.
    """

    plain: list[PlainDelta]
    others: list[TokenDelta]


class Prepared(Message):
    """Engine: a request can be added without delay; so many tokens of its context have arrived or were cached."""

    request_id: str
    num_imported_tokens: int = 0


class HandedOver(Message):
    """Engine: a request was given up and its blocks are copied; `handover` is None if it was unknown."""

    request_id: str
    handover: Handover | None


class ArenaAttached(Message):
    """Engine: the arena of this name is mapped; `error` says why it is not."""

    name: str
    error: str = ""


class Stats(Message):
    """Engine: its counters, sent before deltas that finish a request, and at intervals."""

    stats: EngineStats


ToEngine = (
    Hello
    | AddRequest
    | AbortRequest
    | AbortMany
    | ClientDisconnected
    | Shutdown
    | Prepare
    | CancelPrepared
    | HandOver
    | AttachArena
    | DetachArena
    | SetRole
    | AgentReport
)
ToClient = (
    Progress
    | Ready
    | StartupFailed
    | Rejected
    | Aborted
    | Deltas
    | Stats
    | Prepared
    | HandedOver
    | ArenaAttached
    | SetRole
)


def split_deltas(deltas: list[TokenDelta]) -> Deltas:
    """Return the message for the deltas of one or several steps; those of one request keep their order."""
    plain: list[PlainDelta] = []
    others: list[TokenDelta] = []
    has_others: set[str] = set()
    for delta in deltas:
        is_plain = delta.finish_reason is None and delta.logprobs is None and delta.prompt_logprobs is None
        if is_plain and delta.request_id not in has_others:
            plain.append(
                (delta.request_id, delta.index, delta.token_ids, delta.draft_sources, delta.seed, delta.first_index)
            )
        else:
            others.append(delta)
            has_others.add(delta.request_id)
    return Deltas(plain, others)


encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode
