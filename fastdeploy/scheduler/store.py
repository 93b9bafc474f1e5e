# SPDX-License-Identifier: Apache-2.0
"""Every command to Redis: one method per step of the protocol. The only importer of `redis`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fastdeploy.config.cluster_config import ClusterConfig
from fastdeploy.scheduler.keys import Keys
from fastdeploy.scheduler.messages import NodeRecord, ToOwner
from fastdeploy.scheduler.request_states import Stage, Ticket, ToNode


class StoreError(Exception):
    """Redis is away, full, read-only, loading, or a cluster that is down: `RedisLost`. The message says which."""


class GroupMissingError(StoreError):
    """A stream or its consumer group is gone, so that Redis has lost data: `RedisReturned`."""


class Entry(NamedTuple):
    """Where a ticket stands."""

    stream: str
    entry_id: bytes


@dataclass(frozen=True)
class Beat:
    """The answer to a heartbeat, for `Heartbeat.lost_writes`."""

    old_value: bytes | None
    server: str
    has_streams: bool


class Store:
    """The commands of one process, used from one event loop.

    Every method raises StoreError if Redis does not answer, or answers in a way that says that nothing works now.

    Attributes:
        num_commands: commands sent so far, those of a transaction included.
    """

    def __init__(self, config: ClusterConfig, keys: Keys) -> None:
        """Create the client; nothing is sent before the first command."""
        self.num_commands = 0
        raise NotImplementedError

    async def check_server(self) -> list[str]:
        """Check version, permissions and persistence; return notes for the operator.

        Raises:
            ConfigError: the password is wrong, the version below 7.0, the server a read-only replica, or the user may
                not use these keys.
            StoreError: it does not answer.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Close the connections."""
        raise NotImplementedError

    # Liveness.

    async def beat_node(self, node: str, record: NodeRecord, ttl_s: float, streams: Sequence[str]) -> Beat:
        """Renew a node's key, its name in the set, and the TTL of the streams that it reads."""
        raise NotImplementedError

    async def beat_owner(self, owner: str, count: int, ttl_s: float) -> Beat:
        """Renew an owner's key, its name in the set, and the TTL of its inbox."""
        raise NotImplementedError

    async def read_nodes(self) -> dict[str, NodeRecord]:
        """Return the records of the nodes of this group whose key exists; one that cannot be read is left out."""
        raise NotImplementedError

    async def read_owners(self) -> frozenset[str]:
        """Return the owners whose key exists."""
        raise NotImplementedError

    async def forget(self, nodes: Sequence[str], owners: Sequence[str]) -> None:
        """Remove names of the sets whose keys are gone, and the consumers and hint queues of these nodes."""
        raise NotImplementedError

    async def delete_node(self, node: str) -> None:
        """Delete a node's key and name, because it ends."""
        raise NotImplementedError

    async def delete_owner(self, owner: str) -> None:
        """Delete an owner's key, name and inbox, because it ends."""
        raise NotImplementedError

    # Inboxes.

    async def create_inbox(self, stream: str) -> None:
        """Create an empty stream for messages, unless it exists."""
        raise NotImplementedError

    async def read_inbox(self, stream: str, cursor: bytes, block_s: float) -> list[tuple[bytes, bytes]]:
        """Return (id, payload) of entries after `cursor` (b"0": all); wait for one up to `block_s`, 0 not at all."""
        raise NotImplementedError

    async def delete_entries(self, stream: str, entry_ids: Sequence[bytes]) -> None:
        """Delete entries that were read."""
        raise NotImplementedError

    async def send_to_owner(self, owner: str, messages: Sequence[ToOwner]) -> bool:
        """Write one entry to an owner's inbox; return False if the inbox is missing."""
        raise NotImplementedError

    async def send_to_node(self, node: str, messages: Sequence[ToNode]) -> bool:
        """Write one entry to a node's inbox; return False if the inbox is missing."""
        raise NotImplementedError

    # Queues.

    async def create_queues(self, node: str) -> None:
        """Create the queues of all stages, shared and of this node, with their group, unless they exist."""
        raise NotImplementedError

    async def enqueue(self, ticket: Ticket, hint: str = "") -> Entry:
        """Write a ticket to the queue of its stage, or to that of the node `hint`."""
        raise NotImplementedError

    async def dequeue(self, entries: Sequence[Entry]) -> None:
        """Delete entries of queues."""
        raise NotImplementedError

    async def find_tickets(self, owner: str) -> list[tuple[Entry, Ticket, str]]:
        """Return all tickets of an owner that stand in queues, with the hint of their queue."""
        raise NotImplementedError

    async def read_tickets(
        self, stages: Sequence[Stage], node: str, consumer: str, block_s: float
    ) -> list[tuple[Entry, Ticket]]:
        """Take at most one ticket per queue of these stages, hinted ones first; wait for one up to `block_s`.

        A ticket that cannot be decoded is deleted, with a line in the log.

        Raises:
            GroupMissingError: a queue is missing.
        """
        raise NotImplementedError

    async def read_pending(self, node: str, consumer: str, idle_s: float) -> list[tuple[Entry, Ticket]]:
        """Return the entries that are pending for this consumer, and take over those idle for `idle_s` of any other."""
        raise NotImplementedError

    async def claim(self, owner: str, messages: Sequence[ToOwner], entry: Entry) -> bool:
        """Write to the owner's inbox, acknowledge and delete the entry, in one transaction.

        Returns:
            Whether the inbox exists; the entry is deleted in either case.
        """
        raise NotImplementedError

    async def drop(self, entry: Entry) -> None:
        """Acknowledge and delete an entry."""
        raise NotImplementedError

    async def queue_lengths(self) -> dict[Stage, int]:
        """Return the number of tickets in the shared queue of each stage."""
        raise NotImplementedError

    # Prefixes.

    async def find_prefixes(self, hashes: Sequence[bytes]) -> list[str]:
        """Return, for each hash, the node that last computed this prefix; "" if unknown."""
        raise NotImplementedError

    async def note_prefixes(self, node: str, hashes: Sequence[bytes]) -> None:
        """Note that a node has these prefixes cached."""
        raise NotImplementedError
