# SPDX-License-Identifier: Apache-2.0
"""The live nodes of the group, as their heartbeats describe them, and which of them should get a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean

from fastdeploy.scheduler.messages import NodeRecord
from fastdeploy.scheduler.request_states import Member, Role

MAX_LOAD = 1.25  # of the mean, beyond which a node gets no prompts for what it has cached
SPARE_SEQUENCES = 1  # beyond that, so that a few sequences do not count as overload


class Members:
    """The nodes as they were last seen.

    Attributes:
        records: their heartbeats.
    """

    def __init__(self, node: str) -> None:
        """Begin without nodes; `node` is the own one."""
        self.records: Mapping[str, NodeRecord] = {}
        self._node = node

    def update(self, records: Mapping[str, NodeRecord]) -> dict[str, Member]:
        """Take what was read; return it as the state machines need it."""
        self.records = records
        return {name: Member(record.incarnation, record.role) for name, record in records.items()}

    @property
    def has_others(self) -> bool:
        """Return whether another node takes requests."""
        return any(name != self._node and record.role is not Role.DRAINING for name, record in self.records.items())

    def is_overloaded(self, name: str) -> bool:
        """Return whether a node has far more sequences than the nodes of its role have on average."""
        record = self.records[name]
        mean = fmean(num_sequences(other) for other in self.records.values() if other.role is record.role)
        return num_sequences(record) > MAX_LOAD * mean + SPARE_SEQUENCES

    def choose(self, nodes: Iterable[str]) -> tuple[int, str] | None:
        """Return index and name of the first of these nodes that should get a prompt, which it has cached."""
        for index, name in enumerate(nodes):
            record = self.records.get(name)
            if record is not None and record.role is not Role.DRAINING and not self.is_overloaded(name):
                return index, name
        return None


def num_sequences(record: NodeRecord) -> int:
    """Return how many sequences a node has, running or waiting."""
    return record.load.num_running + record.load.num_waiting
