# SPDX-License-Identifier: Apache-2.0
"""All that /metrics shows: the requests and HTTP answers of every API process, and the engine's counters.

Several API processes keep their values in memory-mapped files of one folder (prometheus_client's multiprocess mode,
which it enters when a process starts with PROMETHEUS_MULTIPROC_DIR set); whichever is asked adds them up. The files of
a process that has ended stay, so that counters never go back.
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
    """The metrics of one API process and, with a folder, of its siblings.

    Attributes:
        registry: what /metrics shows.
        requests: takes the record of every request.
        http: takes the HTTP answers.
        inside: requests that the server works on.
    """

    def __init__(
        self,
        read_stats: Callable[[], EngineStats],
        read_description: Callable[[], Mapping[str, Any]],
        folder: str = "",
        json_lines: bool = False,
    ) -> None:
        """Register everything.

        Args:
            read_stats, read_description: the engine's latest counters, and what it says of itself.
            folder: where several API processes keep their values; empty for one process.
            json_lines: log lines of requests as JSON documents.
        """
        own = CollectorRegistry()
        self.requests = RequestRecorder(own, json_lines)
        self.http = HttpMetrics(own)
        self.inside = Gauge(
            PREFIX + "num_requests_inside", "Requests in the server", registry=own, multiprocess_mode="livesum"
        )
        self._merged = _Merged(folder, own) if folder else None
        self.registry = CollectorRegistry() if self._merged else own
        if self._merged:
            self.registry.register(self._merged)
        self.registry.register(EngineCollector(read_stats, read_description))

    def num_inside(self) -> int:
        """Return the requests inside all API processes."""
        name = PREFIX + "num_requests_inside"
        source = self._merged.collect() if self._merged else self.inside.collect()
        return int(sum(sample.value for family in source if family.name == name for sample in family.samples))


class HttpMetrics:
    """Counts and times of HTTP answers, under the names that FastDeploy's dashboards read."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._answers = Counter("http_requests", "HTTP answers", ["method", "path", "status_code"], registry=registry)
        self._seconds = Histogram(
            "http_request_duration_seconds", "Request to the end of its answer", ["method", "path"], buckets=_HTTP_S,
            registry=registry,
        )  # fmt: skip

    def observe(self, method: str, path: str, status: int, seconds: float) -> None:
        """Take an answer that has ended; `path` must be one of few."""
        self._answers.labels(method, path, str(status)).inc()
        self._seconds.labels(method, path).observe(seconds)


class _Merged(Collector):
    """Adds up the files in a folder; takes the metrics' texts from this process' own, since the files have none."""

    def __init__(self, folder: str, own: CollectorRegistry) -> None:
        self._folder = folder
        self._texts = {family.name: family.documentation for family in own.collect()}

    def collect(self) -> Iterator[Metric]:
        for family in MultiProcessCollector(None, self._folder).collect():
            family.documentation = self._texts.get(family.name, family.documentation)
            yield family
