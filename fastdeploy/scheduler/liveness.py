# SPDX-License-Identifier: Apache-2.0
"""What heartbeats and keys in Redis show: that writes were lost, or that processes are gone."""

from __future__ import annotations

from collections.abc import Container, Iterable
from random import Random

from fastdeploy.scheduler.request_states import Limits

NUM_LOOKS = 2  # without a key before a process is gone: one look may fall between expiry and renewal
FIRST_INCARNATIONS = 2**62  # numbers to draw from
LEAST_STEP, MOST_STEP = 2**20, 2**32  # to the next process; one process takes far fewer incarnations than the least


def next_incarnation(old: int | None, random: Random) -> int:
    """Return the incarnation of a new process of a node.

    It is larger than that in the node's old record, so that of two living processes the later one knows that it is.
    The step is random, because two processes may find the same record. Without a record any number is as good: no other
    process has it, and nobody else compares which is larger.
    """
    if old is None or old >= FIRST_INCARNATIONS:
        return random.randrange(FIRST_INCARNATIONS)
    return old + random.randrange(LEAST_STEP, MOST_STEP)


class Heartbeat:
    """Finds out whether Redis has lost writes, although the client library has reconnected in silence.

    A heartbeat is `SET key count PX … GET` with `INFO server`, `INFO replication` and an `EXPIRE` of every stream that
    this process reads. The count alone does not show a failover that loses no heartbeat but what was written since.
    """

    def __init__(self) -> None:
        self.count = 0
        self._acknowledged: int | None = None
        self._server = ""

    def next_count(self) -> int:
        """Return the count to write."""
        self.count += 1
        return self.count

    def lost_writes(self, echo: int | None, server: str, has_streams: bool) -> bool:
        """Take the answer to the last count; return whether writes before it may be lost.

        Args:
            echo: the count that was found; None if there was no key.
            server: run id and replication id, which change with a restart or failover.
            has_streams: whether all streams still exist.
        """
        is_first = self._acknowledged is None
        is_older = echo is None or (self._acknowledged is not None and echo < self._acknowledged)
        is_other = server != self._server
        self._acknowledged, self._server = self.count, server
        return not is_first and (is_older or is_other or not has_streams)


class Liveness:
    """Counts the looks, one per sync period, in which the keys of other processes were missing."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._misses: dict[str, int] = {}
        self.distrust_keys(now)

    def distrust_keys(self, now: float) -> None:
        """Judge nobody for one expire period, because Redis was away or lost keys, or nobody has looked."""
        self._trusts_keys_at = now + self._limits.expire_s
        self._misses.clear()

    def trusts_keys(self, now: float) -> bool:
        """Return whether what the keys show counts."""
        return now >= self._trusts_keys_at

    def find_gone(self, known: Iterable[str], alive: Container[str], now: float) -> list[str]:
        """Return which of the known processes are gone, given those whose keys were found in this look."""
        missing = [name for name in known if name not in alive] if self.trusts_keys(now) else []
        self._misses = {name: self._misses.get(name, 0) + 1 for name in missing}
        return [name for name, count in self._misses.items() if count >= NUM_LOOKS]
