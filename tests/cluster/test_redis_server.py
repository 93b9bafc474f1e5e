# SPDX-License-Identifier: Apache-2.0
"""The server of the tests keeps or loses its data as it was configured, and stays stopped until it is woken."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from tests.cluster.redis_server import RedisServer


def test_a_restarted_server_is_empty_without_persistence(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        server.execute("SET", "key", "value")
        server.restart()
        assert server.execute("GET", "key") is None


def test_a_restarted_server_has_its_data_with_an_append_only_file(tmp_path: Path) -> None:
    with RedisServer(tmp_path, appendonly="yes", appendfsync="always") as server:
        server.execute("SET", "key", "value")
        server.restart()
        assert server.execute("GET", "key") == b"value"


def test_a_server_needs_its_password_on_the_port_too(tmp_path: Path) -> None:
    with RedisServer(tmp_path, requirepass="secret") as server:
        assert server.execute("PING") is True
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=server.port).ping()


def test_a_paused_server_answers_after_it_is_resumed(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        server.pause()
        with pytest.raises(redis.TimeoutError):
            redis.Redis(port=server.port, socket_timeout=0.1).ping()
        server.resume()
        assert server.execute("PING") is True


def test_a_wrong_option_is_reported_with_the_log(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no-such-option"):
        RedisServer(tmp_path, no_such_option="1").start()
