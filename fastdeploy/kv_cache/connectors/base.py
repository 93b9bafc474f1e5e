# SPDX-License-Identifier: Apache-2.0
"""What an agent needs of a transport."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from fastdeploy.core.handover import KVImage

Endpoint = Mapping[str, str]
"""What a node's record says about how to fetch from it, by one connector."""


class TransferError(Exception):
    """Blocks that cannot be fetched, which are computed instead.

    Attributes:
        reason: a word for metrics: `unreachable`, `timeout`, `refused`, `stale`.
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

    def reaches(self, endpoint: Endpoint) -> bool:
        """Return whether images of a node with this endpoint can be fetched."""

    async def fetch(self, peer: str, endpoint: Endpoint, image: KVImage, deadline_s: float) -> KVImage:
        """Bring an image within reach of this node's engine.

        Args:
            peer: node and incarnation.
            deadline_s: after which this raises.

        Returns:
            The image as the engine imports it.

        Raises:
            TransferError: it cannot be fetched.
        """

    async def forget(self, peer: str) -> None:
        """Release what is kept for a peer that is gone."""

    async def close(self) -> None:
        """Release everything."""
