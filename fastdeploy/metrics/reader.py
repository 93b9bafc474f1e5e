# SPDX-License-Identifier: Apache-2.0
"""Metrics as objects, for `LLM.get_metrics`; names, labels and values are those of `/metrics`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_POSITION = "position"


@dataclass
class Metric:
    """A metric with its labels; `name` begins with `fastdeploy:` and has no ending such as `_total`."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """Counters by position in a draft: `values[i]` is that of position i."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A number that grows and shrinks."""

    value: float


@dataclass
class Histogram(Metric):
    """Observed values.

    Attributes:
        count, sum: number and sum of the values.
        buckets: upper bound, as text, -> number of values that are not above it; `+Inf` is the last bound.
    """

    count: int
    sum: float
    buckets: dict[str, int]


def read_metrics(collector: Collector) -> list[Metric]:
    """Return the metrics of a collector as they are now; those of other types are left out."""
    return [metric for family in collector.collect() for metric in _metrics_of(family)]


def _metrics_of(family: Family) -> Iterator[Metric]:
    if family.type == "gauge":
        for sample in family.samples:
            yield Gauge(family.name, sample.labels, float(sample.value))
    elif family.type == "histogram":
        for group in _without_label(family.samples, "le"):
            yield _histogram(family.name, *group)
    elif family.type == "counter":
        totals = [sample for sample in family.samples if sample.name.endswith("_total")]
        if any(_POSITION in sample.labels for sample in totals):
            for labels, samples in _without_label(totals, _POSITION):
                yield Vector(family.name, labels, [int(sample.value) for sample in samples])
        else:
            for sample in totals:
                yield Counter(family.name, sample.labels, int(sample.value))


def _without_label(samples: list[Sample], label: str) -> Iterator[tuple[dict[str, str], list[Sample]]]:
    """Yield the samples that differ in this label only, with their other labels."""
    groups: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in samples:
        key = tuple((name, value) for name, value in sample.labels.items() if name != label)
        groups.setdefault(key, []).append(sample)
    for key, group in groups.items():
        yield dict(key), group


def _histogram(name: str, labels: dict[str, str], samples: list[Sample]) -> Histogram:
    values = {sample.name: sample.value for sample in samples}
    buckets = {s.labels["le"]: int(s.value) for s in samples if "le" in s.labels}
    return Histogram(name, labels, int(values[name + "_count"]), values[name + "_sum"], buckets)
