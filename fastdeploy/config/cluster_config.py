# SPDX-License-Identifier: Apache-2.0
"""Configuration of a node among others: its role, the Redis that connects them, and the limits of requests."""

from __future__ import annotations

import re
import secrets
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from fastdeploy.config.flag import CLUSTER, Flag, check_fields, choice, integer, number, text
from fastdeploy.config.redis_url import MASK, check_scheme, masked
from fastdeploy.core.errors import ConfigError

__all__ = ["AVAILABLE_CONNECTORS", "CLUSTER", "CONNECTORS", "LEAST_PERIOD_MS", "ClusterConfig"]

LEAST_PERIOD_MS = 100
LEAST_SYNC_PERIODS = 3  # in an expire period, so that one late heartbeat does not end a node
CONNECTORS = ("ipc", "rdma", "tcp")
AVAILABLE_CONNECTORS = ("ipc",)
_MAX_NAME = 64
_MAX_COUNT = 2**31 - 1
_MAX_PERIOD_MS = 3_600_000
_MAX_S = 1e9
_PROTOCOL_HELP = "auto, or a list of ipc, rdma, tcp separated by commas: how KV blocks get from node to node"
_URL_HELP = (
    "instead of host and port: redis://, rediss://, unix:///PATH, sentinel://H:P,H:P/MASTER/DB, cluster://H:P,H:P; "
    "with ?tls=1&ca=FILE"
)


def _name(characters: str, expected: str, default: str, **keys: Any) -> Flag:
    """Accept names of these characters, and the default."""
    pattern = re.compile(rf"[{characters}]{{1,{_MAX_NAME}}}")

    def is_valid(value: Any) -> bool:
        return isinstance(value, str) and (value == default or pattern.fullmatch(value) is not None)

    return Flag("str", f"1 to {_MAX_NAME} {expected}", is_valid, **keys)


def _or_no_limit(limit: Flag) -> Flag:
    """Accept the numbers that `limit` accepts, and -1."""
    return replace(
        limit, expected=f"{limit.expected}, or -1", is_valid=lambda value: value == -1 or limit.is_valid(value)
    )


