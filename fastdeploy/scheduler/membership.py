# SPDX-License-Identifier: Apache-2.0
"""A node's heartbeat, and what it sees of other nodes and owners."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

import msgspec

from fastdeploy.core.errors import ConfigError
from fastdeploy.core.faults import fault_point
from fastdeploy.core.stats import EngineStats
from fastdeploy.scheduler.keys import Keys
from fastdeploy.scheduler.liveness import Heartbeat
from fastdeploy.scheduler.messages import BadMessageError, NodeLoad, NodeRecord, decode_record
from fastdeploy.scheduler.node_events import OwnersLooked
from fastdeploy.scheduler.node_states import NodeStates
from fastdeploy.scheduler.request_states import Limits, Looked, Member, Role
from fastdeploy.scheduler.store import Store
from fastdeploy.version import __version__

LENGTHS_PERIOD = 4  # sync periods between looks at the lengths of the queues
LOOK_S = 0.1  # between looks for another process with this node's id
FORGET_PERIODS = 10  # expire periods without a key after which a name is forgotten
OTHER_KIND = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
MAX_FOREIGN_GROUPS = 100  # that are spoken of
UNKNOWN = "not known"
MAX_PARTS_SHOWN = 4  # of those in which two groups differ
NUM_FOREIGN_BEATS = 2  # in a row that find the record of another process, after which the node id is in use

logger = logging.getLogger("fastdeploy.agent")


class Membership:
    """The keys by which processes find each other, seen from one node.

    Attributes:
        records: of the live nodes of the group, itself included, at the last look.
        owners: of this node.
        queue_length: tickets that stand in Redis, by stage.
    """

    def __init__(self, node: str, record: NodeRecord, limits: Limits, store: Store, keys: Keys) -> None:
        """Begin without having looked.

        Args:
            record: what stays the same in all heartbeats.
        """
        self.records: dict[str, NodeRecord] = {}
        self.owners: list[str] = []
        self.queue_length: dict[str, int] = {}
        self._node, self._record, self._store, self._keys = node, record, store, keys
        self._expire_s = limits.expire_s
        self._heartbeat = Heartbeat()
        self._incarnations: set[int] = set()
        self._foreign_groups: set[str] = set()  # that were spoken of
        self._num_looks = self._num_foreign_beats = 0
        self._gone_since: dict[str, float] = {}
        self._missing_kind: Role | None = None  # whose work this node can do as well
        self._missing_since = 0.0  # time since which no node of that kind was seen; 0.0: there is one
        self._has_warned = False  # of that

    async def wait_alone(self) -> NodeRecord | None:
        """Wait until a former process with this node's id is gone; return its record.

        It is gone when its key has expired, or has not been renewed for as long: the clock of Redis may step back.

        Raises:
            ConfigError: that process is alive.
            StoreError: Redis is away.
        """
        first = found = await self.read_own()
        deadline = time.monotonic() + self._expire_s + LOOK_S
        while first is not None and found is not None and time.monotonic() < deadline:
            if found.count != first.count:
                raise self._id_error()
            await asyncio.sleep(LOOK_S)
            found = await self.read_own()
        return first

    async def read_own(self) -> NodeRecord | None:
        """Return the record that stands in the key of this node, whatever its group; raise StoreError."""
        records = await self._store.read_nodes()
        return records.get(self._node) or self._store.foreign_records.get(self._node)

    async def beat(self, states: NodeStates, stats: EngineStats) -> bool:
        """Write the heartbeat; return whether Redis has lost writes.

        Raises:
            ConfigError: another live process has this node's id.
            StoreError: Redis is away.
        """
        fault_point("agent_beat")
        self._incarnations.add(states.incarnation)
        streams = [self._keys.node_inbox(self._node), *self._store.queues(self._node)]
        record = self._make_record(states, stats)
        beat = await self._store.beat_node(self._node, record, self._expire_s, streams)
        old = _read_record(beat.old_value)
        self._check_alone(old)
        return self._heartbeat.lost_writes(None if old is None else old.count, beat.server, beat.has_streams)

    async def look(self, states: NodeStates) -> tuple[Looked, OwnersLooked]:
        """Look at the keys of all nodes and owners, and clean up after those that are long gone; raise StoreError."""
        began_at = time.monotonic()
        self.records = await self._store.read_nodes()
        members = {name: Member(record.incarnation, record.role) for name, record in self.records.items()}
        owners = await self._store.read_owners()
        self.owners = sorted(owner for owner in owners if self.is_own(owner))
        listed = {owner for record in self.records.values() for owner in record.owners}
        if self._num_looks % LENGTHS_PERIOD == 0:
            lengths = await self._store.queue_lengths()
            self.queue_length = {stage.value: length for stage, length in lengths.items()}
        self._num_looks += 1
        self._warn_of_missing_kind(states.role, time.monotonic())
        self._warn_of_foreign_groups()
        await self._forget(time.monotonic())
        return Looked(members, began_at), OwnersLooked(owners & {*listed, *self.owners, *states.owners})

    def _warn_of_missing_kind(self, role: Role, now_s: float) -> None:
        """Say once that this node does the work of nodes of the other kind, because none has lived for a while.

        The line is taken back when one has joined.
        """
        other = OTHER_KIND.get(role)
        if other is not self._missing_kind:
            self._missing_kind, self._missing_since, self._has_warned = other, 0.0, False
        if other is None:
            return
        found = sorted(name for name, record in self.records.items() if record.role in (other, Role.MIXED))
        if found:
            for name in found if self._has_warned else ():
                logger.warning("%s node %s has joined", self.records[name].role.value, name)
            self._missing_since, self._has_warned = 0.0, False
            return
        self._missing_since = self._missing_since or now_s
        if not self._has_warned and now_s - self._missing_since > self._expire_s:
            self._has_warned = True
            logger.warning("no %s node lives: this %s node does its work as well", other.value, role.value)

    def _warn_of_foreign_groups(self) -> None:
        """Say once of each other group of the topic what sets it apart."""
        for node, record in self._store.foreign_records.items():
            if record.group in self._foreign_groups or len(self._foreign_groups) >= MAX_FOREIGN_GROUPS:
                continue
            self._foreign_groups.add(record.group)
            logger.warning(
                "node %s belongs to another group, with which this node exchanges no requests: %s",
                node,
                describe_difference(self._record.parts, record.parts, record.version),
            )

    async def _forget(self, now_s: float) -> None:
        nodes, owners = (self._store.gone_names.get(names, []) for names in (self._keys.nodes, self._keys.owners))
        self._gone_since = {name: self._gone_since.get(name, now_s) for name in (*nodes, *owners)}
        old = {name for name, since_s in self._gone_since.items() if now_s - since_s > FORGET_PERIODS * self._expire_s}
        if old:
            await self._store.forget([name for name in nodes if name in old], [name for name in owners if name in old])

    def is_own(self, owner: str) -> bool:
        """Return whether an owner is an API process of this node."""
        return owner.startswith(f"{self._node}.")

    def _check_alone(self, old: NodeRecord | None) -> None:
        """Raise ConfigError if another process goes on writing this node's key, and this one is to leave.

        That is the one with the larger incarnation: it began later, unless both began without finding a record.
        """
        is_foreign = old is not None and old.incarnation < min(self._incarnations)
        self._num_foreign_beats = self._num_foreign_beats + 1 if is_foreign else 0
        if self._num_foreign_beats >= NUM_FOREIGN_BEATS:
            raise self._id_error()

    def _id_error(self) -> ConfigError:
        return ConfigError("--node-id", f"another live node has the id {self._node!r}; ids must differ")

    def _make_record(self, states: NodeStates, stats: EngineStats) -> NodeRecord:
        load = NodeLoad(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_waiting_tokens=stats.num_waiting_tokens,
            num_free_blocks=stats.num_free_blocks,
            num_blocks=stats.num_blocks,
            num_free_slots=max(0, states.num_free_slots),  # it does not count the slots that a drain hands out
        )
        return msgspec.structs.replace(
            self._record,
            count=self._heartbeat.next_count(),
            incarnation=states.incarnation,
            role=states.role,
            owners=self.owners,
            load=load,
            version=__version__,
        )


def describe_difference(own: Mapping[str, str], other: Mapping[str, str], version: str) -> str:
    """Return in which parts the groups of two nodes differ; `version` is the other node's."""
    names = [name for name in {**own, **other} if own.get(name) != other.get(name)]
    if not other or not names:
        return f"it runs version {version}"
    pairs = [(name, other.get(name, UNKNOWN), own.get(name, UNKNOWN)) for name in names[:MAX_PARTS_SHOWN]]
    shown = [f"{name} is {there} there and {here} here" for name, there, here in pairs]
    num_more = len(names) - len(shown)
    return "; ".join([*shown, f"and {num_more} more parts differ"] if num_more else shown)


def _read_record(value: bytes | None) -> NodeRecord | None:
    """Decode a heartbeat; one that cannot be read counts as missing."""
    try:
        return None if value is None else decode_record(value)
    except BadMessageError:
        return None
