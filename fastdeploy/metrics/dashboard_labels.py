# SPDX-License-Identifier: Apache-2.0
"""Labels and second names that vLLM's dashboards use; they are added when metrics are read, not for each request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from fastdeploy.metrics.engine_collector import PREFIX

ENGINE = "0"  # a server has one engine
SECOND_NAMES = {PREFIX + "time_per_output_token_seconds": PREFIX + "request_time_per_output_token_seconds"}
HTTP_PREFIX = "http_"


class DashboardLabels(Collector):
    """Adds `model_name` and `engine` to the metrics of the engine and of requests, `handler` and `status` to HTTP's."""

    def __init__(self, sources: Sequence[Collector], model_name: str) -> None:
        """Read metrics from `sources`; `model_name` is the name of the model in requests, empty for neither label."""
        self._sources = sources
        self._labels = {"model_name": model_name, "engine": ENGINE} if model_name else {}

    def collect(self) -> Iterator[Metric]:
        """Yield every family of the sources with its labels, and those with a second name twice."""
        for source in self._sources:
            for family in source.collect():
                if family.name.startswith(PREFIX):
                    family.samples = [s._replace(labels={**self._labels, **s.labels}) for s in family.samples]
                elif family.name.startswith(HTTP_PREFIX):
                    family.samples = [_with_http_labels(sample) for sample in family.samples]
                yield family
                if (name := SECOND_NAMES.get(family.name)) is not None:
                    yield _renamed(family, name)


def _with_http_labels(sample: Sample) -> Sample:
    """Add the route as `handler` and the class of the status, such as `2xx`, as `status`."""
    labels = dict(sample.labels)
    if "path" in labels:
        labels["handler"] = labels["path"]
    if "status_code" in labels:
        labels["status"] = labels["status_code"][:1] + "xx"
    return sample._replace(labels=labels)


def _renamed(family: Metric, name: str) -> Metric:
    result = Metric(name, family.documentation, family.type)
    result.samples = [s._replace(name=name + s.name.removeprefix(family.name)) for s in family.samples]
    return result
