# SPDX-License-Identifier: Apache-2.0
"""Between processes of one user on one machine: the engine maps the peer's arena and copies from it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from fastdeploy.core.handover import KVImage
from fastdeploy.kv_cache.connectors.base import Endpoint, Host, TransferError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK_NAMESPACE = "/proc/self/ns/net"


class ArenaMapper(Protocol):
    """Maps arenas of peers; `AgentEngine` is one."""

    async def attach(self, name: str, path: str) -> None:
        """Map the arena that is served at a Unix socket under a name; raise TransferError."""

    def detach(self, name: str) -> None:
        """Unmap an arena once nothing is copied from it."""


class IpcConnector:
    """Has each peer's arena mapped once, when the first image of that peer is fetched."""

    name = "ipc"

    def __init__(self, mapper: ArenaMapper, host: Host, path: str) -> None:
        """Create the connector.

        Args:
            mapper: this node's engine.
            host: of this node.
            path: Unix socket at which this node's engine serves its arena.
        """
        self._mapper, self._host, self._path = mapper, host, path
        self._attached: dict[str, asyncio.Task[None]] = {}

    def endpoint(self) -> dict[str, str]:
        """Return what this node's record says."""
        return {"path": self._path}

    def reaches(self, host: Host, endpoint: Endpoint) -> bool:
        """Return whether a node runs on this machine, as this user and in the same network."""
        return host == self._host and "path" in endpoint

    async def fetch(self, peer: str, endpoint: Endpoint, image: KVImage) -> KVImage:
        """Let the engine map the peer's arena; it copies from there.

        Raises:
            TransferError: the arena cannot be mapped.
        """
        task = self._attached.get(peer)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._attached[peer] = asyncio.create_task(self._mapper.attach(peer, endpoint["path"]))
        await asyncio.shield(task)
        return replace(image, arena=peer)

    def keep_only(self, peers: Container[str]) -> None:
        """Let the engine unmap the arenas of peers that are gone."""
        for peer in [peer for peer in self._attached if peer not in peers]:
            self._attached.pop(peer).cancel()
            self._mapper.detach(peer)


def this_host() -> Host:
    """Return what identifies this machine, network and user; raise TransferError if the kernel does not say it."""
    try:
        boot_id, namespace = _BOOT_ID.read_text().strip(), os.readlink(_NETWORK_NAMESPACE)
    except OSError as error:
        raise TransferError("unreachable", f"this machine cannot be identified: {error}") from None
    return Host(boot_id, namespace, os.geteuid())
