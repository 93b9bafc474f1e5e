# SPDX-License-Identifier: Apache-2.0
"""What every benchmark prints around its figures: the machine and versions before, one JSON line after."""

from __future__ import annotations

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


def environment() -> dict[str, Any]:
    """Return processor, instruction-set path, commit, versions and the command that is running."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "processor": _processor(),
        "isa": library.isa(),
        "commit": commit.stdout.strip() or "unknown",
        "fastdeploy": __version__,
        "python": platform.python_version(),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
    }


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows under a title, numbers to three significant places."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
    print(f"\n{title}")
    for line in [list(columns), *cells]:
        print("  " + "  ".join(text.rjust(width) for text, width in zip(line, widths)))


def print_json(result: Mapping[str, Any]) -> None:
    """Print the last line: everything as one JSON document."""
    print(json.dumps({"environment": environment(), **result}))


def _cell(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
