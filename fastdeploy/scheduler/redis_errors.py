# SPDX-License-Identifier: Apache-2.0
"""What is wrong with Redis, in words for its operator."""

from __future__ import annotations


class StoreError(Exception):
    """Redis is away, full, read-only, loading, or a cluster that is down: `RedisLost`. The message says which.

    Attributes:
        code: the first word of Redis' answer, as `OOM`; "" if there was none.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class GroupMissingError(StoreError):
    """A stream or its consumer group is gone, so that Redis has lost data: `RedisReturned`."""


MISSING_GROUP = ("NOGROUP", "UNBLOCKED")
MISSING_KEY = ("no such key", "requires the key to exist")
WRONG_PASSWORD = ("WRONGPASS", "NOAUTH")
WRONG_KIND = "KIND"  # of a StoreError: what was asked is no sentinel or cluster, or has no master of that name
ANOTHER_SERVER = ("MOVED", "ASK", "TRYAGAIN", "READONLY", "CLUSTERDOWN", "MASTERDOWN")  # may be the right one
_MEANINGS = {
    "OOM": "is full: it has reached its maxmemory",
    "MISCONF": "refuses writes because it cannot save its data to disk",
    "READONLY": "is a read-only replica",
    "LOADING": "is still loading its data",
    "CLUSTERDOWN": "is a cluster that is down: no server has our keys",
    "NOREPLICAS": "refuses writes because too few replicas follow it",
    "MASTERDOWN": "is a replica that has lost its master",
    "BUSY": "is busy with a script",
    "NOPERM": "no longer permits what it permitted",
    "WRONGPASS": "refuses the user or the password",
    "NOAUTH": "demands a password",
    "WRONGTYPE": "has a value of another program in one of our keys",
    "MOVED": "is a Redis Cluster, and another server of it has our keys",
    "ASK": "moves our keys to another server of the cluster",
    "TRYAGAIN": "moves our keys to another server of the cluster",
    "UNKILLABLE": "is busy with a script",
}


def describe_answer(shown: str, code: str, text: str) -> StoreError:
    """Return the error for an answer of Redis that begins with `code`, at the address `shown`."""
    if code in MISSING_GROUP or any(words in text for words in MISSING_KEY):
        return GroupMissingError(f"Redis at {shown} has lost a queue", code)
    meaning = _MEANINGS.get(code, "does not execute a command")
    detail = text if text.startswith(code) else f"{code} {text}"
    return StoreError(f"Redis at {shown} {meaning} ({detail[:200]})", code)


def describe_silence(shown: str, error: BaseException | None, timeout_s: float) -> StoreError:
    """Return the error for a server that cannot be reached, or does not answer in time if `error` is None."""
    if error is None:
        return StoreError(f"Redis at {shown} did not answer within {timeout_s:g} s")
    return StoreError(f"Redis at {shown} cannot be reached: {' '.join(str(error).split())[:200]}")
