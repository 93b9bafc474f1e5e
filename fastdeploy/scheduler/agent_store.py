# SPDX-License-Identifier: Apache-2.0
"""Carries out what a node's state machine asks to write to Redis: one writer, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fastdeploy.core.faults import fault_point
from fastdeploy.scheduler.keys import Keys
from fastdeploy.scheduler.node_events import (
    Claim,
    Claimed,
    ClaimWritten,
    Drop,
    NodeEvent,
    ReadPending,
    Register,
    Send,
    Sent,
)
from fastdeploy.scheduler.request_states import Tell, Ticket, Tokens, leg_id
from fastdeploy.scheduler.store import Entry, GroupMissingError, Store, StoreError


@dataclass(frozen=True)
class NotePrefixes:
    """Note that this node has the prefixes of these hashes cached."""

    hashes: list[bytes]


StoreAction = Claim | Drop | Send | Tell | ReadPending | Register | NotePrefixes


class StoreUser(Protocol):
    """What the writer reports to; `Agent` is one."""

    @property
    def is_redis_up(self) -> bool:
        """Return whether commands are sent at all."""

    @property
    def consumer(self) -> str:
        """Return the name under which entries of queues are pending."""

    def handle(self, *events: NodeEvent) -> None:
        """Tell the state machine."""

    def read(self, tickets: Sequence[tuple[Entry, Ticket]]) -> None:
        """Take tickets that were read."""

    def lose_redis(self, error: StoreError) -> None:
        """Take note that a command has failed."""

    def return_to_redis(self) -> None:
        """Take note that Redis has lost writes."""


class StoreWriter:
    """Writes one action after the other; while Redis is away, each fails at once."""

    def __init__(self, store: Store, keys: Keys, node: str, expire_s: float, user: StoreUser) -> None:
        self._store, self._keys, self._node, self._expire_s, self._user = store, keys, node, expire_s, user
        self._actions: asyncio.Queue[StoreAction] = asyncio.Queue()
        self._claims: set[str] = set()  # entries whose claims are not written yet

    def put(self, action: StoreAction) -> None:
        """Append an action."""
        if isinstance(action, Claim):
            self._claims.add(action.entry)
        self._actions.put_nowait(action)

    def is_claiming(self, entry: str) -> bool:
        """Return whether an entry will be claimed: it is read twice if it is pending at the wrong moment."""
        return entry in self._claims

    async def run(self) -> None:
        """Carry out actions forever."""
        while True:
            action = await self._actions.get()
            is_done = self._user.is_redis_up and await guarded(self._user, self._write(action))
            if isinstance(action, Claim):
                self._claims.discard(action.entry)
            elif isinstance(action, Send) and not is_done:
                self._user.handle(Sent(action.owner, "failed"))

    async def _write(self, action: StoreAction) -> None:
        match action:
            case Claim():
                await self._claim(action)
            case Drop(entry):
                await self._store.drop(parse_entry(entry))
            case Send(owner, sent):
                for message in sent:
                    if isinstance(message, Tokens):
                        fault_point("agent_send", leg_id(owner, message.number, message.leg))
                is_written = await self._store.send_to_owner(owner, sent)
                self._user.handle(Sent(owner, "written" if is_written else "no_reader"))
            case Tell(node, message):
                await self._store.send_to_node(node, [message])
            case ReadPending():
                self._user.read(await self._store.read_pending(self._node, self._user.consumer, self._expire_s))
            case NotePrefixes(hashes):
                await self._store.note_prefixes(self._node, hashes)
            case Register():
                await self._store.create_inbox(self._keys.node_inbox(self._node))
                await self._store.create_queues(self._node)

    async def _claim(self, action: Claim) -> None:
        message = action.message
        request_id = leg_id(action.owner, message.number, message.leg)
        fault_point("agent_claim", request_id)
        await self._store.claim(action.owner, [message], parse_entry(action.entry))
        fault_point("agent_claimed", request_id)
        if isinstance(message, Claimed):
            self._user.handle(ClaimWritten((action.owner, message.number), message.leg))


async def guarded(user: StoreUser, command: Awaitable[None]) -> bool:
    """Run commands and report the state of Redis if they fail; return whether they have succeeded."""
    try:
        await command
    except GroupMissingError:
        user.return_to_redis()
    except StoreError as error:
        user.lose_redis(error)
    else:
        return True
    return False


def format_entry(entry: Entry) -> str:
    """Return an entry as the state machine passes it on."""
    return f"{entry.entry_id.decode()} {entry.stream}"


def parse_entry(text: str) -> Entry:
    """Return the entry of `format_entry`."""
    entry_id, _, stream = text.partition(" ")
    return Entry(stream, entry_id.encode())
