# SPDX-License-Identifier: Apache-2.0
"""What must be gone once all requests have ended: work, slots, tickets, processes, sockets, shared memory."""

from __future__ import annotations

import redis

from tests.cluster import processes
from tests.cluster.cluster import Cluster, Node, until

GONE_WITHIN_S = 30.0  # leases run out after 10 s
SPARE_DESCRIPTORS = 24  # connections that a client pool or a probe may have open


def check_clean(cluster: Cluster) -> None:
    """Wait until nothing of the ended requests is left on any node or in Redis; all nodes run."""
    for index, node in enumerate(cluster.nodes):
        until(lambda node=node: not _work(node), f"node {index} is idle", GONE_WITHIN_S, lambda node=node: _work(node))
        _check_processes(node, len(cluster.nodes))
    server = cluster.redis and cluster.redis.server
    if server is not None:
        until(lambda: not entries(server.client()), "Redis is empty", GONE_WITHIN_S, lambda: entries(server.client()))


def check_ended(cluster: Cluster) -> None:
    """Check that all nodes have ended by SIGTERM, with all their processes, folders and keys."""
    assert cluster.end() == [0] * len(cluster.nodes)
    known = {identity for node in cluster.nodes for identity in node.known}
    until(lambda: not any(map(processes.still_runs, known)), "all processes have ended")
    assert [path.name for path in cluster.temporary.iterdir()] == []


def _work(node: Node) -> dict[str, float]:
    """Return the metrics that show work of a node, or memory that is in use."""
    found = {
        "requests": node.metric("num_requests_inside"),
        "running": node.metric("num_requests_running"),
        "waiting": node.metric("num_requests_waiting"),
        "blocks": node.metric("max_gpu_block_num") - node.metric("available_gpu_block_num"),
        "slots": node.metric("kv_transfer_slots") - node.metric("kv_transfer_slots", 'state="free"'),
    }
    return {name: value for name, value in found.items() if value}


def _check_processes(node: Node, num_nodes: int) -> None:
    """Check that a node has its present processes only, and each of them no more memory files than there are peers."""
    present = node.pids("all")
    tree = processes.tree(node.server.process.pid)
    assert not [pid for pid in tree if not processes.is_alive(pid)], "a child was not reaped"
    lost = [identity for identity in node.known if identity[0] not in tree and processes.still_runs(identity)]
    assert lost == [], "a process has lost its server"
    for pid in present:
        files = processes.memory_files(pid)
        assert len(files) <= (num_nodes if processes.kind(pid) == "engine" else 0), (processes.kind(pid), files)
        allowed = node.num_descriptors.setdefault(pid, processes.num_descriptors(pid)) + SPARE_DESCRIPTORS
        assert processes.num_descriptors(pid) <= allowed, f"{processes.kind(pid)} does not close its files"


def entries(client: redis.Redis) -> dict[str, str]:
    """Return what should not be in Redis: keys without TTL, tickets, messages, and pending entries.

    Messages to a process that is gone stay until the TTL of its inbox has run out.
    """
    found = {}
    with client:
        for key in client.scan_iter(count=1000):
            name = key.decode()
            if client.ttl(key) == -1:
                found[name] = "no TTL"
            if client.type(key) != b"stream" or _has_no_reader(client, name):
                continue
            if client.xlen(key):
                found[name] = f"{client.xlen(key)} entries"
            if any(group["pending"] for group in client.xinfo_groups(key)):
                found[name] = "pending entries"
    return found


def _has_no_reader(client: redis.Redis, name: str) -> bool:
    """Return whether a stream is the inbox of a node or owner whose heartbeat has ended."""
    for inbox, heartbeat in (("}:in:", "}:node:"), ("}:out:", "}:owner:")):
        if inbox in name:
            return not client.exists(name.replace(inbox, heartbeat))
    return False
