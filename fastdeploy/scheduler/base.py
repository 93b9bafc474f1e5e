# SPDX-License-Identifier: Apache-2.0
"""What API code needs of whatever runs its requests: this node's engine alone, or the nodes of a cluster."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from fastdeploy.core.errors import EngineDeadError, FastDeployError
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.stats import EngineStats
from fastdeploy.ipc import messages
from fastdeploy.ipc.connection import OnProgress


class RequestScheduler(Protocol):
    """Runs requests; `EngineConnection` (this node's engine) and `ClusterScheduler` (all nodes) are two of these."""

    @property
    def ready(self) -> messages.Ready | None:
        """Return limits and description of this node's engine, once the model is loaded."""

    @property
    def stats(self) -> EngineStats:
        """Return the latest counters of this node's engine."""

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Return why this node's engine has ended; None while it runs."""

    @property
    def num_requests(self) -> int:
        """Return the number of requests in flight of this process."""

    @property
    def is_stalled(self) -> bool:
        """Return whether this node's engine is stopped or hangs."""

    async def start(self, on_progress: OnProgress | None = None) -> None:
        """Connect and wait until requests can be served; raise ConfigError or EngineDeadError."""

    async def wait_until_dead(self) -> None:
        """Wait until this node's engine has ended unexpectedly."""

    def mark_dead(self, reason: str) -> None:
        """Take note that this node's engine has ended."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[list[TokenDelta], None]:
        """Yield the deltas of a request until every choice is finished; see `EngineConnection.generate`."""

    def end_requests(self, error: FastDeployError) -> None:
        """Fail all current and future requests of this process with `error`."""

    async def abort_requests(self, request_ids: Sequence[str] | None, salt_prefix: str = "") -> list[tuple[str, int]]:
        """Abort requests of any process, whichever node runs them; see `EngineConnection.abort_requests`."""

    def set_role(self, role: str) -> None:
        """Ask this node's agent to take a role, which `stats.node.role` then shows."""
