# SPDX-License-Identifier: Apache-2.0
"""Messages between API processes (ZeroMQ DEALER) and the engine process (ROUTER), encoded with msgpack."""

from __future__ import annotations

from typing import Any

import msgspec

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.stats import EngineStats


class Message(msgspec.Struct, tag=True, array_like=True):
    """Base of all messages; the class name is encoded with the fields."""


class Hello(Message):
    """Client: connect. The engine answers `Ready`, at once or when the model is loaded."""


class AddRequest(Message):
    """Client: generate. The engine answers with `Deltas`, or once with `Rejected`."""

    request: GenerationRequest


class AbortRequest(Message):
    """Client: abort this request; its last delta has the finish reason `abort`. An unknown id is ignored."""

    request_id: str


class AbortMany(Message):
    """Client: abort these requests of any client, and answer `Aborted` with the same call_id.

    An id, without the mark of a client, stands for the requests ID, `ID-0`, `ID-1`, ... of all clients; None stands for
    all requests. Only those whose `cache_salt` begins with `salt_prefix` are aborted.
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
    """Engine: the configuration was refused with a ConfigError; the process ends."""

    field: str
    message: str


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


class Stats(Message):
    """Engine: its counters, sent before deltas that finish a request, and at intervals."""

    stats: EngineStats


ToEngine = Hello | AddRequest | AbortRequest | AbortMany | ClientDisconnected | Shutdown
ToClient = Progress | Ready | StartupFailed | Rejected | Aborted | Deltas | Stats


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
