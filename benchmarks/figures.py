# SPDX-License-Identifier: Apache-2.0
"""How do the methods of speculation compare? Charts of the results as small SVG files (requires the extra `bench`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

COLOURS = {
    "naive": "#999999",
    "ngram": "#2e9e5b",
    "suffix": "#1b8fc4",
    "mtp": "#a34fc9",
    "mtp+ngram": "#c98fe0",
    "mtp+suffix": "#6b3fb0",
}
OTHER_COLOUR = "#c77700"
PARTS = {"model_ms": "#7f9fbf", "verify_ms": "#7a5ca8", "draft_ms": "#2e9e5b", "overhead_ms": "#c77700"}
STYLE = {
    "svg.fonttype": "none",  # text stays text: small, and searchable
    "svg.hashsalt": "fastdeploy",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
}


def draw_speculation(rows: Sequence[dict[str, Any]], title: str, folder: Path) -> None:
    """Write speed-up.svg, over batch sizes, and step.svg, the parts of a step at the smallest batch size."""
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        _draw_speed_up(rows, title, folder / "speed-up.svg")
        _draw_step(rows, title, folder / "step.svg")


def _draw_speed_up(rows: Sequence[dict[str, Any]], title: str, file: Path) -> None:
    workloads, batches, methods = (_values(rows, key) for key in ("workload", "batch", "method"))
    methods.remove("naive")
    figure, axes = plt.subplots(
        1, len(workloads), figsize=(2.1 * len(workloads) + 1, 2.8), sharey=True, squeeze=False, layout="constrained"
    )
    width = 0.8 / len(methods)
    for column, (workload, plot) in enumerate(zip(workloads, axes[0])):
        for i, method in enumerate(methods):
            found = {row["batch"]: row for row in rows if (row["workload"], row["method"]) == (workload, method)}
            positions = [n + (i + 0.5) * width - 0.4 for n in range(len(batches))]
            heights = [found[batch]["speed_up"] for batch in batches]
            bars = plot.bar(positions, heights, width * 0.92, color=COLOURS.get(method, OTHER_COLOUR), label=method)
            plot.bar_label(bars, [f"{height:.1f}" for height in heights], fontsize=7)
        plot.axhline(1, color="#999999", linewidth=1)
        plot.set_title(workload, fontsize=9)
        plot.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        plot.set_xlabel("requests at a time")
        if column == 0:
            plot.set_ylabel("tokens/s over naive")
    figure.suptitle(title, fontsize=9)
    _legend(figure, axes[0][0])
    _save(figure, file)


def _draw_step(rows: Sequence[dict[str, Any]], title: str, file: Path) -> None:
    batch = min(_values(rows, "batch"))
    shown = [row for row in rows if row["batch"] == batch][::-1]
    figure, plot = plt.subplots(figsize=(7, 0.24 * len(shown) + 1.2), layout="constrained")
    left = [0.0] * len(shown)
    for part, colour in PARTS.items():
        values = [row[part] for row in shown]
        plot.barh(range(len(shown)), values, left=left, color=colour, label=part.removesuffix("_ms"))
        left = [a + b for a, b in zip(left, values)]
    for y, (row, end) in enumerate(zip(shown, left)):
        plot.text(end, y, f"  {row['mean_acceptance_length']:.1f} tokens", va="center", fontsize=7)
    plot.set_yticks(range(len(shown)), [f"{row['workload']}, {row['method']}" for row in shown])
    plot.set_xlim(0, max(left) * 1.15)
    plot.set_xlabel(
        f"milliseconds per step with {batch} request{'s' if batch > 1 else ''}, and tokens that the step emits"
    )
    figure.suptitle(title, fontsize=9)
    _legend(figure, plot)
    _save(figure, file)


def _legend(figure: Any, plot: Any) -> None:
    figure.legend(*plot.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False, fontsize=8)


def _values(rows: Sequence[dict[str, Any]], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _save(figure: Any, file: Path) -> None:
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
