# SPDX-License-Identifier: Apache-2.0
"""The counters of a node's agent and of its engine's transfers as Prometheus metrics; `/metrics` needs no Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from fastdeploy.core.stats import EngineStats, NodeStats
from fastdeploy.metrics.cluster_metrics import ATTEMPTS, REDIS_COMMANDS
from fastdeploy.metrics.engine_collector import PREFIX

OWNER_LOST = "owner_lost"
_DRAINING = "draining"


class ClusterCollector(Collector):
    """Adds the agent's counters to the metrics of the API processes.

    The agent and the API processes both count lost tries and commands to Redis; their sums are shown.
    """

    def __init__(self, processes: Collector, read_stats: Callable[[], EngineStats]) -> None:
        """Read the metrics of the API processes and the latest counters of the engine from these."""
        self._processes = processes
        self._read_stats = read_stats

    def collect(self) -> Iterator[Metric]:
        """Yield one family per metric."""
        stats = self._read_stats()
        node = stats.node or NodeStats()
        for family in self._processes.collect():
            if family.name == ATTEMPTS:
                _add(family, node.num_orphaned, {"reason": OWNER_LOST})
            elif family.name == REDIS_COMMANDS:
                _add(family, node.num_redis_commands, {})
            yield family
        yield from _cluster(node)
        yield from _transfers(node)
        yield from _imports(stats)


def _cluster(node: NodeStats) -> Iterator[Metric]:
    yield _family(
        GaugeMetricFamily,
        "cluster_queue_length",
        "Requests that stand in the shared queue, by stage",
        ["stage"],
        {(stage,): length for stage, length in node.queue_length.items()},
    )
    states = {role: {_DRAINING if role == _DRAINING else "live": count} for role, count in node.nodes.items()}
    yield _family(
        GaugeMetricFamily,
        "cluster_nodes",
        "Live nodes of the group, this one included",
        ["role", "state"],
        _pairs(states),
    )
    redis_up: dict[tuple[str, ...], int] = {(): int(node.is_redis_up)} if node.node else {}  # no agent: nobody knows
    yield _family(GaugeMetricFamily, "cluster_redis_up", "1 while Redis answers this node", [], redis_up)
    resident: dict[tuple[str, ...], int] = {(): node.resident_bytes} if node.node else {}
    yield _family(GaugeMetricFamily, "agent_resident_memory_bytes", "Memory of the agent's process", [], resident)


def _transfers(node: NodeStats) -> Iterator[Metric]:
    yield _family(
        CounterMetricFamily,
        "kv_transfer_bytes",
        "Bytes of KV blocks that came from (in) or went to (out) other nodes",
        ["connector", "direction"],
        _pairs(node.transferred_bytes),
    )
    yield _summary(
        "kv_transfer_seconds",
        "Time of transfers from other nodes",
        ["connector"],
        {(connector,): times for connector, times in node.transfer_s.items()},
    )
    free = node.num_slots - node.num_filling_slots - node.num_leased_slots
    slots = {"free": free, "filling": node.num_filling_slots, "leased": node.num_leased_slots}
    yield _family(
        GaugeMetricFamily,
        "kv_transfer_slots",
        "Slots of this node's arena",
        ["state"],
        {(state,): count for state, count in slots.items()},
    )
    yield _family(
        CounterMetricFamily,
        "kv_transfer_failures",
        "Transfers that failed, by reason; what did not arrive was computed",
        ["connector", "reason"],
        _pairs(node.transfer_failures),
    )
    yield _family(
        CounterMetricFamily,
        "kv_transfer_recomputed_tokens",
        "Tokens of handed-over requests that were computed again, by reason",
        ["reason"],
        {(reason,): count for reason, count in node.recomputed_tokens.items()},
    )
    text = "Time from the decision to hand a request over until its blocks could be fetched"
    yield _summary("handover_seconds", text, [], {(): node.handover_s})


def _imports(stats: EngineStats) -> Iterator[Metric]:
    """Yield what the engine itself counts of the blocks that it copies."""
    name, text = "kv_transfer_imported_tokens", "Tokens whose keys and values came from other nodes"
    yield _family(CounterMetricFamily, name, text, [], {(): stats.num_imported_tokens})
    yield _family(
        CounterMetricFamily,
        "kv_transfer_failed_blocks",
        "KV blocks that did not come from other nodes as they should have, by reason",
        ["reason"],
        {(reason,): count for reason, count in stats.num_failed_blocks.items()},
    )


def _pairs(counts: Mapping[str, Mapping[str, int]]) -> dict[tuple[str, ...], int]:
    return {(outer, inner): count for outer, by_inner in counts.items() for inner, count in by_inner.items()}


def _family(
    make: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    labels: list[str],
    values: Mapping[tuple[str, ...], float],
) -> Metric:
    family = make(PREFIX + name, text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(list(label_values), value)
    return family


def _summary(name: str, text: str, labels: list[str], times: Mapping[tuple[str, ...], tuple[float, int]]) -> Metric:
    family = SummaryMetricFamily(PREFIX + name, text, labels=labels)
    for label_values, (seconds, count) in times.items():
        family.add_metric(list(label_values), count, seconds)
    return family


def _add(family: Metric, value: float, labels: dict[str, str]) -> None:
    """Add to the sample of a counter that has these labels, which may be missing."""
    name = family.name + "_total"
    others = [sample for sample in family.samples if (sample.name, sample.labels) != (name, labels)]
    before = sum(sample.value for sample in family.samples if (sample.name, sample.labels) == (name, labels))
    family.samples = [*others, Sample(name, labels, before + value)]