@dataclass(frozen=True)
class ClusterConfig:
    """How this node works with others; with the scheduler `local` it works alone and nothing else has an effect.

    Times are in the units of FastDeploy's flags: milliseconds for the periods of heartbeats, else seconds. A
    `scheduler_url` replaces host and port, and database, user and password where it has them.
    """

    scheduler_name: Annotated[
        str, choice("local", "global", "splitwise", help="local, global (one queue of all nodes) or splitwise")
    ] = "local"
    splitwise_role: Annotated[
        str, choice("prefill", "decode", "mixed", help="prefill, decode or mixed: what this node does first")
    ] = "mixed"
    scheduler_host: Annotated[str, text(help="host of Redis")] = "127.0.0.1"
    scheduler_port: Annotated[int, integer(1, 65535, help="port of Redis")] = 6379
    scheduler_db: Annotated[int, integer(0, _MAX_COUNT, help="number of the database in Redis")] = 0
    scheduler_username: Annotated[str, text(help="user of Redis (default: its default user)")] = ""
    scheduler_password: Annotated[
        str, text(is_secret=True, help="password of Redis; safer in FD_SCHEDULER_PASSWORD or a file")
    ] = field(default="", repr=False)
    scheduler_password_file: Annotated[str, text(help="file whose first line is the password of Redis")] = ""
    scheduler_url: Annotated[str, text(is_secret=True, help=_URL_HELP)] = field(default="", repr=False)
    scheduler_topic: Annotated[
        str,
        _name(
            "A-Za-z0-9._-",
            "letters, digits, dots, hyphens or underscores",
            "default",
            help="only nodes of one topic work together",
        ),
    ] = "default"
    node_id: Annotated[
        str,
        _name("A-Za-z0-9_-", "letters, digits, hyphens or underscores", "", help="name of this node (default: random)"),
    ] = ""
    scheduler_ttl: Annotated[
        int, integer(1, _MAX_COUNT, help="seconds without progress after which a request ends with 504")
    ] = 900
    scheduler_max_size: Annotated[
        int, _or_no_limit(integer(1, _MAX_COUNT, help="requests that may wait in an API process; -1: no limit"))
    ] = -1
    scheduler_max_waiting_time: Annotated[
        float,
        _or_no_limit(
            number(0.001, _MAX_S, help="seconds that a request may wait in the queues before it gets 429; -1: no limit")
        ),
    ] = -1.0
    scheduler_sync_period: Annotated[
        int,
        integer(LEAST_PERIOD_MS, _MAX_PERIOD_MS, help="milliseconds between heartbeats; less than 100 counts as 100"),
    ] = 500
    scheduler_expire_period: Annotated[
        int, integer(LEAST_PERIOD_MS, _MAX_PERIOD_MS, help="milliseconds until a silent node is gone")
    ] = 3000
    scheduler_release_load_expire_period: Annotated[
        int, integer(1, _MAX_COUNT, help="seconds without progress on a living node before another one tries")
    ] = 600
    scheduler_max_attempts: Annotated[
        int, integer(1, 100, help="lost tries of one request without a token, after which it ends with 503")
    ] = 3
    scheduler_patience: Annotated[
        float,
        _or_no_limit(
            number(0, _MAX_S, help="seconds without Redis before a node goes on with its streams alone; -1: never")
        ),
    ] = 30.0
    splitwise_min_prompt: Annotated[
        int | None,
        integer(
            0, _MAX_COUNT, help="tokens to compute up to which a prompt goes to a decode node (default: one block)"
        ),
    ] = None
    cache_transfer_protocol: Annotated[str, text(help=_PROTOCOL_HELP)] = "auto"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.splitwise_role != "mixed" and self.scheduler_name != "splitwise":
            raise ConfigError("splitwise_role", f"{self.splitwise_role!r} needs --scheduler-name splitwise")
        if self.scheduler_url:
            check_scheme(self.scheduler_url, "scheduler_url")
        _check_connectors(self.requested_connectors)
        if self.is_clustered:
            self._check_times()

    @property
    def is_clustered(self) -> bool:
        """Return whether this node works with others."""
        return self.scheduler_name != "local"

    @property
    def is_split(self) -> bool:
        """Return whether prompts and outputs may be computed on different nodes."""
        return self.scheduler_name == "splitwise"

    @property
    def requested_connectors(self) -> tuple[str, ...]:
        """Return the connectors that may be used, in the order in which they were given, available or not."""
        if self.cache_transfer_protocol == "auto":
            return AVAILABLE_CONNECTORS
        return tuple(dict.fromkeys(name.strip() for name in self.cache_transfer_protocol.split(",")))

    @property
    def connectors(self) -> tuple[str, ...]:
        """Return the connectors to use, the preferred one first."""
        return tuple(name for name in self.requested_connectors if name in AVAILABLE_CONNECTORS)

    @property
    def address(self) -> str:
        """Return the address of Redis as a URL, without user and password."""
        if self.scheduler_url:
            return masked(self.scheduler_url)
        host = f"[{self.scheduler_host}]" if ":" in self.scheduler_host else self.scheduler_host
        return f"redis://{host}:{self.scheduler_port}/{self.scheduler_db}"

    def with_node_id(self) -> ClusterConfig:
        """Return this configuration with a node id, which is drawn unless it was given; one that is local stays."""
        if self.node_id or not self.is_clustered:
            return self
        return replace(self, node_id=secrets.token_hex(4))

    def shown(self) -> dict[str, Any]:
        """Return the fields by name, with masked secrets."""
        password = MASK if self.scheduler_password else ""
        return {**asdict(self), "scheduler_password": password, "scheduler_url": masked(self.scheduler_url)}

    def _check_times(self) -> None:
        sync_ms, expire_ms = self.scheduler_sync_period, self.scheduler_expire_period
        if expire_ms < LEAST_SYNC_PERIODS * sync_ms:
            raise ConfigError(
                "scheduler_expire_period",
                f"expected at least {LEAST_SYNC_PERIODS} times scheduler_sync_period {sync_ms}, got {expire_ms}",
            )
        if self.scheduler_ttl * 1000 < expire_ms:
            raise ConfigError(
                "scheduler_ttl",
                f"expected at least scheduler_expire_period {expire_ms} milliseconds, got {self.scheduler_ttl} seconds",
            )


def _check_connectors(names: tuple[str, ...]) -> None:
    unknown = [name for name in names if name not in CONNECTORS]
    if unknown:
        expected = f"auto, or a list of {', '.join(CONNECTORS)}"
        raise ConfigError("cache_transfer_protocol", f"expected {expected}, got {unknown[0]!r}")
    if not set(names) & set(AVAILABLE_CONNECTORS):
        missing = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not available yet"
        raise ConfigError("cache_transfer_protocol", f"{missing}; expected auto or a list with ipc")
