# SPDX-License-Identifier: Apache-2.0
"""Results of benchmarks: statistics, goodput, the table on the terminal, the JSON line and a plot of latencies."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastdeploy.core.errors import ConfigError
from fastdeploy.version import __version__

GOODPUT_METRICS = ("ttft", "tpot", "e2el")
PANEL_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}


@dataclass
class RequestResult:
    """The measurements of one request. Times are in seconds.

    Attributes:
        ttft_s: from sending to the first event with text.
        gaps_s: between consecutive events with text; one event may contain several tokens.
        e2e_s: from sending to the end of the answer.
        error: why the request failed; empty if it succeeded.
    """

    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    e2e_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None for a single token."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def latencies_ms(results: Sequence[RequestResult]) -> dict[str, list[float]]:
    """Return metric -> milliseconds, over the requests that succeeded."""
    succeeded = [result for result in results if not result.error]
    return {
        "ttft": [1e3 * r.ttft_s for r in succeeded],
        "tpot": [1e3 * r.tpot_s for r in succeeded if r.tpot_s is not None],
        "itl": [1e3 * gap for r in succeeded for gap in r.gaps_s],
        "e2el": [1e3 * r.e2e_s for r in succeeded],
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated linearly between neighbouring values."""
    ordered = sorted(values)
    index = (len(ordered) - 1) * percent / 100
    low = int(index)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (index - low)


def summarize(name: str, unit: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Return mean, median, standard deviation and percentiles under vLLM's names; empty without values."""
    if not values:
        return {}
    metrics = {
        f"mean_{name}{unit}": statistics.fmean(values),
        f"median_{name}{unit}": statistics.median(values),
        f"std_{name}{unit}": statistics.pstdev(values),
    }
    return metrics | {f"p{percent:g}_{name}{unit}": percentile(values, percent) for percent in percentiles}


def parse_goodput_limit(text: str) -> tuple[str, float]:
    """Return (metric, milliseconds) from a service level objective such as "ttft:500"."""
    name, _, value = text.partition(":")
    try:
        limit = float(value)
    except ValueError:
        limit = 0.0
    if name not in GOODPUT_METRICS or not limit > 0:
        metrics = ", ".join(GOODPUT_METRICS)
        raise argparse.ArgumentTypeError(f"expected METRIC:MILLISECONDS with one of {metrics}, got {text!r}")
    return name, limit


def meets_limits(result: RequestResult, limits_ms: Mapping[str, float]) -> bool:
    """Return whether a request succeeded within every limit; one with a single token meets any limit of tpot."""
    times_s = {"ttft": result.ttft_s, "tpot": result.tpot_s or 0.0, "e2el": result.e2e_s}
    return not result.error and all(1e3 * times_s[name] <= limit for name, limit in limits_ms.items())


def goodput(results: Sequence[RequestResult], limits_ms: Mapping[str, float], duration_s: float) -> dict[str, float]:
    """Return number and rate of the requests that met all limits; empty without limits."""
    if not limits_ms:
        return {}
    num_good = sum(meets_limits(result, limits_ms) for result in results)
    return {"num_good": num_good, "request_goodput": num_good / duration_s}


def describe_machine() -> dict[str, Any]:
    """Return the versions of this package and Python, and the processor."""
    processor = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    return {"fastdeploy": __version__, "python": platform.python_version(), "processor": processor}


def print_metrics(title: str, metrics: Mapping[str, Any]) -> None:
    """Print one line per number."""
    print(f"\n{title}")
    for name, value in metrics.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            print(f"  {name:<28} {f'{value:.4g}' if isinstance(value, float) else value:>12}")


def print_json(metrics: Mapping[str, Any], file: str | None = None) -> None:
    """Print everything as one JSON line, and write it to `file` if one is given.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps({"machine": describe_machine(), **metrics})
    if file:
        try:
            Path(file).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError("--output-json", f"cannot write {file!r}: {error.strerror}") from None
    print(text)


def require_matplotlib() -> Any:
    """Return matplotlib's Figure.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot", "requires matplotlib: pip install 'fastdeploy[bench]'") from None
    return Figure


def plot_latencies(
    file: str, title: str, runs: Mapping[str, Mapping[str, Sequence[float]]], limits_ms: Mapping[str, float]
) -> None:
    """Write the cumulative distribution of each latency as a PNG with one panel per metric.

    Args:
        file: path of the PNG.
        title: heading above the panels.
        runs: label -> metric (a key of PANEL_TITLES) -> milliseconds; a panel without values stays empty.
        limits_ms: metric -> milliseconds, drawn as vertical lines.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    figure = require_matplotlib()(figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    for axes, (metric, panel_title) in zip(figure.subplots(2, 2).flat, PANEL_TITLES.items()):
        for label, values in runs.items():
            ordered = sorted(values.get(metric, ()))
            axes.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], label=label)
        if metric in limits_ms:
            axes.axvline(limits_ms[metric], color="grey", linestyle="--")
        axes.set(title=f"{metric}: {panel_title}", xlabel="ms", ylabel="fraction of requests", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    if len(runs) > 1:
        axes.legend()
    try:
        figure.savefig(file, format="png", dpi=110)
    except OSError as error:
        raise ConfigError("--plot", f"cannot write {file!r}: {error.strerror}") from None
