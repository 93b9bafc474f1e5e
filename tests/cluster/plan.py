# SPDX-License-Identifier: Apache-2.0
"""What happens in one slice of the campaign: everything follows from its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from fastdeploy.core.faults import POINTS
from tests.cluster.bodies import draw_body
from tests.cluster.cluster import Shape
from tests.cluster.redis_failover import PERSISTENCE

NUM_REQUESTS = 32
SLICES_PER_CLUSTER = 8
REQUESTS_WITHIN_S = 1.5
EVENTS_WITHIN_S = 2.5
SHAPES = (
    Shape("splitwise", ("prefill", "decode")),
    Shape("splitwise", ("prefill", "prefill", "decode", "decode")),
    Shape("splitwise", ("prefill", "decode", "mixed"), workers=2),
    Shape("splitwise", ("prefill", "decode"), workers=2),
    Shape("global", ("mixed", "mixed"), workers=2),
    Shape("global", ("mixed", "mixed", "mixed")),
    Shape("global", ("mixed", "mixed", "mixed", "mixed")),
)
ON_REDIS = ("redis_kill", "redis_stop", "flush", "failover")
DEAD_FOR_GOOD = "redis_dead"  # only in the last slice of a cluster
ENGINE_POINTS = ("admit", "run", "commit", "delta", "finish")  # a choice of those that only the real engine has


@dataclass(frozen=True)
class Event:
    """One thing that goes wrong.

    Attributes:
        at_s: seconds after the slice has begun.
        action: `kill`, `stop` or `restart` (by SIGTERM) of a node, one of ON_REDIS, or DEAD_FOR_GOOD.
        node: index of the node.
        process: kind of its process; `all` is the whole node.
        length_s: seconds until it is woken or started again; for a failover, seconds of writes that are lost.
    """

    at_s: float
    action: str
    node: int = -1
    process: str = ""
    length_s: float = 0.0

    def __str__(self) -> str:
        target = f" {self.process}@{self.node}" if self.node >= 0 else ""
        return f"{self.at_s:.2f}s {self.action}{target} {self.length_s:.2f}s"


@dataclass(frozen=True)
class Asked:
    """A request of a slice: when it begins, the node that is asked first, and its body."""

    at_s: float
    node: int
    body: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """One slice.

    Attributes:
        faults: index of a node -> the value of FD_FAULT that it is started with.
    """

    seed: int
    requests: list[Asked]
    events: list[Event]
    faults: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        faults = [f"{fault}@{node}" for node, fault in self.faults.items()]
        return ", ".join([*map(str, self.events), *faults])


def draw_cluster(cluster_seed: int) -> tuple[Shape, str]:
    """Return shape and persistence of the cluster that runs some slices one after the other."""
    draw = random.Random(f"cluster {cluster_seed}")
    return SHAPES[cluster_seed % len(SHAPES)], draw.choice(list(PERSISTENCE))


def draw_plan(seed: int, shape: Shape, is_last: bool = False, is_real: bool = False) -> Plan:
    """Draw one slice.

    Args:
        is_last: no other slice follows on this cluster, so that Redis may die for good.
        is_real: the nodes have the real engine, whose code has more fault points.
    """
    draw = random.Random(f"slice {seed}")
    num_nodes = len(shape.roles)
    requests = [
        Asked(draw.random() * REQUESTS_WITHIN_S, draw.randrange(num_nodes), draw_body(draw, f"s{seed}-{number}"))
        for number in range(NUM_REQUESTS)
    ]
    events = [_draw_event(draw, num_nodes) for _ in range(draw.choice([1, 2, 3, 4, 5]))]
    faults = {}
    if draw.random() < 0.4:
        faults[draw.randrange(num_nodes)] = _draw_fault(draw, is_real)
    if is_last and draw.random() < 0.5:
        events.append(Event(draw.random() * EVENTS_WITHIN_S, DEAD_FOR_GOOD))
    return Plan(seed, requests, sorted(events, key=lambda event: event.at_s), faults)


def _draw_event(draw: random.Random, num_nodes: int) -> Event:
    at_s, node = draw.random() * EVENTS_WITHIN_S, draw.randrange(num_nodes)
    kind = draw.random()
    if kind < 0.3:
        return Event(at_s, draw.choice(ON_REDIS), length_s=draw.choice([0.05, 0.3, 1.0, 2.0]))
    if kind < 0.4:
        return Event(at_s, "restart", node, "all")
    action = draw.choice(["kill", "stop", "stop"])
    return Event(at_s, action, node, draw.choice(["all", "engine", "agent", "api"]), draw.choice([0.1, 0.5, 1.2, 2.5]))


def _draw_fault(draw: random.Random, is_real: bool) -> str:
    points = [point for point, place in POINTS.items() if _is_reached(point, place, is_real)]
    action = draw.choice(["kill", "kill", "stop", f"delay={draw.choice([0.2, 1.5])}"])
    return f"{draw.choice(points)}:{action}+{draw.choice([0, 1, 5, 20])}"


def _is_reached(point: str, place: str, is_real: bool) -> bool:
    process = place.partition(":")[0]
    if process == "engine":
        return is_real and point in ENGINE_POINTS
    return process == "agent" or point in ("build", "detokenise") or process == "owner"
