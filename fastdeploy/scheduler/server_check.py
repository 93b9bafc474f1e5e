# SPDX-License-Identifier: Apache-2.0
"""Whether a Redis server can be used at all, before a node begins to."""

from __future__ import annotations

from fastdeploy.config.redis_address import URL_FLAG, RedisAddress
from fastdeploy.core.errors import ConfigError
from fastdeploy.scheduler.keys import CONSUMER_GROUP, Keys
from fastdeploy.scheduler.redis_client import Command, RedisClient
from fastdeploy.scheduler.redis_errors import WRONG_KIND, WRONG_PASSWORD, StoreError
from fastdeploy.scheduler.request_states import Stage

LEAST_VERSION = (7, 0)
_NAME = ".check"  # no node or owner has this name
_MODES = {"sentinel": "is a sentinel; use sentinel://", "cluster": "is a Redis Cluster; use cluster://"}


async def check_server(client: RedisClient, address: RedisAddress, keys: Keys) -> list[str]:
    """Check version, role, permissions and memory policy; return notes for the operator.

    Raises:
        ConfigError: something that does not change by itself makes this server useless; names the flag.
        StoreError: it does not answer, or cannot do anything now.
    """
    try:
        info = _parse_info(await client.run_one("INFO"))
        _check_info(info, address)
        await client.run_all(*_probe(keys), atomic=True)
    except StoreError as error:
        _raise_config_error(error, address, keys)
        raise
    policy = info.get("maxmemory_policy", "noeviction")
    if policy == "noeviction":
        return []
    return [
        f"Redis at {address.shown} has maxmemory-policy {policy} and may evict queues, which delays requests; "
        "set it to noeviction"
    ]


def _check_info(info: dict[str, str], address: RedisAddress) -> None:
    mode, version = info.get("redis_mode", "standalone"), info.get("redis_version", "")
    if mode in _MODES and mode != address.kind:
        raise ConfigError(address.flag, f"Redis at {address.shown} {_MODES[mode]}")
    if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < LEAST_VERSION:
        raise ConfigError(address.flag, f"Redis at {address.shown} has version {version or 'unknown'}; 7.0 is needed")
    if info.get("role") == "slave":
        if address.kind in ("sentinel", "cluster"):
            raise StoreError(f"Redis at {address.shown} has no master at present", "READONLY")
        raise ConfigError(address.flag, f"Redis at {address.shown} is a replica; expected its master")


def _raise_config_error(error: StoreError, address: RedisAddress, keys: Keys) -> None:
    """Raise ConfigError if the error does not go away by itself."""
    text = str(error)
    if error.code in WRONG_PASSWORD:
        raise ConfigError(address.credentials_flag, text) from None
    if error.code == "NOPERM":
        grant = f"~{{{keys.topic}}}:* +@read +@write +@connection +@transaction +@blocking +info +eval"
        message = f"the user may not use the keys or commands that are needed, which are {grant}: {text}"
        raise ConfigError("--scheduler-username", message) from None
    if error.code == WRONG_KIND or "certificate verify failed" in text.lower():
        raise ConfigError(address.flag, text) from None
    if "DB index is out of range" in text:
        flag = address.flag if address.flag == URL_FLAG else "--scheduler-db"
        raise ConfigError(flag, f"Redis at {address.shown} has no database {address.db}") from None


def _probe(keys: Keys) -> list[Command]:
    """Return a transaction that executes every command on every kind of key, and leaves nothing."""
    streams = [
        keys.node_inbox(_NAME),
        keys.owner_inbox(_NAME),
        *(keys.queue(stage, _NAME) for stage in Stage),
    ]
    strings = [keys.node(_NAME), keys.owner(_NAME), keys.prefix(_NAME.encode())]
    commands: list[Command] = [("SET", key, "", "PX", 1000, "GET") for key in strings]
    commands.append(("MGET", *strings))
    for names in (keys.nodes, keys.owners):
        commands += [("SADD", names, _NAME), ("SREM", names, _NAME), ("SMEMBERS", names)]
    for stream in streams:
        group = (stream, CONSUMER_GROUP)
        commands += [
            ("XGROUP", "CREATE", *group, "0", "MKSTREAM"),
            ("XADD", stream, "NOMKSTREAM", "*", "m", ""),
            ("XREADGROUP", "GROUP", CONSUMER_GROUP, _NAME, "COUNT", 1, "STREAMS", stream, ">"),
            ("XAUTOCLAIM", *group, _NAME, 0, "0-0"),
            ("XREAD", "COUNT", 1, "STREAMS", stream, "0"),
            ("XRANGE", stream, "-", "+", "COUNT", 1),
            ("XLEN", stream),
            ("XINFO", "CONSUMERS", *group),
            ("XGROUP", "DELCONSUMER", *group, _NAME),
            ("XGROUP", "SETID", *group, "0"),
            ("XDEL", stream, "0-1"),
            ("XACK", *group, "0-1"),
            ("EXPIRE", stream, 1),
            ("XGROUP", "DESTROY", *group),
        ]
    return [*commands, ("EVAL", "return 1", 0), ("DEL", *strings, *streams)]


def _parse_info(answer: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in answer.decode(errors="replace").splitlines())
    return {name: value.strip() for name, colon, value in lines if colon}
