# SPDX-License-Identifier: Apache-2.0
"""The metrics that /metrics shows: requests and HTTP responses of all API processes, and the engine's counters.

Several API processes store their values in memory-mapped files of one folder, the multiprocess mode of
prometheus_client, which PROMETHEUS_MULTIPROC_DIR switches on. The process that answers /metrics adds them up. The files
of a process that has ended remain, so that counters never decrease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from fastdeploy.core.stats import EngineStats
from fastdeploy.metrics.engine_collector import EngineCollector
from fastdeploy.metrics.request_record import PREFIX, RequestRecorder

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_HTTP_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class ServerMetrics:
    """The metrics of one API process and, with a folder, of all API processes.

    Attributes:
        registry: the metrics that /metrics shows.
        requests: records requests.
        http: records HTTP responses.
        inside: number of requests in this process.
    """

    def __init__(
        self,
        read_stats: Callable[[], EngineStats],
        read_description: Callable[[], Mapping[str, Any]],
        folder: str = "",
        json_lines: bool = False,
    ) -> None:
        """Register all metrics.

        Args:
            read_stats, read_description: return the engine's latest counters, and its description.
            folder: shared by several API processes; empty for a single process.
            json_lines: whether log lines of requests are JSON documents.
        """
        own = CollectorRegistry()
        self.requests = RequestRecorder(own, json_lines)
        self.http = HttpMetrics(own)
        self.inside = Gauge(
            PREFIX + "num_requests_inside", "Requests in the API processes", registry=own, multiprocess_mode="livesum"
        )
        self._merged = _Merged(folder, own) if folder else None
        self.registry = CollectorRegistry() if self._merged else own
        if self._merged:
            self.registry.register(self._merged)
        self.registry.register(EngineCollector(read_stats, read_description))

    def num_inside(self) -> int:
        """Return the number of requests in all API processes."""
        name = PREFIX + "num_requests_inside"
        source = self._merged.collect() if self._merged else self.inside.collect()
        return int(sum(sample.value for family in source if family.name == name for sample in family.samples))


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
