# SPDX-License-Identifier: Apache-2.0
"""Distributions of latencies as a PNG. matplotlib comes with the extra `bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastdeploy.core.errors import ConfigError

TITLES = {
    "ttft": "time to first token",
    "tpot": "time per further token",
    "itl": "between pieces of an answer",
    "e2el": "whole request",
}


def require_matplotlib() -> Any:
    """Return matplotlib's Figure.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot", "needs matplotlib: pip install 'fastdeploy[bench]'") from None
    return Figure


def plot_latencies(
    file: str, title: str, runs: Mapping[str, Mapping[str, Sequence[float]]], limits: Mapping[str, float]
) -> None:
    """Write one panel per metric: for every run the share of requests that took at most so long.

    Args:
        file: path of the PNG.
        title: above all panels.
        runs: by label and metric (a key of TITLES), milliseconds; a panel without values stays empty.
        limits: by metric, milliseconds at which a line is drawn.

    Raises:
        ConfigError: matplotlib is not installed; the file cannot be written.
    """
    figure = require_matplotlib()(figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    for axes, (metric, words) in zip(figure.subplots(2, 2).flat, TITLES.items()):
        for label, values in runs.items():
            ordered = sorted(values.get(metric, ()))
            axes.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], label=label)
        if metric in limits:
            axes.axvline(limits[metric], color="grey", linestyle="--")
        axes.set(title=f"{metric}: {words}", xlabel="ms", ylabel="share", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    if len(runs) > 1:
        axes.legend()
    try:
        figure.savefig(file, format="png", dpi=110)
    except OSError as error:
        raise ConfigError("--plot", f"cannot write {file!r}: {error.strerror}") from None
