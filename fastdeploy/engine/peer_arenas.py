# SPDX-License-Identifier: Apache-2.0
"""The arenas of other nodes that clients of the engine let it attach; they are opened in threads beside the steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from fastdeploy.ipc import messages
from fastdeploy.kv_cache.arena import Arena, ArenaError
from fastdeploy.kv_cache.arena_socket import open_arena

OPEN_TIMEOUT_S = 2.0


class Transfer(Protocol):
    """What moves the engine's blocks: see engine.kv_transfer.KVTransfer."""

    arena: Arena

    def attach(self, name: str, arena: Arena) -> None: ...
    def detach(self, name: str) -> None: ...
    def num_prepared_tokens(self, request_id: str) -> int: ...


@dataclass(eq=False)
class _Opening:
    """An arena that is being opened."""

    client: bytes
    name: str
    arena: Future[Arena]


class PeerArenas:
    """Attaches and detaches arenas by name.

    Attributes:
        is_opening: whether `poll` has to be called again.
    """

    def __init__(self, transfer: Transfer | None, send: Callable[[bytes, messages.ArenaAttached], None]) -> None:
        """Start without arenas; without a transfer, all are refused."""
        self._transfer = transfer
        self._send = send
        self._opening: list[_Opening] = []
        self._clients: dict[str, bytes] = {}  # who has attached each arena

    @property
    def is_opening(self) -> bool:
        """Return whether `poll` has to be called again."""
        return bool(self._opening)

    def attach(self, client: bytes, name: str, path: str) -> None:
        """Open the arena at this path; `poll` attaches it and tells the client."""
        self._drop_opening(name)
        self._opening.append(_Opening(client, name, _open_in_thread(path)))

    def poll(self) -> None:
        """Attach the arenas that are open now."""
        done = [opening for opening in self._opening if opening.arena.done()]
        for opening in done:
            self._opening.remove(opening)
            error = self._attach(opening)
            self._send(opening.client, messages.ArenaAttached(opening.name, error))

    def detach(self, name: str) -> None:
        """Unmap an arena once nothing is copied from it; an unknown name is ignored."""
        self._drop_opening(name)
        if self._clients.pop(name, None) is not None and self._transfer is not None:
            self._transfer.detach(name)

    def disconnect(self, client: bytes) -> None:
        """Detach the arenas of a client that is gone."""
        opening = [opening.name for opening in self._opening if opening.client == client]
        for name in opening + [name for name, owner in self._clients.items() if owner == client]:
            self.detach(name)

    def _attach(self, opening: _Opening) -> str:
        """Attach an arena that was opened; return why not, "" if it is attached."""
        try:
            arena = opening.arena.result()
        except ArenaError as error:
            return str(error)
        if self._transfer is None:
            arena.close()
            return "this engine exchanges no blocks"
        try:
            self._transfer.attach(opening.name, arena)
        except ArenaError as error:
            arena.close()
            return str(error)
        self._clients[opening.name] = opening.client
        return ""

    def _drop_opening(self, name: str) -> None:
        for opening in [opening for opening in self._opening if opening.name == name]:
            self._opening.remove(opening)
            opening.arena.add_done_callback(_close)


def _open_in_thread(path: str) -> Future[Arena]:
    arena: Future[Arena] = Future()

    def run() -> None:
        try:
            arena.set_result(open_arena(path, OPEN_TIMEOUT_S))
        except Exception as error:
            arena.set_exception(error)

    threading.Thread(target=run, name="open-arena", daemon=True).start()
    return arena


def _close(arena: Future[Arena]) -> None:
    with suppress(ArenaError):
        arena.result().close()
