# SPDX-License-Identifier: Apache-2.0
"""The metrics that /metrics shows: requests and HTTP responses of all API processes, and the engine's counters.

Several API processes store their values in memory-mapped files of one folder, the multiprocess mode of
prometheus_client, which PROMETHEUS_MULTIPROC_DIR switches on. The process that answers /metrics adds them up. The files
of a process that has ended remain, so that counters never decrease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from fastdeploy.core.stats import EngineStats
from fastdeploy.metrics.client_metrics import SEQUENCES_WAITING, ClientLoadCollector, ClientMetrics
from fastdeploy.metrics.cluster_collector import ClusterCollector
from fastdeploy.metrics.cluster_metrics import ClusterMetrics
from fastdeploy.metrics.dashboard_labels import DashboardLabels
from fastdeploy.metrics.engine_collector import EngineCollector
from fastdeploy.metrics.refusals import RefusalRecorder
from fastdeploy.metrics.request_record import PREFIX, RequestRecorder

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_HTTP_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class ServerMetrics:
    """The metrics of one API process and, with a folder, of all API processes.

    Attributes:
        registry: the metrics that /metrics shows.
        requests: records requests.
        http: records HTTP responses.
        clients: counts by API key.
        refusals: records refused requests.
        cluster: counts what happens to requests among nodes; None on a server that works alone.
        inside: number of requests in this process.
        sequences_inside: number of their sequences.
    """

    def __init__(
        self,
        read_stats: Callable[[], EngineStats],
        read_description: Callable[[], Mapping[str, Any]],
        folder: str = "",
        json_lines: bool = False,
        client_names: Sequence[str] = (),
        is_clustered: bool = False,
        model_name: str = "",
    ) -> None:
        """Register all metrics.

        Args:
            read_stats, read_description: return the engine's latest counters, and its description.
            folder: shared by several API processes; empty for a single process.
            json_lines: whether log lines of requests are JSON documents.
            client_names: names of the API keys.
            is_clustered: whether this node works with others.
            model_name: name of the model in requests.
        """
        own = CollectorRegistry()
        self.clients = ClientMetrics(own, client_names)
        self.requests = RequestRecorder(own, json_lines, self.clients)
        self.http = HttpMetrics(own)
        self.refusals = RefusalRecorder(own)
        self.sequences_inside = Gauge(
            PREFIX + "num_sequences_inside",
            "Sequences (prompts times n) of the requests in the API processes",
            registry=own,
            multiprocess_mode="livesum",
        )
        self.inside = Gauge(
            PREFIX + "num_requests_inside", "Requests in the API processes", registry=own, multiprocess_mode="livesum"
        )
        self.cluster = ClusterMetrics(own) if is_clustered else None
        self._merged = _Merged(folder, own) if folder else None
        processes: Collector = self._merged or own
        if is_clustered:
            processes = ClusterCollector(processes, read_stats)
        sources = [
            processes,
            EngineCollector(read_stats, read_description),
            ClientLoadCollector(read_stats, client_names),
        ]
        if not folder:
            ProcessCollector(registry=own)  # of several API processes, there is no sum of these
        self.registry = CollectorRegistry()
        self.registry.register(DashboardLabels(sources, model_name))

    def num_inside(self) -> int:
        """Return the number of requests in all API processes."""
        return int(sum(sample.value for sample in self._samples(self.inside, "num_requests_inside")))

    def num_sequences_inside(self) -> int:
        """Return the number of their sequences."""
        return int(sum(sample.value for sample in self._samples(self.sequences_inside, "num_sequences_inside")))

    def sequences_waiting(self) -> dict[str, int]:
        """Return the sequences of each API key, by its name, that wait for `--max-concurrency` in all API processes."""
        samples = self._samples(self.clients.waiting, SEQUENCES_WAITING)
        return {sample.labels["client"]: int(sample.value) for sample in samples}

    def _samples(self, gauge: Gauge, name: str) -> list[Sample]:
        """Return the samples of a gauge, with several API processes their sums."""
        source = self._merged.collect() if self._merged else gauge.collect()
        return [sample for family in source if family.name == PREFIX + name for sample in family.samples]


class HttpMetrics:
    """Counts and durations of HTTP responses, with the names that FastDeploy's dashboards use."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._responses = Counter(
            "http_requests", "HTTP responses", ["method", "path", "status_code"], registry=registry
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Time from a request to the end of its response",
            ["method", "path"],
            buckets=_HTTP_S,
            registry=registry,
        )

    def observe(self, method: str, path: str, status: int, seconds: float) -> None:
        """Record a finished response; `path` must be one of a bounded set."""
        self._responses.labels(method, path, str(status)).inc()
        self._seconds.labels(method, path).observe(seconds)


class _Merged(Collector):
    """Adds up the files in a folder; the files have no help texts, which come from this process' own registry."""

    def __init__(self, folder: str, own: CollectorRegistry) -> None:
        self._folder = folder
        self._texts = {family.name: family.documentation for family in own.collect()}

    def collect(self) -> Iterator[Metric]:
        for family in MultiProcessCollector(None, self._folder).collect():
            family.documentation = self._texts.get(family.name, family.documentation)
            yield family
