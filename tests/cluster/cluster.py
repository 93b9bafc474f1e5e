# SPDX-License-Identifier: Apache-2.0
"""Several real servers on one Redis, whose processes a test kills, stops, wakes and restarts."""

from __future__ import annotations

import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from tests.cluster import processes
from tests.cluster.bodies import MODEL
from tests.cluster.redis_failover import LastingRedis
from tests.entrypoints.server_process import ServerProcess
from tests.mock_engine import FACTORY, save_mock_model

READY_TIMEOUT_S = 120.0
PERIODS = ("--scheduler-sync-period", "150", "--scheduler-expire-period", "800")
MOCK_FLAGS = ("--max-model-len", "1024")
DEMO_FLAGS = ("--max-model-len", "512", "--num-gpu-blocks-override", "200", "--max-num-seqs", "32")


@dataclass(frozen=True)
class Shape:
    """What a cluster consists of.

    Attributes:
        scheduler: --scheduler-name; `local` is for tests of single nodes, without Redis.
        roles: one per node.
        workers: API processes per node.
    """

    scheduler: str
    roles: tuple[str, ...]
    workers: int = 1

    def __str__(self) -> str:
        return f"{self.scheduler}({','.join(self.roles)})x{self.workers}"


def until(
    condition: Callable[[], bool], what: str, timeout_s: float = 30.0, why: Callable[[], Any] = lambda: ""
) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: it does not within `timeout_s`; the message is `what` and the value of `why`.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what} {why()}"
        time.sleep(0.02)


