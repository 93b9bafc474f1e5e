# SPDX-License-Identifier: Apache-2.0
"""A small model of Redis: streams with consumer groups, strings with a time to live, and how they get lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

EntryId = tuple[int, int]  # milliseconds and a count, as Redis writes them
FIRST: EntryId = (0, 0)


class RedisError(Exception):
    """No answer, or an error of the whole server: away, full, or read-only."""


class NoGroupError(Exception):
    """NOGROUP: the stream or its group does not exist."""


@dataclass
class Group:
    """A consumer group; `pending` maps an entry to its consumer and the time of its delivery."""

    last_delivered: EntryId = FIRST
    pending: dict[EntryId, tuple[str, float]] = field(default_factory=dict)


@dataclass
class Stream:
    entries: dict[EntryId, Any] = field(default_factory=dict)
    last_id: EntryId = FIRST
    group: Group | None = None


class RedisModel:
    """One server. Values are never copied, because nothing changes them.

    Attributes:
        is_away, is_full: every command fails; those that add data fail.
        clock_offset: what the wall clock differs by, in seconds, after steps or on a promoted replica.
        on_write: called with the name of a stream that got an entry.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.is_away = False
        self.is_full = False
        self.clock_offset = 0.0
        self.run_id = 0
        self.on_write: Callable[[str], None] = lambda _: None
        self._clock = clock
        self._streams: dict[str, Stream] = {}
        self._strings: dict[str, Any] = {}
        self._expires_at: dict[str, float] = {}
        self._next_expiry = 0.0  # nothing expires before

    # Faults.

    def snapshot(self) -> Any:
        """Return the data, for `restart`."""
        streams = {
            key: Stream(dict(one.entries), one.last_id, copy.deepcopy(one.group)) for key, one in self._streams.items()
        }
        return streams, dict(self._strings), dict(self._expires_at)

    def restart(self, snapshot: Any) -> None:
        """Become another process, or server, that has the data of the snapshot."""
        self._streams, self._strings, self._expires_at = snapshot
        self._next_expiry = 0.0
        self.run_id += 1

    def flush_all(self) -> None:
        self._streams, self._strings, self._expires_at = {}, {}, {}

    def evict(self, key: str) -> None:
        for data in (self._streams, self._strings, self._expires_at):
            data.pop(key, None)

    # Inspection, which no fault affects.

    def all_keys(self) -> list[str]:
        self._expire()
        return [*self._streams, *self._strings]

    def keys_without_ttl(self) -> list[str]:
        return [key for key in self.all_keys() if key not in self._expires_at]

    def stream(self, key: str) -> Stream:
        return self._streams.get(key, Stream())

    # Commands.

    def set_get(self, key: str, value: Any, ttl_s: float) -> Any:
        """SET key value PX ttl GET."""
        self._begin(adds=True)
        old = self._strings.get(key)
        self._strings[key] = value
        self._live(key, ttl_s)
        return old

    def server(self) -> str:
        """INFO: what identifies the process."""
        self._begin()
        return str(self.run_id)

    def find(self, prefix: str) -> dict[str, Any]:
        """Return all strings whose key begins with the prefix."""
        self._begin()
        return {key.removeprefix(prefix): value for key, value in self._strings.items() if key.startswith(prefix)}

    def delete(self, key: str) -> None:
        self._begin()
        self.evict(key)

    def expire(self, key: str, ttl_s: float) -> bool:
        self._begin()
        exists = key in self._streams or key in self._strings
        if exists:
            self._live(key, ttl_s)
        return exists

    def create_stream(self, key: str, ttl_s: float, group: bool = False) -> None:
        """XGROUP CREATE … 0 MKSTREAM, or an XADD and XTRIM; and EXPIRE."""
        self._begin(adds=True)
        stream = self._streams.setdefault(key, Stream())
        if group and stream.group is None:
            stream.group = Group()
        self._live(key, ttl_s)

    def xadd(self, key: str, value: Any, ttl_s: float | None = None) -> EntryId | None:
        """XADD with EXPIRE; without a time to live XADD NOMKSTREAM, which returns None if the stream is missing."""
        self._begin(adds=True)
        if ttl_s is not None:
            self._live(key, ttl_s)
            self._streams.setdefault(key, Stream())
        stream = self._streams.get(key)
        if stream is None:
            return None
        milliseconds = int(self.wall_time() * 1000)
        last, count = stream.last_id
        stream.last_id = (milliseconds, 0) if milliseconds > last else (last, count + 1)
        stream.entries[stream.last_id] = value
        self.on_write(key)
        return stream.last_id

    def xdel(self, key: str, entry: EntryId) -> None:
        self._begin()
        if key in self._streams:
            self._streams[key].entries.pop(entry, None)

    def ack_and_delete(self, key: str, entry: EntryId, reader: str = "", value: Any = None) -> bool:
        """MULTI: XADD NOMKSTREAM reader value, XACK, XDEL; return whether the reader's stream exists."""
        self._begin(adds=bool(reader))
        has_reader = not reader or self.xadd(reader, value) is not None
        stream = self._streams.get(key)
        if stream is not None:
            stream.entries.pop(entry, None)
            if stream.group is not None:
                stream.group.pending.pop(entry, None)
        return has_reader

    def xrange(self, key: str) -> dict[EntryId, Any]:
        self._begin()
        return dict(self.stream(key).entries)

    def xread(self, key: str, after: EntryId) -> dict[EntryId, Any]:
        self._begin()
        return {entry: value for entry, value in self.stream(key).entries.items() if entry > after}

    def read_group(self, key: str, consumer: str) -> tuple[EntryId, Any] | None:
        """XREADGROUP COUNT 1 … >."""
        group = self._group(key)
        for entry, value in self._streams[key].entries.items():
            if entry > group.last_delivered:
                group.last_delivered = entry
                group.pending[entry] = consumer, self._clock()
                return entry, value
        return None

    def read_pending(self, key: str, consumer: str, min_idle_s: float) -> list[tuple[EntryId, Any]]:
        """XREADGROUP … 0 and XAUTOCLAIM: this consumer's entries, and those of others that were idle so long."""
        group = self._group(key)
        found = []
        for entry, (owner, delivered_at) in [*group.pending.items()]:
            if entry not in self._streams[key].entries:
                del group.pending[entry]
            elif owner == consumer or self._clock() - delivered_at >= min_idle_s:
                group.pending[entry] = consumer, self._clock()
                found.append((entry, self._streams[key].entries[entry]))
        return found

    def _group(self, key: str) -> Group:
        self._begin()
        group = self.stream(key).group
        if group is None:
            raise NoGroupError(key)
        return group

    def _begin(self, adds: bool = False) -> None:
        if self.is_away or (adds and self.is_full):
            raise RedisError
        self._expire()

    def _live(self, key: str, ttl_s: float) -> None:
        self._expires_at[key] = self.wall_time() + ttl_s
        self._next_expiry = min(self._next_expiry, self._expires_at[key])

    def wall_time(self) -> float:
        """Return the time by which keys expire, and which is part of the ids of entries."""
        return self._clock() + self.clock_offset

    def _expire(self) -> None:
        now = self.wall_time()
        if now >= self._next_expiry:
            for key in [key for key, at in self._expires_at.items() if at <= now]:
                self.evict(key)
            self._next_expiry = min(self._expires_at.values(), default=now)
