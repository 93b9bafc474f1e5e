# SPDX-License-Identifier: Apache-2.0
"""What the API process and the engine process say to each other: msgpack between a ROUTER (engine) and DEALERs."""

from __future__ import annotations

from typing import Any

import msgspec

from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.stats import EngineStats


class Message(msgspec.Struct, tag=True, array_like=True):
    """Base of all messages; the class name travels with the fields."""


class Hello(Message):
    """Client: I am here. The engine answers `Ready`, at once or when the model is loaded."""


class AddRequest(Message):
    """Client: generate. The engine answers `Deltas`, or `Rejected` once."""

    request: GenerationRequest


class AbortRequest(Message):
    """Client: end this request; its last deltas say `abort`. An unknown id means nothing."""

    request_id: str


class AbortMany(Message):
    """Client: end these requests, whoever asked for them, and answer `Aborted` with the same ticket.

    An id also names the requests `ID-0`, `ID-1`, ...; None names all. Only requests whose `cache_salt` begins with
    `owner_salt` are meant.
    """

    ticket: int
    request_ids: list[str] | None
    owner_salt: str


class ClientGone(Message):
    """Client: that other client is gone; end its requests and tell it nothing more."""

    identity: bytes


class Shutdown(Message):
    """Client: end the process."""


class Progress(Message):
    """Engine: what start-up is doing, and the fraction of it that is done."""

    what: str
    fraction: float


class Ready(Message):
    """Engine: the model is loaded."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    description: dict[str, Any]


class StartupFailed(Message):
    """Engine: the configuration cannot be used (a ConfigError); the process ends."""

    field: str
    message: str


class Rejected(Message):
    """Engine: the request was not taken; `kind` is invalid (with the field) or full."""

    request_id: str
    kind: str
    field: str
    message: str


class Aborted(Message):
    """Engine: the requests that an `AbortMany` ended, and how many tokens each had."""

    ticket: int
    num_tokens: list[tuple[str, int]]


PlainDelta = tuple[str, int, list[int], list[str], int]
"""What most steps emit: request id, choice, tokens, proposers of the accepted drafts, seed."""


class Deltas(Message):
    """Engine: what steps emitted for this client's requests; most of it fits the form that is cheap to read.

    The plain ones of a request come before its others.
    """

    plain: list[PlainDelta]
    others: list[TokenDelta]


class Stats(Message):
    """Engine: its counters, sent before the deltas that end a request, and now and then."""

    stats: EngineStats


ToEngine = Hello | AddRequest | AbortRequest | AbortMany | ClientGone | Shutdown
ToClient = Progress | Ready | StartupFailed | Rejected | Aborted | Deltas | Stats


def split_deltas(deltas: list[TokenDelta]) -> Deltas:
    """Return the message for what one or several steps emitted; deltas of one request keep their order."""
    plain: list[PlainDelta] = []
    others: list[TokenDelta] = []
    has_others: set[str] = set()
    for delta in deltas:
        is_plain = delta.finish_reason is None and delta.logprobs is None and delta.prompt_logprobs is None
        if is_plain and delta.request_id not in has_others:
            plain.append((delta.request_id, delta.index, delta.token_ids, delta.drafted_by, delta.seed))
        else:
            others.append(delta)
            has_others.add(delta.request_id)
    return Deltas(plain, others)


encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode
