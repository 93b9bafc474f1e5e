# SPDX-License-Identifier: Apache-2.0
"""Nodes that share a Redis of their own, for benchmarks: processor time by kind of process, commands and bytes."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.bench_http import Server, cpu_s, serving
from benchmarks.report import Row

START_S = 60.0
KINDS = {"engine_process": "engine", "agent_process": "agent"}  # of processes, by a part of their command lines


class Redis:
    """A Redis server without persistence on a free port of this machine, while the block runs."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self._folder = tempfile.mkdtemp(prefix="bench-redis-")

    def __enter__(self) -> Redis:
        flags = ["--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--dir", self._folder]
        self.process = subprocess.Popen(["redis-server", *flags], stdout=subprocess.DEVNULL)
        wait_until(self._answers, "redis-server answers")
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self._folder)

    @property
    def url(self) -> str:
        """Return its address as a flag of nodes."""
        return f"redis://127.0.0.1:{self.port}/0"

    def counters(self) -> Row:
        """Return the number of bytes in both directions, and its processor seconds."""
        with socket.create_connection(("127.0.0.1", self.port)) as connection, connection.makefile("rb") as answer:
            connection.sendall(b"INFO stats\r\n")
            text = answer.read(int(answer.readline()[1:])).decode()
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        num_bytes = int(fields["total_net_input_bytes"]) + int(fields["total_net_output_bytes"])
        return {"bytes": num_bytes, "s": cpu_s(self.process.pid)}

    def _answers(self) -> bool:
        try:
            self.counters()
        except OSError:
            return False
        return True


@contextmanager
def nodes(
    flags: Sequence[str], redis: Redis, roles: Sequence[str], scheduler: str = "splitwise"
) -> Iterator[list[Server]]:
    """Run one node per role and wait until each of them sees another one."""
    common = [*flags, "--scheduler-name", scheduler, "--scheduler-url", redis.url]
    with ExitStack() as stack:
        own = [[*common, *(["--splitwise-role", role] if scheduler == "splitwise" else [])] for role in roles]
        running = [stack.enter_context(serving(line)) for line in own]
        for server in running:
            wait_until(lambda server=server: get(server, "/health")["cluster"] == "ok", "the nodes see each other")
        yield running


def get(server: Server, path: str) -> Row:
    """Return the JSON document at a path."""
    with urllib.request.urlopen(f"http://{server.host}:{server.port}{path}") as response:
        document: Row = json.load(response)
    return document


def metric(server: Server, name: str) -> float:
    """Return the sum of a metric over its labels."""
    with urllib.request.urlopen(f"http://{server.host}:{server.port}/metrics") as response:
        lines = response.read().decode().splitlines()
    found = [line.rsplit(" ", 1)[1] for line in lines if line.split("{")[0].split(" ")[0] == f"fastdeploy:{name}"]
    if not found:
        raise KeyError(name)
    return sum(map(float, found))


def cpu_by_kind(servers: Sequence[Server]) -> Counter[str]:
    """Return the processor seconds of the engines, the agents and the API processes of some servers."""
    seconds = Counter[str]()
    for server in servers:
        for pid in (server.process.pid, *server.children()):
            line = Path(f"/proc/{pid}/cmdline").read_text()
            kind = next((kind for part, kind in KINDS.items() if part in line), "api")
            seconds[kind] += cpu_s(pid)
    return seconds


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds; raise TimeoutError after a minute."""
    deadline = time.monotonic() + START_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"timed out while waiting until {what}")
        time.sleep(0.05)
