# SPDX-License-Identifier: Apache-2.0
"""An owner's traffic with Redis: its heartbeat, what it reads, and one writer for what it writes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from fastdeploy.core.faults import fault_point
from fastdeploy.scheduler.liveness import Heartbeat
from fastdeploy.scheduler.members import Members
from fastdeploy.scheduler.messages import BadMessageError, ToOwner, decode_to_owner
from fastdeploy.scheduler.owner_events import (
    Audit,
    Audited,
    Dequeue,
    End,
    Enqueue,
    EnqueueFailed,
    OwnerEvent,
)
from fastdeploy.scheduler.request_states import Limits, Looked, RedisLost, RedisReturned, Tell, ToNode
from fastdeploy.scheduler.store import Entry, GroupMissingError, Store, StoreError

BLOCK_S = 1.0  # that a read waits for messages
FIRST_BACK_OFF_S, MAX_BACK_OFF_S = 0.1, 2.0
STABLE_S = 10.0  # after a return, before a loss begins with the first back-off again
MAX_READ = 256  # entries that were read, before they are deleted without waiting for the next heartbeat
CLOSE_S = 2.0  # for the last writes of an owner that ends
_BEGIN = b"0"

logger = logging.getLogger("fastdeploy.cluster")


@dataclass(frozen=True, slots=True)
class Send:
    """Write a message to another owner's inbox, if that exists."""

    owner: str
    message: ToOwner


Write = Enqueue | Dequeue | Audit | Tell | End | Send
"""What the writer carries out; an `End` only forgets where the tickets of a request stand."""


