# SPDX-License-Identifier: Apache-2.0
"""Counts refused requests by reason, and logs a limited number of them per second."""

from __future__ import annotations

import asyncio
import logging
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter

from fastdeploy.metrics.engine_collector import PREFIX

Reason = Literal[
    "invalid",
    "auth",
    "not_found",
    "too_large",
    "rate_limit",
    "concurrency",
    "queue_full",
    "timeout",
    "unavailable",
    "headers",
    "slow_client",
    "connections",
]
REASONS: tuple[Reason, ...] = get_args(Reason)
INTERVAL_S = 1.0
MAX_LINES = 5  # per reason and interval

logger = logging.getLogger("fastdeploy.refusals")


class RefusalRecorder:
    """Counts refusals in `requests_rejected_total` and logs them; used from the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register the counter, with all reasons."""
        counter = Counter(PREFIX + "requests_rejected", "Requests refused, by reason", ["reason"], registry=registry)
        self._counters = {reason: counter.labels(reason) for reason in REASONS}
        self._num_lines: dict[Reason, int] = {}  # in the running interval of a reason

    def record(self, reason: Reason, what: str) -> None:
        """Count a refusal and log it; beyond the maximum number of lines, log how many more there were.

        Args:
            what: the rest of the line. It must not hold text of the client, which could be private or forge lines.
        """
        self._counters[reason].inc()
        number = self._num_lines.get(reason, 0) + 1
        self._num_lines[reason] = number
        if number == 1:
            asyncio.get_running_loop().call_later(INTERVAL_S, self._end_interval, reason)
        if number <= MAX_LINES:
            logger.info("refused (%s): %s", reason, what)

    def _end_interval(self, reason: Reason) -> None:
        num_more = self._num_lines.pop(reason) - MAX_LINES
        if num_more > 0:
            logger.info("refused (%s): and %d more", reason, num_more)
