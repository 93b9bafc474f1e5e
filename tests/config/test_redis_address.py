# SPDX-License-Identifier: Apache-2.0
"""Addresses of Redis, and what is said about those that are not valid, without showing a password."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.cluster_config import ClusterConfig
from fastdeploy.config.redis_address import RedisAddress, parse_address
from fastdeploy.core.errors import ConfigError


def parse(url: str = "", **keys: Any) -> RedisAddress:
    return parse_address(ClusterConfig(scheduler_name="global", scheduler_url=url, **keys))


def test_host_port_database_user_and_password() -> None:
    address = parse(
        scheduler_host="10.0.0.1",
        scheduler_port=7000,
        scheduler_db=2,
        scheduler_username="user",
        scheduler_password="secret",
    )
    assert (address.kind, address.hosts, address.db) == ("tcp", (("10.0.0.1", 7000),), 2)
    assert (address.username, address.password) == ("user", "secret")
    assert (address.shown, address.flag) == ("redis://10.0.0.1:7000/2", "--scheduler-host")
    assert "secret" not in repr(address)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host", {"kind": "tcp", "hosts": (("host", 6379),)}),
        ("redis://host:1/3", {"hosts": (("host", 1),), "db": 3}),
        ("redis://host/?db=3", {"db": 3}),
        ("redis://[::1]:7/0", {"hosts": (("::1", 7),)}),
        ("redis://[fe80::1]", {"hosts": (("fe80::1", 6379),)}),
        ("redis://:p%40s%3As@host", {"username": "", "password": "p@s:s"}),
        ("redis://user:p@ss@host", {"username": "user", "password": "p@ss"}),
        ("redis://user@host", {"username": "user", "password": ""}),
        ("rediss://host", {"kind": "tcp", "tls": True, "ca": ""}),
        ("redis://host?tls=1", {"tls": True}),
        ("redis://host?tls=0", {"tls": False}),
        ("redis://host?protocol=2", {"protocol": 2}),
        ("unix:///run/redis.sock", {"kind": "unix", "path": "/run/redis.sock", "hosts": ()}),
        ("unix://u:p@/run/redis.sock?db=4", {"path": "/run/redis.sock", "db": 4, "password": "p"}),
        ("sentinel://a,b:1", {"kind": "sentinel", "hosts": (("a", 26379), ("b", 1)), "master": "mymaster"}),
        ("sentinel://a/main/5", {"master": "main", "db": 5}),
        ("sentinel://u:p@a/main?tls=1", {"master": "main", "tls": True, "username": "u"}),
        ("cluster://a:1,b:2", {"kind": "cluster", "hosts": (("a", 1), ("b", 2)), "db": 0}),
        ("cluster://a/0", {"db": 0}),
    ],
)
def test_urls(url: str, expected: dict[str, Any]) -> None:
    address = parse(url)
    assert {name: getattr(address, name) for name in expected} == expected


def test_certificates_of_an_authority(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.touch()
    assert parse(f"redis://host?tls=1&ca={file}").ca == str(file)
    with pytest.raises(ConfigError, match="--scheduler-url: option ca: needs rediss:// or tls=1"):
        parse(f"redis://host?ca={file}")
    with pytest.raises(ConfigError, match=r"--scheduler-url: option ca: there is no file '/missing\.pem'"):
        parse("rediss://host?ca=/missing.pem")
    with pytest.raises(ConfigError, match="--scheduler-url: needs cert and key together"):
        parse(f"rediss://host?cert={file}")
    address = parse(f"rediss://host?cert={file}&key={file}")
    assert (address.cert, address.key) == (str(file), str(file))


def test_a_url_without_credentials_or_database_takes_those_of_the_flags() -> None:
    address = parse("redis://host", scheduler_db=3, scheduler_username="user", scheduler_password="secret")
    assert (address.db, address.username, address.password) == (3, "user", "secret")
    assert address.credentials_flag == "--scheduler-password"
    assert parse("redis://u:p@host").credentials_flag == "--scheduler-url"


def test_a_cluster_has_no_other_database_by_flag_either() -> None:
    with pytest.raises(ConfigError, match="--scheduler-db: a Redis Cluster has only the database 0"):
        parse("cluster://host", scheduler_db=1)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://u:secret@host:0", "expected HOST or HOST:PORT, with a port in [1, 65535]"),
        ("redis://u:secret@host:65536", "expected HOST or HOST:PORT, with a port in [1, 65535]"),
        ("redis://u:secret@host:1x", "expected HOST or HOST:PORT"),
        ("redis://u:secret@", "expected HOST or HOST:PORT"),
        ("redis://user:secret", "expected HOST or HOST:PORT"),
        ("redis://user:1?se=cret@host", "expected no options but"),
        ("redis://u:secret@[::1", "expected HOST or HOST:PORT"),
        ("redis://u:secret@[::1]x", "expected HOST or HOST:PORT"),
        ("redis://u:secret@host/x", "expected a number for the database"),
        ("redis://u:secret@host/-1", "expected a number for the database"),
        ("redis://u:secret@host/99999999999", "expected a number for the database"),
        ("redis://u:secret@host/1?db=1", "has two databases"),
        ("redis://u:secret@host/1/2", "expected a number for the database"),
        ("redis://u:secret@a,b", "has several hosts, which need sentinel:// or cluster://"),
        ("redis://u:secret@host?tls=yes", "option tls: expected 0 or 1"),
        ("redis://u:secret@host?protocol=4", "option protocol: expected 2 or 3"),
        ("redis://host?password=secret", "expected no options but tls, ca, cert, key, db, protocol, each with =VALUE"),
        ("redis://host?secret", "expected no options but"),
        ("redis://host?Secret!=1", "expected no options but"),
        ("unix://u:secret@host/run/redis.sock", "the absolute path of a socket"),
        ("unix://u:secret@", "the absolute path of a socket"),
        ("unix://u:secret@/run/redis.sock?tls=1", "the absolute path of a socket"),
        ("cluster://u:secret@host/1", "has only the database 0"),
        ("sentinel://u:secret@a,,b", "host 2 of 3: expected HOST or HOST:PORT"),
        ("sentinel://u:secret@a/main/x", "expected a number for the database"),
    ],
)
def test_one_message_names_the_flag_and_shows_no_password(url: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(url)
    message = str(caught.value)
    assert message.startswith("--scheduler-url: ") and words in message
    assert "secret" not in message.lower() and "cret" not in message