class Node:
    """One server of a cluster, which keeps its flags when it is started again.

    Attributes:
        server: the present process.
        known: all processes that this node was seen to have.
        name: its --node-id, which each start draws.
        servers: all processes that it has had.
        num_descriptors: files that a process had open when it was first looked at.
    """

    def __init__(self, flags: Sequence[str], factory: str, env: Mapping[str, str], role: str) -> None:
        self.role = role
        self.known: set[processes.Identity] = set()
        self.name = ""
        self.num_descriptors: dict[int, int] = {}
        self.server: ServerProcess
        self.servers: list[ServerProcess] = []
        self._flags, self._factory, self._env = flags, factory, env
        self._stopped: set[int] = set()

    @property
    def url(self) -> str:
        """Return the address of the server; "" while it does not run."""
        return self.server.url if self.server.process.poll() is None else ""

    def start(self, fault: str = "") -> None:
        """Start the server; `wait_ready` waits for it.

        Args:
            fault: a value of FD_FAULT.
        """
        faults = {"FD_DEBUG": "1", "FD_FAULT": fault} if fault else {}
        self.server = ServerProcess(list(self._flags), self._factory, {**self._env, **faults})
        self.servers.append(self.server)

    def wait_ready(self) -> None:
        """Wait for the ready line, and note all processes."""
        self.server.wait_ready()
        self.pids("all")
        self.name = self.health().get("node", "")

    def pids(self, kind: str) -> list[int]:
        """Return the live processes of one kind: `engine`, `agent`, `api` (what clients are connected to) or `all`.

        Those of `api` with most connections are first, because any of them may have accepted all of them.
        """
        pids = processes.tree(self.server.process.pid)
        self.known |= {processes.identity(pid) for pid in pids if processes.is_alive(pid)}
        kinds = {pid: processes.kind(pid) for pid in pids if processes.is_alive(pid)}
        if kind == "all":
            return list(kinds)
        if kind == "api":
            workers = [pid for pid in kinds if kinds[pid] == "worker"]
            workers.sort(key=processes.num_sockets, reverse=True)
            return workers or [pid for pid in kinds if pid == self.server.process.pid]
        return [pid for pid in kinds if kinds[pid] == kind]

    def kill(self, kind: str = "all", index: int = 0) -> None:
        """Kill one process of a kind, or with `all` the server, after which its children end."""
        pids = self.pids(kind)
        processes.send(pids[:1] if kind == "all" else pids[index : index + 1], signal.SIGKILL)

    def stop(self, kind: str = "all") -> None:
        """Stop all processes of a kind, until `wake`."""
        pids = self.pids(kind)
        self._stopped |= set(pids)
        processes.send(pids, signal.SIGSTOP)

    def wake(self) -> None:
        """Continue every process that was stopped, by `stop` or by itself."""
        itself = [pid for pid in processes.tree(self.server.process.pid) if processes.state(pid) in ("T", "t")]
        processes.send([*self._stopped, *itself], signal.SIGCONT)
        self._stopped.clear()

    def has_ended(self) -> bool:
        """Return whether the server has ended, or will because it has lost its engine."""
        if self.server.process.poll() is None and self.server.url and not self.pids("engine"):
            self.server.wait_end(60)
        return self.server.process.poll() is not None

    def metric(self, name: str, labels: str = "") -> float:
        """Return the sum of a metric over those of its series whose labels contain a text."""
        page = httpx.get(self.url + "/metrics", timeout=30).text
        rows = re.findall(rf"^fastdeploy:{re.escape(name)}(\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE)
        return sum(float(value) for found, value in rows if labels in found)

    def load(self) -> dict[str, Any]:
        """Return the body of /load."""
        return dict(httpx.get(self.url + "/load", timeout=30).json())

    def health(self) -> dict[str, Any]:
        """Return the body of /health."""
        return dict(httpx.get(self.url + "/health", timeout=30).json())


class Cluster:
    """A context manager: starts Redis and all nodes, and ends every process.

    Attributes:
        nodes: one per role of the shape.
        model: the folder of the mock engine's model, or what was given.
        redis: None with the scheduler `local`.
        temporary: TMPDIR of all nodes, where their runtime folders are.
    """

    def __init__(
        self,
        shape: Shape,
        folder: Path,
        flags: Sequence[str] = (),
        persistence: str = "none",
        factory: str = FACTORY,
        model: str = "",
        topic: str = "campaign",
        redis: LastingRedis | None = None,
        **options: Any,
    ) -> None:
        """Write the model of the mock engine, and start Redis.

        Args:
            folder: for the model, logs and the data of Redis.
            flags: of all nodes.
            persistence: `aof`, `default` or `none`.
            factory, model: the mock engine, or the real one with a model.
            redis: a Redis that another cluster has started; the caller ends it.
            options: of the mock engine (`tests/mock_engine.py`).
        """
        self.shape = shape
        self.temporary = Path(tempfile.mkdtemp(prefix="fd-"))  # paths of sockets must be short
        self._owns_redis = redis is None and shape.scheduler != "local"
        self.redis = LastingRedis(folder / "redis", persistence) if self._owns_redis else redis
        mock = factory == FACTORY
        model = model or str(save_mock_model(_made(folder / "model"), **options))
        self.model = Path(model)
        common = [model, "--served-model-name", MODEL, "--workers", str(shape.workers)]
        common += [*(MOCK_FLAGS if mock else DEMO_FLAGS), *self._cluster_flags(topic), *flags]
        env = {"TMPDIR": str(self.temporary)}
        self.nodes = [Node([*common, *self._role(role)], factory, env, role) for role in shape.roles]

    def _cluster_flags(self, topic: str) -> list[str]:
        if self.redis is None:
            return []
        address = ["--scheduler-port", str(self.redis.port), "--scheduler-topic", topic]
        return ["--scheduler-name", self.shape.scheduler, *address, *PERIODS]

    def _role(self, role: str) -> list[str]:
        return ["--splitwise-role", role] if self.shape.scheduler == "splitwise" else []

    def __enter__(self) -> Self:
        try:
            for node in self.nodes:
                node.start()
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def urls(self) -> list[str]:
        """Return the address of each node; "" for one that does not run or is not ready."""
        return [node.url for node in self.nodes]

    def wait_ready(self) -> None:
        """Wait until every node is ready and, if Redis lives, sees all others."""
        for node in self.nodes:
            node.wait_ready()
        if self.redis is not None and not self.redis.is_dead:
            for node in self.nodes:
                until(lambda node=node: self._sees_all(node), "a node sees all others", READY_TIMEOUT_S)

    def _sees_all(self, node: Node) -> bool:
        return node.metric("cluster_nodes", 'state="live"') == len(self.nodes) and node.metric("cluster_redis_up") == 1

    def arm(self, faults: Mapping[int, str]) -> None:
        """Start these nodes again, each with a fault; a value of FD_FAULT."""
        for index in faults:
            self.nodes[index].server.terminate()
        for index, fault in faults.items():
            assert self.nodes[index].server.wait_end(60) == 0
            self.nodes[index].start(fault)
        if faults:
            self.wait_ready()

    def heal(self) -> None:
        """Wake what is stopped, start again what has ended, and wait until all nodes are ready."""
        for node in self.nodes:
            node.wake()
            if node.has_ended():
                node.start()
        self.wait_ready()

    def write_logs(self, file: Path) -> None:
        """Write what all servers have printed."""
        parts = [
            f"===== node {index}, server {number}: {server.stdout}\n{server.stderr}"
            for index, node in enumerate(self.nodes)
            for number, server in enumerate(node.servers)
        ]
        file.write_text("\n".join(parts))

    def end(self) -> list[int]:
        """Send SIGTERM to all nodes, one after the other, and return the exit statuses."""
        statuses = []
        for node in self.nodes:
            node.server.terminate()
            statuses.append(node.server.wait_end(60))
        return statuses

    def close(self) -> None:
        """Kill whatever is left."""
        for node in self.nodes:
            if hasattr(node, "server"):
                node.wake()
                node.server.close()
        if self._owns_redis and self.redis is not None:
            self.redis.close()
        shutil.rmtree(self.temporary, ignore_errors=True)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
