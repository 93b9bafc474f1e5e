# SPDX-License-Identifier: Apache-2.0
"""Configuration of a node among others: its role, the Redis that connects them, and the limits of requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fastdeploy.config.flag import check_fields, choice, integer, text
from fastdeploy.core.errors import ConfigError

CLUSTER = "cluster"
LEAST_PERIOD_MS = 100
CONNECTORS = ("ipc", "rdma", "tcp")


@dataclass(frozen=True)
class ClusterConfig:
    """How this node works with others; with the scheduler `local` it works alone and nothing else has an effect.

    Times are in the units of FastDeploy's flags: milliseconds for the periods of heartbeats, else seconds; -1 is no
    limit.
    """

    scheduler_name: Annotated[
        str, choice("local", "global", "splitwise", help="local, global (one queue of all nodes) or splitwise")
    ] = "local"
    splitwise_role: Annotated[
        str, choice("prefill", "decode", "mixed", help="which requests this node prefers, with splitwise")
    ] = "mixed"
    scheduler_host: Annotated[str, text(help="host of Redis")] = "127.0.0.1"
    scheduler_port: Annotated[int, integer(1, 65535, help="port of Redis")] = 6379
    scheduler_db: Annotated[int, integer(0, 2**31 - 1, help="number of the database in Redis")] = 0
    scheduler_username: Annotated[str, text(help="user of Redis")] = ""
    scheduler_password: Annotated[str, text(is_secret=True, help="password of Redis")] = field(default="", repr=False)
    scheduler_topic: Annotated[str, text(help="nodes of one topic work together")] = "default"
    scheduler_ttl: Annotated[int, integer(1, help="seconds without progress after which a request ends")] = 900
    scheduler_sync_period: Annotated[int, integer(1, help="milliseconds between heartbeats")] = 500
    scheduler_expire_period: Annotated[int, integer(1, help="milliseconds until a silent node is gone")] = 3000
    node_id: Annotated[str, text(help="name of this node (default: drawn at random)")] = ""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.splitwise_role != "mixed" and self.scheduler_name != "splitwise":
            raise ConfigError("splitwise_role", f"{self.splitwise_role!r} needs --scheduler-name splitwise")

    @property
    def is_clustered(self) -> bool:
        """Return whether this node works with others."""
        return self.scheduler_name != "local"
