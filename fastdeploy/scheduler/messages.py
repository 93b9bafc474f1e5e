# SPDX-License-Identifier: Apache-2.0
"""What stands in Redis besides tickets and the messages of `request_states.py`, and how all of it is encoded.

Every value is msgpack behind one byte with the version of the schema. A reader refuses another version: nodes of unlike
versions may share a topic, but not a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

from fastdeploy.core.errors import FastDeployError
from fastdeploy.kv_cache.connectors.base import Host
from fastdeploy.scheduler.message_checks import check_ticket, check_to_owner
from fastdeploy.scheduler.request_states import Count, FromNode, Name, Role, Ticket, ToNode

SCHEMA_VERSION = 1
MAX_BYTES = 128 << 20  # of one value; log-probabilities of a long prompt need some tens of MiB
MAX_SHOWN = 200  # characters of an error

Part = Annotated[str, msgspec.Meta(pattern=r"^[ -~]{0,100}\Z")]
"""Text that can stand in a line of the log."""


class NodeLoad(msgspec.Struct, frozen=True):
    """How busy a node is.

    Attributes:
        num_running, num_waiting: sequences.
        num_waiting_tokens: prompt tokens that its engine has still to compute.
        num_free_blocks, num_blocks: of its KV cache.
        num_free_slots: of its arena.
    """

    num_running: Count = 0
    num_waiting: Count = 0
    num_waiting_tokens: Count = 0
    num_free_blocks: Count = 0
    num_blocks: Count = 0
    num_free_slots: Count = 0


class NodeRecord(msgspec.Struct, frozen=True):
    """The heartbeat of a node.

    Attributes:
        count: of heartbeats.
        incarnation, role: as in `Member`.
        group: digest of what decides the bits of a text.
        parts: what the digest consists of, by name; long values are digests themselves.
        layouts: digest of each part of a slot; blocks move between equal ones.
        endpoints: by connector, what a peer needs to fetch from this node.
        owners: of this node.
        version: of FastDeploy.
    """

    count: Count
    incarnation: Count
    role: Role
    group: str
    host: Host
    layouts: dict[str, str] = {}
    endpoints: dict[str, dict[str, str]] = {}
    owners: list[Name] = []
    load: NodeLoad = NodeLoad()
    version: Part = ""
    parts: dict[Part, Part] = {}


class AbortCall(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From one owner to all others: abort these requests and answer `AbortAnswer`."""

    asker: Name
    call_id: Count
    request_ids: list[str] | None
    salt_prefix: str


class AbortAnswer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The requests that an owner has aborted, and the number of tokens of each."""

    call_id: Count
    owner: Name
    num_tokens: list[tuple[str, Count]]


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
    return _decode(_to_owner, data, check_to_owner)


def decode_to_node(data: bytes) -> list[ToNode]:
    """Decode an entry of a node's inbox; raise BadMessageError."""
    return _decode(_to_node, data)


def decode_ticket(data: bytes) -> Ticket:
    """Decode an entry of a queue; raise BadMessageError."""
    return _decode(_ticket, data, check_ticket)


def decode_record(data: bytes) -> NodeRecord:
    """Decode a node's heartbeat; raise BadMessageError."""
    return _decode(_record, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes, check: Callable[[T], None] = lambda _: None) -> T:
    """Decode a value whose types have the ranges of single numbers and names; `check` compares them to each other."""
    if data[:1] != _VERSION:
        raise BadMessageError(f"expected version {SCHEMA_VERSION} of the schema, got {data[:1]!r}")
    if len(data) > MAX_BYTES:
        raise BadMessageError(f"expected at most {MAX_BYTES} bytes, got {len(data)}")
    try:
        value = decoder.decode(memoryview(data)[1:])
        check(value)
    except (msgspec.DecodeError, FastDeployError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise BadMessageError(str(error)[:MAX_SHOWN]) from None
    return value
