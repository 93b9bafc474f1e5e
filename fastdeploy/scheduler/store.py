# SPDX-License-Identifier: Apache-2.0
"""What is written to Redis and read from it: one method per step of the protocol.

Every key gets its time to live in the transaction that creates it; heartbeats renew those of the streams that a process
reads. An entry of a stream has one field, which holds a message of `messages.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastdeploy.config.cluster_config import ClusterConfig
from fastdeploy.config.redis_address import parse_address
from fastdeploy.scheduler.bad_messages import BadMessages
from fastdeploy.scheduler.keys import CONSUMER_GROUP, Keys
from fastdeploy.scheduler.messages import (
    BadMessageError,
    NodeRecord,
    ToOwner,
    decode_record,
    decode_ticket,
    encode,
)
from fastdeploy.scheduler.redis_answers import FIELD, RawEntry, parse_entries, parse_map, parse_streams, server_identity
from fastdeploy.scheduler.redis_client import Command, RedisClient
from fastdeploy.scheduler.redis_errors import GroupMissingError, StoreError
from fastdeploy.scheduler.request_states import Stage, Ticket, ToNode
from fastdeploy.scheduler.server_check import check_server

__all__ = ["Beat", "Entry", "GroupMissingError", "Store", "StoreError"]

MAX_BLOCK_S = 5.0  # that a read waits
PREFIX_TTL_S = 300
MAX_INBOX_ENTRIES = 10_000
READ_COUNT = 100  # entries per read of an inbox, or of what is pending
LIST_COUNT = 200
CLAIM_SCRIPT = f"""
local written = redis.call('XADD', KEYS[1], 'NOMKSTREAM', 'MAXLEN', '~', {MAX_INBOX_ENTRIES}, '*', 'm', ARGV[1])
redis.call('XDEL', KEYS[2], ARGV[2])
redis.call('XACK', KEYS[2], '{CONSUMER_GROUP}', ARGV[2])
return written
"""
"""As one command, a script costs a fifth of a transaction; if its first command fails, no other is executed."""
_LIMIT = ("NOMKSTREAM", "MAXLEN", "~", MAX_INBOX_ENTRIES, "*", FIELD)


class Entry(NamedTuple):
    """Where a ticket stands."""

    stream: str
    entry_id: bytes


@dataclass(frozen=True)
class Beat:
    """The answer to a heartbeat, for `Heartbeat.lost_writes`.

    Attributes:
        old_value: what stood in the key: the record of a node, or the count of an owner in decimal.
        server: run id and replication id, which change with a restart or failover.
        has_streams: whether all streams exist that the process reads.
    """

    old_value: bytes | None
    server: str
    has_streams: bool


class Store:
    """The commands of one process, used from one event loop.

    Every method raises StoreError if Redis does not answer, or answers in a way that says that nothing works now.

    Attributes:
        keys: names of the keys.
        bad_messages: what could not be decoded; readers of inboxes note theirs.
        foreign_records: of the nodes of other groups at the last look.
        gone_names: by set (`Keys.nodes`, `Keys.owners`), the names whose key was missing at the last look.
    """

    def __init__(self, config: ClusterConfig, keys: Keys) -> None:
        """Prepare the client; nothing is sent before the first command.

        Raises:
            ConfigError: `--scheduler-url` is not valid.
        """
        self.keys = keys
        self.bad_messages = BadMessages()
        self.foreign_records: dict[str, NodeRecord] = {}
        self.gone_names: dict[str, list[str]] = {}
        self._address = parse_address(config)
        expire_s = config.scheduler_expire_period / 1000
        self._client = RedisClient(self._address, keys.nodes, timeout_s=min(5.0, max(1.0, expire_s)))
        self._ttl_s = config.scheduler_ttl
        self._stages = list(Stage) if config.is_split else [Stage.DECODE]
        self._hints: set[str] = set()  # nodes for which this process has written tickets

    @property
    def num_commands(self) -> int:
        """Return the number of commands sent so far, those of a transaction included."""
        return self._client.num_commands

    async def check_server(self) -> list[str]:
        """Check version, permissions and memory policy; return notes for the operator.

        Raises:
            ConfigError: the password is wrong, the version below 7.0, the server a replica, or the user may not use
                these keys.
            StoreError: it does not answer.
        """
        return await check_server(self._client, self._address, self.keys)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    # Liveness.

    async def beat_node(self, node: str, record: NodeRecord, ttl_s: float, streams: Sequence[str]) -> Beat:
        """Renew a node's key, its name in the set, and the TTL of the streams that it reads."""
        return await self._beat(self.keys.node(node), encode(record), ttl_s, self.keys.nodes, node, streams)

    async def beat_owner(self, owner: str, count: int, ttl_s: float) -> Beat:
        """Renew an owner's key, its name in the set, and the TTL of its inbox."""
        keys = self.keys
        return await self._beat(keys.owner(owner), b"%d" % count, ttl_s, keys.owners, owner, [keys.owner_inbox(owner)])

    async def _beat(self, key: str, value: bytes, ttl_s: float, names: str, name: str, streams: Sequence[str]) -> Beat:
        old_value, _, _, *exist, info = await self._client.run_all(
            ("SET", key, value, "PX", max(1, round(ttl_s * 1000)), "GET"),
            ("SADD", names, name),
            ("EXPIRE", names, self._ttl_s),
            *(("EXPIRE", stream, self._ttl_s) for stream in streams),
            ("INFO", "server", "replication"),
        )
        return Beat(old_value, server_identity(info), all(exist))

    async def read_nodes(self) -> dict[str, NodeRecord]:
        """Return the records of the nodes of this group whose key exists; one that cannot be read is left out."""
        records: dict[str, NodeRecord] = {}
        foreign: dict[str, NodeRecord] = {}
        for node, value in (await self._read_names(self.keys.nodes, self.keys.node)).items():
            if value is None:
                continue
            try:
                record = decode_record(value)
            except BadMessageError:
                continue  # of another version, which is never of this group
            (records if record.group == self.keys.group else foreign)[node] = record
        self.foreign_records = foreign
        return records

    async def read_owners(self) -> frozenset[str]:
        """Return the owners whose key exists."""
        values = await self._read_names(self.keys.owners, self.keys.owner)
        return frozenset(name for name, value in values.items() if value is not None)

    async def _read_names(self, names_key: str, key: Any) -> dict[str, bytes | None]:
        """Return the values of the keys of the names in a set; None for those whose key is gone."""
        names = sorted(name.decode(errors="replace") for name in await self._client.run_one("SMEMBERS", names_key))
        values = await self._client.run_one("MGET", *map(key, names)) if names else []
        self.gone_names[names_key] = [name for name, value in zip(names, values) if value is None]
        return dict(zip(names, values))

    async def forget(self, nodes: Sequence[str], owners: Sequence[str]) -> None:
        """Remove names of the sets whose keys are gone, and the consumers and hint queues of these nodes."""
        commands: list[Command] = []
        if owners:
            commands.append(("SREM", self.keys.owners, *owners))
        if nodes:
            queues = [self.keys.queue(stage, node) for node in nodes for stage in self._stages]
            commands += [("SREM", self.keys.nodes, *nodes), ("DEL", *queues)]
        if commands:
            await self._client.run_all(*commands)
        for stage in self._stages if nodes else ():
            await self._delete_consumers(self.keys.queue(stage), nodes)

    async def _delete_consumers(self, queue: str, nodes: Sequence[str]) -> None:
        """Delete the consumers `NODE.…` of a queue that have nothing pending."""
        (answer,) = await self._client.run(("XINFO", "CONSUMERS", queue, CONSUMER_GROUP))
        if isinstance(answer, GroupMissingError):
            return
        if isinstance(answer, StoreError):
            raise answer
        prefixes = tuple(f"{node}.".encode() for node in nodes)
        consumers = [parse_map(one) for one in answer]
        idle = [one[b"name"] for one in consumers if one[b"name"].startswith(prefixes) and not one[b"pending"]]
        if not idle:
            return
        counts = await self._client.run_all(*(("XGROUP", "DELCONSUMER", queue, CONSUMER_GROUP, name) for name in idle))
        if any(counts):  # it has read meanwhile, and what it read is no longer pending: deliver everything again
            await self._client.run_one("XGROUP", "SETID", queue, CONSUMER_GROUP, "0")

    async def delete_node(self, node: str) -> None:
        """Delete a node's key, name, inbox and hint queues, because it ends."""
        queues = [self.keys.queue(stage, node) for stage in self._stages]
        await self._client.run_all(
            ("DEL", self.keys.node(node), self.keys.node_inbox(node), *queues), ("SREM", self.keys.nodes, node)
        )

    async def delete_owner(self, owner: str) -> None:
        """Delete an owner's key, name and inbox, because it ends."""
        await self._client.run_all(
            ("DEL", self.keys.owner(owner), self.keys.owner_inbox(owner)), ("SREM", self.keys.owners, owner)
        )

    # Inboxes.

    async def create_inbox(self, stream: str) -> None:
        """Create an empty stream for messages, unless it exists."""
        group = "new"  # only a group creates a stream without an entry
        await self._client.run_all(
            ("XGROUP", "CREATE", stream, group, "0", "MKSTREAM"),
            ("XGROUP", "DESTROY", stream, group),
            ("EXPIRE", stream, self._ttl_s),
            atomic=True,
        )

    async def read_inbox(self, stream: str, cursor: bytes, block_s: float) -> list[tuple[bytes, bytes]]:
        """Return (id, payload) of entries after `cursor` (b"0": all); wait for one up to `block_s`, 0 not at all."""
        block, block_s = _block(block_s)
        answer = await self._client.run_one(
            "XREAD", "COUNT", READ_COUNT, *block, "STREAMS", stream, cursor, block_s=block_s
        )
        return [(entry_id, payload or b"") for _, entries in parse_streams(answer) for entry_id, payload in entries]

    async def delete_entries(self, stream: str, entry_ids: Sequence[bytes]) -> None:
        """Delete entries that were read; those of several reads may be deleted at once."""
        if entry_ids:
            await self._client.run_one("XDEL", stream, *entry_ids)

    async def send_to_owner(self, owner: str, messages: Sequence[ToOwner]) -> bool:
        """Write one entry to an owner's inbox; return False if the inbox is missing."""
        return await self._send(self.keys.owner_inbox(owner), messages)

    async def send_to_node(self, node: str, messages: Sequence[ToNode]) -> bool:
        """Write one entry to a node's inbox; return False if the inbox is missing."""
        return await self._send(self.keys.node_inbox(node), messages)

    async def _send(self, stream: str, messages: Sequence[Any]) -> bool:
        return await self._client.run_one("XADD", stream, *_LIMIT, encode(messages)) is not None

    # Queues.

    async def create_queues(self, node: str) -> None:
        """Create the queues of all stages, shared and of this node, with their group, unless they exist."""
        commands: list[Command] = []
        for queue in self.queues(node):
            commands += [("XGROUP", "CREATE", queue, CONSUMER_GROUP, "0", "MKSTREAM"), ("EXPIRE", queue, self._ttl_s)]
        for answer in await self._client.run(*commands, atomic=True):
            if isinstance(answer, StoreError) and answer.code != "BUSYGROUP":
                raise answer

    async def enqueue(self, ticket: Ticket, hint: str = "") -> Entry:
        """Write a ticket to the queue of its stage, or to that of the node `hint`."""
        queue, payload = self.keys.queue(ticket.stage, hint), encode(ticket)
        if hint:
            self._hints.add(hint)
        entry_id = await self._client.run_one("XADD", queue, "NOMKSTREAM", "*", FIELD, payload)
        if entry_id is None:  # the first reader creates the group
            add = ("XADD", queue, "*", FIELD, payload)
            entry_id, _ = await self._client.run_all(add, ("EXPIRE", queue, self._ttl_s), atomic=True)
        return Entry(queue, entry_id)

    async def dequeue(self, entries: Sequence[Entry]) -> None:
        """Delete entries of queues."""
        by_queue: dict[str, list[bytes]] = {}
        for queue, entry_id in entries:
            by_queue.setdefault(queue, []).append(entry_id)
        if by_queue:
            commands: list[Command] = [("XDEL", queue, *entry_ids) for queue, entry_ids in by_queue.items()]
            await self._client.run_all(*commands)

    async def find_tickets(self, owner: str) -> list[tuple[Entry, Ticket, str]]:
        """Return all tickets of an owner that stand in queues, with the hint of their queue."""
        names = await self._client.run_one("SMEMBERS", self.keys.nodes)
        hints = ["", *sorted(self._hints | {name.decode(errors="replace") for name in names})]
        return [
            (Entry(queue, entry_id), ticket, hint)
            for hint in hints
            for queue in (self.keys.queue(stage, hint) for stage in self._stages)
            for entry_id, payload in await self._list(queue)
            if (ticket := _decode_or_none(payload)) is not None and ticket.owner == owner
        ]

    async def _list(self, stream: str) -> list[RawEntry]:
        found: list[RawEntry] = []
        start: bytes | str = "-"
        while True:
            page = parse_entries(await self._client.run_one("XRANGE", stream, start, "+", "COUNT", LIST_COUNT))
            found += page
            if len(page) < LIST_COUNT:
                return found
            start = b"(" + page[-1][0]

    async def read_tickets(
        self, stages: Sequence[Stage], node: str, consumer: str, block_s: float
    ) -> list[tuple[Entry, Ticket]]:
        """Take at most one ticket per queue of these stages, hinted ones first; wait for one up to `block_s`.

        A ticket that cannot be decoded is deleted and noted in `bad_messages`.

        Raises:
            GroupMissingError: a queue is missing.
        """
        queues = self.queues(node, stages)
        block, block_s = _block(block_s)
        answer = await self._client.run_one(
            *("XREADGROUP", "GROUP", CONSUMER_GROUP, consumer, "COUNT", 1, *block),
            *("STREAMS", *queues, *(">" for _ in queues)),
            block_s=block_s,
        )
        return await self._decode_all(parse_streams(answer))

    async def read_pending(self, node: str, consumer: str, idle_s: float) -> list[tuple[Entry, Ticket]]:
        """Return the entries that are pending for this consumer, and take over those idle for `idle_s` of any other."""
        queues, idle_ms = self.queues(node), round(idle_s * 1000)
        own = await self._client.run_one(
            *("XREADGROUP", "GROUP", CONSUMER_GROUP, consumer, "COUNT", READ_COUNT),
            *("STREAMS", *queues, *("0" for _ in queues)),
        )  # fails if a queue is missing, before anything is taken over
        answers = await self._client.run_all(
            *(("XAUTOCLAIM", queue, CONSUMER_GROUP, consumer, idle_ms, "0-0", "COUNT", READ_COUNT) for queue in queues)
        )
        taken = [(queue, parse_entries(entries)) for queue, (_, entries, *_) in zip(queues, answers)]
        return await self._decode_all([*parse_streams(own), *taken])

    async def _decode_all(self, found: Sequence[tuple[str, list[RawEntry]]]) -> list[tuple[Entry, Ticket]]:
        """Return the tickets; drop entries that were deleted meanwhile (None), or that cannot be decoded."""
        payloads = {Entry(queue, entry_id): payload for queue, raw in found for entry_id, payload in raw}
        tickets, dropped = [], []
        for entry, payload in payloads.items():
            try:
                if payload is None:
                    dropped.append(entry)
                else:
                    tickets.append((entry, decode_ticket(payload)))
            except BadMessageError as error:
                self.bad_messages.note(entry.stream, error)
                dropped.append(entry)
        if dropped:
            await self._client.run_all(*(command for entry in dropped for command in _removal(entry)))
        return tickets

    async def claim(self, owner: str, messages: Sequence[ToOwner], entry: Entry) -> bool:
        """Write to the owner's inbox, and acknowledge and delete the entry: both or nothing.

        Returns:
            Whether the inbox exists; the entry is deleted in either case.
        """
        keys, arguments = (self.keys.owner_inbox(owner), entry.stream), (encode(messages), entry.entry_id)
        return await self._client.run_one("EVAL", CLAIM_SCRIPT, len(keys), *keys, *arguments) is not None

    async def drop(self, entry: Entry) -> None:
        """Acknowledge and delete an entry."""
        await self._client.run_all(*_removal(entry))

    async def queue_lengths(self) -> dict[Stage, int]:
        """Return the number of tickets in the shared queue of each stage."""
        lengths = await self._client.run_all(*(("XLEN", self.keys.queue(stage)) for stage in self._stages))
        return dict(zip(self._stages, lengths))

    def queues(self, node: str, stages: Sequence[Stage] = ()) -> list[str]:
        """Return the queues of these stages that a node reads, or of all: its own before the shared ones."""
        return [self.keys.queue(stage, hint) for hint in (node, "") for stage in stages or self._stages]

    # Prefixes.

    async def find_prefixes(self, hashes: Sequence[bytes]) -> list[str]:
        """Return, for each hash, the node that last computed this prefix; "" if unknown."""
        if not hashes:
            return []
        nodes = await self._client.run_one("MGET", *map(self.keys.prefix, hashes))
        return [(node or b"").decode(errors="replace") for node in nodes]

    async def note_prefixes(self, node: str, hashes: Sequence[bytes]) -> None:
        """Note that a node has these prefixes cached."""
        if hashes:
            await self._client.run_all(*(("SET", self.keys.prefix(one), node, "EX", PREFIX_TTL_S) for one in hashes))


def _removal(entry: Entry) -> tuple[Command, Command]:
    """Return the commands for an entry that is done with; if only the first is executed, nothing of it is left over."""
    queue, entry_id = entry
    return ("XDEL", queue, entry_id), ("XACK", queue, CONSUMER_GROUP, entry_id)


def _block(block_s: float) -> tuple[Command, float]:
    """Return the option for a read that waits, and how long it does."""
    block_s = min(block_s, MAX_BLOCK_S)
    return (("BLOCK", max(1, round(block_s * 1000))), block_s) if block_s > 0 else ((), 0.0)


def _decode_or_none(payload: bytes | None) -> Ticket | None:
    try:
        return None if payload is None else decode_ticket(payload)
    except BadMessageError:
        return None
