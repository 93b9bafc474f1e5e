# SPDX-License-Identifier: Apache-2.0
"""Metrics by API key: its tokens, its sequences that run and wait, and how long they waited.

The label `client` is the name of a key. Its values are the names that the operator has configured, so no client can add
series: there is one of each gauge and counter per key, and of the histogram one per key and bucket. Addresses, of which
there may be any number, are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fastdeploy.core.stats import ClientLoad, EngineStats
from fastdeploy.metrics.engine_collector import PREFIX

SEQUENCES_WAITING = "client_num_sequences_waiting"
_QUEUE_S = (0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # few, as there are as many per key


class ClientMetrics:
    """Counts of the requests of each API key in an API process; other names than those of keys are ignored."""

    def __init__(self, registry: CollectorRegistry, names: Sequence[str]) -> None:
        """Register the metrics, with the names of all keys."""
        labels = ["client"]
        prompt = Counter(
            PREFIX + "client_prompt_tokens", "Prompt tokens, by name of the API key", labels, registry=registry
        )
        generation = Counter(
            PREFIX + "client_generation_tokens", "Output tokens, by name of the API key", labels, registry=registry
        )
        queue = Histogram(
            PREFIX + "client_request_queue_time_seconds",
            "Time from arrival to the first step, by name of the API key",
            labels,
            buckets=_QUEUE_S,
            registry=registry,
        )
        waiting = Gauge(
            PREFIX + SEQUENCES_WAITING,
            "Sequences that wait for --max-concurrency, by name of the API key",
            labels,
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._counters = {name: (prompt.labels(name), generation.labels(name)) for name in names}
        self._queue = {name: queue.labels(name) for name in names}
        self._waiting = {name: waiting.labels(name) for name in names}
        self.waiting = waiting

    def count(self, name: str, num_prompt_tokens: int, num_generation_tokens: int) -> None:
        """Count the tokens of a request that has ended."""
        if (counters := self._counters.get(name)) is not None:
            counters[0].inc(num_prompt_tokens)
            counters[1].inc(num_generation_tokens)

    def observe_queue(self, name: str, queue_s: float) -> None:
        """Observe how long a choice waited for its first step."""
        if (histogram := self._queue.get(name)) is not None:
            histogram.observe(queue_s)

    def change_waiting(self, name: str, change: int) -> None:
        """Count sequences that begin, or with a negative number cease, to wait for --max-concurrency."""
        if (gauge := self._waiting.get(name)) is not None:
            gauge.inc(change)


class ClientLoadCollector(Collector):
    """Yields the sequences of each API key in the engine, zeros included."""

    def __init__(self, read_stats: Callable[[], EngineStats], names: Sequence[str]) -> None:
        """Read counters from `read_stats`; sequences of other names, which other nodes may send, are not shown."""
        self._read_stats = read_stats
        self._names = names

    def collect(self) -> Iterator[Metric]:
        """Yield one family per metric."""
        running = GaugeMetricFamily(
            PREFIX + "client_num_requests_running", "Requests in the batch, by name of the API key", labels=["client"]
        )
        waiting = GaugeMetricFamily(
            PREFIX + "client_num_requests_waiting",
            "Requests that wait to be scheduled, by name of the API key",
            labels=["client"],
        )
        loads = self._read_stats().clients
        for name in self._names:
            load = loads.get(name, ClientLoad())
            running.add_metric([name], load.num_running)
            waiting.add_metric([name], load.num_waiting)
        yield running
        yield waiting
