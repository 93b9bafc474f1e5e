# SPDX-License-Identifier: Apache-2.0
"""What an agent needs of a transport."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Protocol

import msgspec

from fastdeploy.core.handover import KVImage

Endpoint = Mapping[str, str]
"""What a node's record says about how to fetch from it, by one connector."""


class Host(msgspec.Struct, frozen=True):
    """What two processes must have in common to share memory."""

    boot_id: str
    network_namespace: str
    user: int


class TransferError(Exception):
    """Blocks that cannot be fetched, which are computed instead.

    Attributes:
        reason: a word for metrics: `unreachable`, `timeout`, `refused`, `layout`, `gone`, `skipped`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Connector(Protocol):
    """Fetches images of peers; used from one event loop.

    Attributes:
        name: as in `--cache-transfer-protocol`.
    """

    name: str

    def endpoint(self) -> dict[str, str]:
        """Return what this node's record says."""

    def reaches(self, host: Host, endpoint: Endpoint) -> bool:
        """Return whether images of a node on this host, with this endpoint, can be fetched."""

    async def fetch(self, peer: str, endpoint: Endpoint, image: KVImage) -> KVImage:
        """Bring an image within reach of this node's engine; the caller limits the time.

        Args:
            peer: node and incarnation.

        Returns:
            The image as the engine imports it.

        Raises:
            TransferError: it cannot be fetched.
        """

    def keep_only(self, peers: Container[str]) -> None:
        """Release what is kept for other peers, because they are gone."""
