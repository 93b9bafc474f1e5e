# SPDX-License-Identifier: Apache-2.0
"""What the server tells its agent when it starts it."""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy.config.cluster_config import ClusterConfig
from fastdeploy.scheduler.request_states import Role

DEFAULT_GRACEFUL_S = 30.0  # of a drain whose length is not limited


@dataclass(frozen=True)
class AgentConfig:
    """Configuration of an agent.

    Attributes:
        cluster: with a node id.
        max_num_seqs, max_num_batched_tokens: limits of a step of the engine.
        is_replacement: whether it follows an agent of the same server that has died.
        graceful_s: seconds that the server gives to a drain; None is no limit.
    """

    cluster: ClusterConfig
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    graceful_s: float | None = None
    is_replacement: bool = False

    @property
    def first_role(self) -> Role:
        """Return the role to begin with; the engine tells an agent that is started again of a later one."""
        return Role(self.cluster.splitwise_role)

    @property
    def drain_s(self) -> float:
        """Return how long a hand-over may wait for slots: half of the time that the server gives to a drain."""
        return (DEFAULT_GRACEFUL_S if self.graceful_s is None else self.graceful_s) / 4
