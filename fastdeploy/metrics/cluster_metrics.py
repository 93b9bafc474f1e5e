# SPDX-License-Identifier: Apache-2.0
"""What an API process counts of the requests that it gives to a cluster; it registers only with other nodes."""

from __future__ import annotations

from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram

from fastdeploy.metrics.engine_collector import PREFIX

Path = Literal["redis", "local", "taken_over"]
LossReason = Literal["node_lost", "node_restarted", "forgotten", "stalled", "engine_died"]
STAGES = ("prefill", "decode")
ATTEMPTS, REDIS_COMMANDS = PREFIX + "cluster_attempts", PREFIX + "cluster_redis_commands"
_WAIT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class ClusterMetrics:
    """Counters and the histogram of one API process; used from its event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register the metrics, with all values of their labels."""
        wait = Histogram(
            PREFIX + "cluster_queue_wait_seconds",
            "Time until a node took a request over, by stage",
            ["stage"],
            buckets=_WAIT_S,
            registry=registry,
        )
        requests = Counter(
            PREFIX + "cluster_requests", "Requests that have ended, by the way they took", ["path"], registry=registry
        )
        attempts = Counter(ATTEMPTS, "Tries of requests that were lost, by reason", ["reason"], registry=registry)
        self._commands = Counter(REDIS_COMMANDS, "Commands sent to Redis", registry=registry)
        self._waits = {stage: wait.labels(stage) for stage in STAGES}
        self._requests = {path: requests.labels(path) for path in get_args(Path)}
        self._attempts = {reason: attempts.labels(reason) for reason in get_args(LossReason)}

    def claimed(self, stage: str, waited_s: float) -> None:
        """Observe how long a request waited until a node of this stage took it over."""
        self._waits[stage].observe(waited_s)

    def lost(self, reason: str) -> None:
        """Count a lost try, for one of the reasons of `LossReason`."""
        self._attempts[reason].inc()

    def ended(self, path: str) -> None:
        """Count a request that has ended; an empty path stands for one that was refused before its first try."""
        if path:
            self._requests[path].inc()

    def sent(self, num_commands: int) -> None:
        """Count commands sent to Redis."""
        self._commands.inc(num_commands)
