# SPDX-License-Identifier: Apache-2.0
"""What stands in Redis besides tickets and the messages of `request_states.py`, and how all of it is encoded.

Every value is msgpack behind one byte with the version of the schema. A reader refuses another version: nodes of unlike
versions may share a topic, but not a group.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from fastdeploy.scheduler.request_states import FromNode, Role, Ticket, ToNode

SCHEMA_VERSION = 1


class Host(msgspec.Struct, frozen=True):
    """What two processes must have in common to share memory."""

    boot_id: str
    network_namespace: str
    user: int


class NodeLoad(msgspec.Struct, frozen=True):
    """How busy a node is.

    Attributes:
        num_running, num_waiting: sequences.
        num_waiting_tokens: prompt tokens that its engine has still to compute.
        num_free_blocks, num_blocks: of its KV cache.
        num_free_slots: of its arena.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    num_free_slots: int = 0


class NodeRecord(msgspec.Struct, frozen=True):
    """The heartbeat of a node.

    Attributes:
        count: of heartbeats.
        incarnation, role: as in `Member`.
        group: digest of what decides the bits of a text.
        layouts: digest of each part of a slot; blocks move between equal ones.
        endpoints: by connector, what a peer needs to fetch from this node.
        owners: of this node.
        version: of FastDeploy.
    """

    count: int
    incarnation: int
    role: Role
    group: str
    host: Host
    layouts: dict[str, str] = {}
    endpoints: dict[str, dict[str, str]] = {}
    owners: list[str] = []
    load: NodeLoad = NodeLoad()
    version: str = ""


class AbortCall(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From one owner to all others: abort these requests and answer `AbortAnswer`."""

    asker: str
    call_id: int
    request_ids: list[str] | None
    salt_prefix: str


class AbortAnswer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The requests that an owner has aborted, and the number of tokens of each."""

    call_id: int
    owner: str
    num_tokens: list[tuple[str, int]]


ToOwner = FromNode | AbortCall | AbortAnswer


class BadMessageError(Exception):
    """A value that cannot be decoded; the message says why."""


T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode
_VERSION = bytes([SCHEMA_VERSION])
_to_owner = msgspec.msgpack.Decoder(list[ToOwner])
_to_node = msgspec.msgpack.Decoder(list[ToNode])
_ticket = msgspec.msgpack.Decoder(Ticket)
_record = msgspec.msgpack.Decoder(NodeRecord)


def encode(value: Any) -> bytes:
    """Encode a value behind the schema's version."""
    return _VERSION + _encode(value)


def decode_to_owner(data: bytes) -> list[ToOwner]:
    """Decode an entry of an owner's inbox; raise BadMessageError."""
    return _decode(_to_owner, data)


def decode_to_node(data: bytes) -> list[ToNode]:
    """Decode an entry of a node's inbox; raise BadMessageError."""
    return _decode(_to_node, data)


def decode_ticket(data: bytes) -> Ticket:
    """Decode an entry of a queue; raise BadMessageError."""
    return _decode(_ticket, data)


def decode_record(data: bytes) -> NodeRecord:
    """Decode a node's heartbeat; raise BadMessageError."""
    return _decode(_record, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    if data[:1] != _VERSION:
        raise BadMessageError(f"expected version {SCHEMA_VERSION} of the schema, got {data[:1]!r}")
    try:
        return decoder.decode(memoryview(data)[1:])
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError, RecursionError) as error:
        raise BadMessageError(str(error)) from None
