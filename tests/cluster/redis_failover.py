# SPDX-License-Identifier: Apache-2.0
"""A Redis that keeps its port through restarts and failovers."""

from __future__ import annotations

import time
from pathlib import Path

import redis

from tests.cluster.redis_server import DEFAULT_SAVE, RedisServer

PERSISTENCE: dict[str, dict[str, str]] = {
    "none": {},
    "default": {"save": DEFAULT_SAVE},
    "aof": {"appendonly": "yes"},
}
"""Name -> directives of redis.conf."""
_COPIES_AT_ONCE = {"repl_diskless_sync_delay": 0, "rdb_del_sync_files": "yes"}


class LastingRedis:
    """A redis-server on a port of 127.0.0.1, which a replica may take over.

    Attributes:
        port: stays the same.
        server: the present process.
        is_dead: it was closed, and will not come back.
    """

    def __init__(self, folder: Path, persistence: str = "none") -> None:
        """Start the server.

        Args:
            persistence: a key of PERSISTENCE.
        """
        self._folder, self._options = folder, {**PERSISTENCE[persistence], **_COPIES_AT_ONCE}
        self._num_replicas = 0
        self.is_dead = False
        self.server = RedisServer(folder / "0", **self._options)
        self.server.start()
        self.port = self.server.port

    def fail_over(self, lost_s: float) -> None:
        """Kill the server; a replica that lacks the writes of the last `lost_s` seconds takes over its port."""
        self._num_replicas += 1
        origin = f"127.0.0.1 {self.port}"
        replica = RedisServer(self._folder / str(self._num_replicas), replicaof=origin, **self._options)
        replica.start()
        try:
            self._wait_for_copy(replica)
            replica.execute("REPLICAOF", "NO", "ONE")
            time.sleep(lost_s)
        except BaseException:
            replica.close()
            raise
        self.server.close()
        replica.execute("CONFIG", "SET", "port", self.port)
        replica.execute("CONFIG", "REWRITE")
        self.server = replica

    def client(self) -> redis.Redis:
        """Return a blocking client on the port."""
        return redis.Redis(port=self.port)

    def _wait_for_copy(self, replica: RedisServer) -> None:
        deadline = time.monotonic() + 30
        while replica.execute("INFO", "replication")["master_link_status"] != "up":
            assert time.monotonic() < deadline, "the replica has no copy"
            time.sleep(0.01)

    def close(self) -> None:
        """Kill the server for good."""
        self.is_dead = True
        self.server.close()
