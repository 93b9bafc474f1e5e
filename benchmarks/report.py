# SPDX-License-Identifier: Apache-2.0
"""What every benchmark shares: its flags' parser, a table of results, and one JSON line that names the machine."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastdeploy import __version__
from fastdeploy.ops.backends.cpu import library

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, Any]


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose --help shows the benchmark's docstring as it is written."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def environment() -> Row:
    """Return processor, instruction-set path, commit, versions and the command that is running."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "processor": _processor(),
        "isa": library.isa(),
        "threads": library.num_threads(),
        "commit": commit.stdout.strip() or "unknown",
        "fastdeploy": __version__,
        "python": platform.python_version(),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
    }


def print_report(benchmark: str, title: str, rows: Sequence[Row], **details: Any) -> None:
    """Print the rows as a table, and as the last line one JSON document with the rows and `details`."""
    print_table(title, rows)
    print_json({"benchmark": benchmark, **details, "results": rows})


def print_table(title: str, rows: Sequence[Row], columns: Sequence[str] = ()) -> None:
    """Print the columns (by default those of the first row) of each row, numbers with three significant digits."""
    columns = columns or list(rows[0])
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
    print(f"\n{title}")
    for line in [list(columns), *cells]:
        print("  " + "  ".join(text.rjust(width) for text, width in zip(line, widths)))


def print_json(result: Mapping[str, Any]) -> None:
    """Print a result with the environment that it was measured in as one line of JSON."""
    print(json.dumps({"environment": environment(), **result}))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