class OwnerLink:
    """Connects an owner's state machine to Redis; used from one event loop.

    Attributes:
        is_up: whether commands reach Redis.
        members: the live nodes.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        inbox: str,
        members: Members,
        limits: Limits,
        on_event: Callable[[OwnerEvent], None],
        on_message: Callable[[ToOwner], None],
        is_quiet: bool = False,
    ) -> None:
        """Prepare the traffic of the owner `name`, who reads the stream `inbox`.

        Args:
            on_event: told of what happened to Redis, of members, and of results of writes.
            on_message: told of every message that was read.
            is_quiet: whether loss and return of Redis are not worth a line, because another owner of the node says so.
        """
        self.is_up = True
        self.members = members
        self._store, self._name, self._limits = store, name, limits
        self._on_event, self._on_message = on_event, on_message
        self._inbox = inbox
        self._log_level = logging.DEBUG if is_quiet else logging.WARNING
        self._num_commands = 0  # that were taken
        self._heartbeat = Heartbeat()
        self._lost_at = self._returned_at = 0.0
        self._lost_data = False
        self._writes: list[Write] = []
        self._has_writes = asyncio.Event()
        self._writing = asyncio.Lock()
        self._up = asyncio.Event()  # set while Redis answers, and the inbox exists
        self._entries: dict[int, dict[int, list[Entry]]] = {}  # request -> leg -> where its ticket stands
        self._cursor, self._num_returns = _BEGIN, 0
        self._read: list[bytes] = []  # entries to delete
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_tickets(self) -> int:
        """Return the number of requests whose tickets were written; some may have been claimed since."""
        return len(self._entries)

    async def start(self) -> None:
        """Look for the nodes once, and begin to read and to write."""
        await self._try(self._sync_once())
        for loop in (self._sync_forever, self._read_forever, self._write_forever):
            self._tasks.append(asyncio.create_task(restarted(loop)))

    def write(self, action: Write) -> None:
        """Carry out an action after those before it, or drop it if Redis is away by then."""
        self._writes.append(action)
        self._has_writes.set()

    def lose(self, error: StoreError) -> None:
        """Take note that Redis does not answer."""
        if self.is_up:
            self.is_up, self._lost_at = False, time.monotonic()
            self._up.clear()
            if self._heartbeat.count:  # else: the server says so when it starts
                logger.log(self._log_level, "Redis is away: %s; new requests run on this node", error)
            self._on_event(RedisLost())

    def take_num_commands(self) -> int:
        """Return the number of commands sent since the last call."""
        taken, self._num_commands = self._num_commands, self._store.num_commands
        return self._num_commands - taken

    async def close(self) -> None:
        """Write what is left, delete this owner's keys, and disconnect."""
        if self.is_up and self._tasks:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._try(self._finish())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._store.close()

    async def _finish(self) -> None:
        await self._write_all()
        await self._store.delete_owner(self._name)

    async def _try(self, command: Awaitable[None]) -> bool:
        """Run commands; return False, and take note, if Redis does not answer."""
        try:
            await command
        except GroupMissingError:
            self._lost_data = True  # the next heartbeat says so
        except StoreError as error:
            self.lose(error)
            return False
        return True

    # The heartbeat.

    async def _sync_forever(self) -> None:
        back_off_s = FIRST_BACK_OFF_S
        while True:
            if self.is_up:
                if time.monotonic() - self._returned_at > STABLE_S:  # else it may answer nothing but heartbeats
                    back_off_s = FIRST_BACK_OFF_S
                await asyncio.sleep(self._limits.sync_s)
            if not self.is_up:
                await asyncio.sleep(back_off_s)
                back_off_s = min(2 * back_off_s, MAX_BACK_OFF_S)
            await self._try(self._sync_once())

    async def _sync_once(self) -> None:
        """Renew this owner's key, notice what Redis has lost, and look which nodes live."""
        store, is_first, began_at = self._store, self._heartbeat.count == 0, time.monotonic()
        count = self._heartbeat.next_count()
        records = await store.read_nodes()  # before the heartbeat, which shows whether Redis may have old ones
        fault_point("owner_beat")
        beat = await store.beat_owner(self._name, count, self._limits.expire_s)
        echo = None if beat.old_value is None else int(beat.old_value)
        has_lost = self._heartbeat.lost_writes(echo, beat.server, beat.has_streams) or self._lost_data
        if has_lost or is_first or not self.is_up:
            await store.create_inbox(self._inbox)
        if has_lost or not self.is_up:
            self._return()
        self._up.set()
        await self._delete_read()
        self._on_event(Looked(self.members.update(records), began_at))

    def _return(self) -> None:
        """Take note that Redis answers again, or that it has lost writes."""
        if not self.is_up:
            logger.log(self._log_level, "Redis is back after %.1f s", time.monotonic() - self._lost_at)
            self._returned_at = time.monotonic()
        self.is_up, self._lost_data = True, False
        self._cursor, self._num_returns = _BEGIN, self._num_returns + 1
        self._on_event(RedisReturned())

    # What is read.

    async def _read_forever(self) -> None:
        while True:
            await self._up.wait()
            if not await self._try(self._read_once()) or self._lost_data:
                await asyncio.sleep(FIRST_BACK_OFF_S)

    async def _read_once(self) -> None:
        num_returns = self._num_returns
        entries = await self._store.read_inbox(self._inbox, self._cursor, BLOCK_S)
        if entries:
            fault_point("owner_receive")
        for _, payload in entries:
            self._receive(payload)
        if entries and num_returns == self._num_returns:  # else: read from the beginning
            self._cursor = entries[-1][0]
        self._read += [entry_id for entry_id, _ in entries]
        if len(self._read) > MAX_READ:
            await self._delete_read()

    def _receive(self, payload: bytes) -> None:
        try:
            messages = decode_to_owner(payload)
        except BadMessageError as error:
            self._store.bad_messages.note(self._inbox, error)
            return
        for message in messages:
            self._on_message(message)

    async def _delete_read(self) -> None:
        read, self._read = self._read, []
        if read:
            await self._store.delete_entries(self._inbox, read)

    # What is written.

    async def _write_forever(self) -> None:
        while True:
            await self._has_writes.wait()
            self._has_writes.clear()
            try:
                await self._write_all()
            except Exception:
                self._lost_data = True  # an audit finds out what was not written
                raise

    async def _write_all(self) -> None:
        async with self._writing:
            while self._writes:
                writes, self._writes = self._writes, []
                await self._write_in_order(writes)

    async def _write_in_order(self, writes: Sequence[Write]) -> None:
        for kind, group in groupby(writes, key=type):
            actions: list[Any] = list(group)
            if kind is End:
                for end in actions:
                    self._entries.pop(end.number, None)
            elif kind is Enqueue:
                for action in actions:
                    await self._enqueue(action)
            elif self.is_up:
                await self._try(self._write(kind, actions))

    async def _enqueue(self, action: Enqueue) -> None:
        """Write a ticket; whether an attempt that failed has written it is for the next audit to find out."""
        ticket, is_written = action.ticket, False
        if self.is_up:
            try:
                fault_point("owner_enqueue", ticket.request.request_id)
                entry = await self._store.enqueue(ticket, action.hint)
                self._entries.setdefault(ticket.number, {}).setdefault(ticket.leg, []).append(entry)
                is_written = True
                fault_point("owner_enqueued", ticket.request.request_id)
            except GroupMissingError:
                self._lost_data = True
            except StoreError as error:
                self.lose(error)
            except Exception:  # such as a text that cannot be encoded, which concerns this request alone
                logger.exception("the ticket of request %s cannot be written", ticket.request.request_id)
        if not is_written:
            self._on_event(EnqueueFailed(ticket.number, ticket.leg))

    async def _write(self, kind: type[Write], actions: Sequence[Any]) -> None:
        """Carry out several actions of one kind."""
        if kind is Tell:
            to_nodes: dict[str, list[ToNode]] = {}
            for tell in actions:
                to_nodes.setdefault(tell.node, []).append(tell.message)
            for node, messages in to_nodes.items():
                await self._store.send_to_node(node, messages)
        elif kind is Dequeue:
            if entries := [entry for one in actions for entry in self._take_entries(one.number, one.leg)]:
                await self._store.dequeue(entries)
        elif kind is Send:
            for send in actions:
                await self._store.send_to_owner(send.owner, [send.message])
        else:
            for audit in actions:
                await self._audit(audit.count)

    def _take_entries(self, number: int, leg: int) -> list[Entry]:
        legs = self._entries.get(number, {})
        entries = legs.pop(leg, [])
        if not legs:
            self._entries.pop(number, None)
        return entries

    async def _audit(self, count: int) -> None:
        """List the tickets of this owner in all queues."""
        fault_point("owner_audit")
        found = await self._store.find_tickets(self._name)
        self._entries.clear()
        for entry, ticket, _ in found:
            self._entries.setdefault(ticket.number, {}).setdefault(ticket.leg, []).append(entry)
        standing = frozenset((ticket.number, ticket.leg, ticket.stage, hint) for _, ticket, hint in found)
        self._on_event(Audited(count, standing))


async def restarted(loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a loop again if it fails in a way that nobody expects, so that one bad message does not end the owner."""
    while True:
        try:
            await loop()
        except Exception:
            logger.exception("a loop of the owner failed; it is begun again")
            await asyncio.sleep(MAX_BACK_OFF_S)
