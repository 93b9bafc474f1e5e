# SPDX-License-Identifier: Apache-2.0
"""The password of Redis is in nothing that a node shows, and in no argument or environment of its child processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.redis_server import RedisServer
from tests.entrypoints.server_process import ServerProcess, mock_server

PASSWORD = "sesame-open"


def processes_of(server: ServerProcess) -> list[str]:
    """Return the arguments and the environment of each child process."""
    folders = [Path("/proc") / str(pid) for pid in server.engine_pids()]
    return [(folder / "cmdline").read_text() + (folder / "environ").read_text() for folder in folders]


@pytest.mark.parametrize("source", ["environment", "url"])
def test_the_password_is_in_nothing_that_a_node_shows(tmp_path: Path, source: str) -> None:
    log = tmp_path / "log"
    env = {"FD_LOG_DIR": str(log), "FD_LOG_LEVEL": "DEBUG"}
    with RedisServer(tmp_path / "redis", requirepass=PASSWORD) as redis:
        flags = ["--workers", "2", "--node-id", "n1", "--scheduler-topic", "mtp"]
        if source == "environment":
            env["FD_SCHEDULER_PASSWORD"] = PASSWORD
            flags += ["--scheduler-port", str(redis.port)]
        else:
            flags += ["--scheduler-url", redis.address.replace("//", f"//:{PASSWORD}@")]
        with mock_server(tmp_path, "--scheduler-name", "splitwise", *flags, env=env) as server:
            info = server.get("/config-info")
            processes = processes_of(server)
            server.terminate()
            assert server.wait_end(60) == 0
    cluster = info.json()["cluster"]
    assert (cluster["scheduler_name"], cluster["splitwise_role"], cluster["node_id"]) == ("splitwise", "mixed", "n1")
    shown = f"{'***@' if source == 'url' else ''}127.0.0.1:{redis.port}/0"
    assert f"  cluster      splitwise, mixed, topic mtp, node n1, redis://{shown}" in server.stdout
    assert len(processes) >= 3, "two API processes and the engine"
    logs = [file.read_text() for file in log.rglob("*") if file.is_file()]
    for text in (info.text, server.stdout, server.stderr, *logs, *processes):
        assert PASSWORD not in text
