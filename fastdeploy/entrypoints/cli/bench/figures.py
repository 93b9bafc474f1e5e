# SPDX-License-Identifier: Apache-2.0
"""Means and percentiles, the table on the terminal, and the JSON line that ends every measurement."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastdeploy.core.errors import ConfigError
from fastdeploy.version import __version__


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value below which `percent` of the values lie, between neighbours in proportion."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(name: str, unit: str, values: Sequence[float], percents: Sequence[float]) -> dict[str, float]:
    """Return mean, median, standard deviation and percentiles under their usual names; nothing of no values."""
    if not values:
        return {}
    made = {
        f"mean_{name}{unit}": statistics.fmean(values),
        f"median_{name}{unit}": statistics.median(values),
        f"std_{name}{unit}": statistics.pstdev(values),
    }
    return made | {f"p{percent:g}_{name}{unit}": percentile(values, percent) for percent in percents}


def machine() -> dict[str, Any]:
    """Return what produced the figures: this package's version, Python's, and the processor."""
    processor = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    return {"fastdeploy": __version__, "python": platform.python_version(), "processor": processor}


def print_figures(title: str, figures: Mapping[str, Any]) -> None:
    """Print a line for every number."""
    print(f"\n{title}")
    for name, value in figures.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            print(f"  {name:<28} {f'{value:.4g}' if isinstance(value, float) else value:>12}")


def print_json(figures: Mapping[str, Any], file: str | None = None) -> None:
    """Print everything as one JSON line, and write it to a file if one is named.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps({"machine": machine(), **figures})
    if file:
        try:
            Path(file).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError("--output-json", f"cannot write {file!r}: {error.strerror}") from None
    print(text)


def percent_list(text: str) -> list[float]:
    """Return comma-separated numbers from 0 to 100."""
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"expected numbers from 0 to 100, got {text}")
    return values
