# SPDX-License-Identifier: Apache-2.0
"""Where Redis is: `--scheduler-url`, or host, port, database, user and password.

    redis://[USER:PASSWORD@]HOST[:PORT][/DB]            rediss:// for TLS
    unix://[USER:PASSWORD@]/PATH[?db=DB]
    sentinel://[USER:PASSWORD@]HOST[:PORT],...[/MASTER[/DB]]
    cluster://[USER:PASSWORD@]HOST[:PORT],...

Options: `tls=1`; with TLS `ca=FILE` (the system's certificates without it), `cert=FILE` and `key=FILE` (for servers
that demand a certificate of their clients); `db=DB`; `protocol=2` or 3 (RESP; 3 by default). User and password are
percent-encoded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from fastdeploy.config.cluster_config import ClusterConfig
from fastdeploy.config.redis_url import check_scheme
from fastdeploy.core.errors import ConfigError

URL_FLAG = "--scheduler-url"
DEFAULT_PORTS = {"redis": 6379, "rediss": 6379, "unix": 0, "sentinel": 26379, "cluster": 6379}
DEFAULT_MASTER = "mymaster"
FILES = ("ca", "cert", "key")
OPTIONS = ("tls", *FILES, "db", "protocol")
_HOST = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<host>[^\[\]:]+))(?::(?P<port>[0-9]{1,9}))?")


@dataclass(frozen=True)
class RedisAddress:
    """How to reach Redis.

    Attributes:
        kind: tcp, unix, sentinel or cluster.
        hosts: (host, port) of the server, of sentinels, or of some nodes of the cluster; empty with `unix`.
        path: of the Unix socket.
        master: name of the servers that the sentinels watch.
        ca: file with the certificates of the authority; "" for those of the system.
        cert, key: files with the certificate of this client and its key; "" without one.
        protocol: version of RESP.
        shown: the address without user and password, for messages.
        flag, credentials_flag: what gave the address, and user and password, for messages.
    """

    kind: str
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    master: str = ""
    db: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    tls: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""
    protocol: int = 3
    shown: str = ""
    flag: str = URL_FLAG
    credentials_flag: str = "--scheduler-password"


def parse_address(config: ClusterConfig) -> RedisAddress:
    """Return where Redis is; raise ConfigError, which does not show user or password."""
    if config.scheduler_url:
        return _parse_url(config)
    return RedisAddress(
        kind="tcp",
        hosts=((config.scheduler_host, config.scheduler_port),),
        db=config.scheduler_db,
        username=config.scheduler_username,
        password=config.scheduler_password,
        shown=config.address,
        flag="--scheduler-host",
    )


def _parse_url(config: ClusterConfig) -> RedisAddress:
    url = config.scheduler_url
    check_scheme(url, URL_FLAG)
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    options = _parse_options(query)
    credentials, at, rest = rest.rpartition("@")
    username, password = _parse_credentials(credentials) if at else ("", "")
    hosts, _, path = rest.partition("/")
    master, db = _parse_path(scheme, path, options)
    if scheme == "cluster" and (db or config.scheduler_db):
        raise ConfigError(URL_FLAG if db else "--scheduler-db", "a Redis Cluster has only the database 0")
    uses_tls = scheme == "rediss" or options.get("tls") == "1"
    if scheme == "unix" and (hosts or not path or uses_tls):
        raise ConfigError(URL_FLAG, "expected unix:// and the absolute path of a socket, as in unix:///run/redis.sock")
    _check_files(options, uses_tls)
    return RedisAddress(
        kind="tcp" if scheme in ("redis", "rediss") else scheme,
        hosts=() if scheme == "unix" else _parse_hosts(scheme, hosts),
        path=f"/{unquote(path)}" if scheme == "unix" else "",
        master=master,
        db=config.scheduler_db if db is None else db,
        username=username or config.scheduler_username,
        password=password or config.scheduler_password,
        tls=uses_tls,
        ca=options.get("ca", ""),
        cert=options.get("cert", ""),
        key=options.get("key", ""),
        protocol=int(options.get("protocol", "3")),
        shown=config.address,
        credentials_flag=URL_FLAG if at else RedisAddress.credentials_flag,
    )


def _parse_options(query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in query.split("&") if query else []:
        name, equals, value = part.partition("=")
        if name not in OPTIONS or not equals:
            raise ConfigError(URL_FLAG, f"expected no options but {', '.join(OPTIONS)}, each with =VALUE")
        options[name] = unquote(value)
    for name, valid in (("tls", ("0", "1")), ("protocol", ("2", "3"))):
        if options.get(name, valid[0]) not in valid:
            raise ConfigError(URL_FLAG, f"option {name}: expected {' or '.join(valid)}")
    return options


def _check_files(options: dict[str, str], uses_tls: bool) -> None:
    for name in FILES:
        if name in options and not uses_tls:
            raise ConfigError(URL_FLAG, f"option {name}: needs rediss:// or tls=1")
        if name in options and not Path(options[name]).is_file():
            raise ConfigError(URL_FLAG, f"option {name}: there is no file {options[name]!r}")
    if ("cert" in options) != ("key" in options):
        raise ConfigError(URL_FLAG, "needs cert and key together")


def _parse_credentials(text: str) -> tuple[str, str]:
    """Return user and password; a user alone is the user, as in any URL."""
    username, _, password = text.partition(":")
    return unquote(username), unquote(password)


def _parse_path(scheme: str, path: str, options: dict[str, str]) -> tuple[str, int | None]:
    """Return the sentinels' name of the servers and the database, None if it is not given."""
    master = ""
    if scheme == "sentinel":
        master, _, path = path.partition("/")
        master = unquote(master) or DEFAULT_MASTER
    elif scheme == "unix":
        path = ""
    if path and "db" in options:
        raise ConfigError(URL_FLAG, "has two databases, in its path and as an option")
    text = options.get("db", path)
    if not text:
        return master, None
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ConfigError(URL_FLAG, "expected a number for the database")
    return master, int(text)


def _parse_hosts(scheme: str, text: str) -> tuple[tuple[str, int], ...]:
    parts = text.split(",")
    if len(parts) > 1 and scheme in ("redis", "rediss"):
        raise ConfigError(URL_FLAG, "has several hosts, which need sentinel:// or cluster://")
    hosts = [_parse_host(part, DEFAULT_PORTS[scheme]) for part in parts]
    for number, host in enumerate(hosts, start=1):
        if host is None:  # what stands there may be a password
            place = f"host {number} of {len(hosts)}: " if len(hosts) > 1 else ""
            raise ConfigError(URL_FLAG, f"{place}expected HOST or HOST:PORT, with a port in [1, 65535]")
    return tuple(filter(None, hosts))


def _parse_host(text: str, default_port: int) -> tuple[str, int] | None:
    """Return host and port, None if they are not valid; an IPv6 address stands in brackets."""
    match = _HOST.fullmatch(text)
    port = int(match["port"] or default_port) if match else 0
    return (match["ipv6"] or match["host"], port) if match and 0 < port < 65536 else None
