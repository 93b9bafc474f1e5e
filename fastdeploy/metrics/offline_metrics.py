# SPDX-License-Identifier: Apache-2.0
"""The metrics of an offline `LLM`, with the names that `/metrics` of a server has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.stats import EngineStats
from fastdeploy.metrics.dashboard_labels import DashboardLabels
from fastdeploy.metrics.engine_collector import EngineCollector
from fastdeploy.metrics.reader import Metric, read_metrics
from fastdeploy.metrics.request_record import RequestRecorder, make_record


class OfflineMetrics:
    """Counts the requests of an `LLM`, and reads the counters of its engine."""

    def __init__(
        self,
        read_stats: Callable[[], EngineStats],
        read_description: Callable[[], Mapping[str, Any]],
        model_name: str,
    ) -> None:
        """Read counters and the engine's description from these functions; `model_name` becomes a label."""
        registry = CollectorRegistry()
        self._recorder = RequestRecorder(registry)
        engine = EngineCollector(read_stats, read_description, is_complete=False)
        self._collector = DashboardLabels([registry, engine], model_name)

    def started(self, request: GenerationRequest) -> None:
        """Count a new request."""
        self._recorder.started(request.params.max_tokens)

    def finished(self, request: GenerationRequest, num_tokens: int, delta: TokenDelta) -> None:
        """Record a choice of a request that has ended, from its last delta and its number of tokens."""
        if delta.metrics is None or delta.finish_reason is None:
            return
        self._recorder.observe(
            make_record(
                request,
                delta.index,
                num_tokens,
                delta.finish_reason,
                delta.metrics,
                delta.speculate_metrics,
            )
        )

    def read(self) -> list[Metric]:
        """Return all metrics as they are now."""
        return read_metrics(self._collector)
