# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of measured figures from docs/results/data: python scripts/make_result_tables.py

A file of that folder is the JSON document that a benchmark prints as its last line. A page shows the file NAME.json
between the marks `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "results" / "data"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "results").glob("*.md")))
SECTION = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
JOBS = ("decode-128", "decode-2048", "prefill-512", "prefill-2048", "streams-16")
Row = dict[str, Any]


def decode_table(rows: Sequence[Row]) -> str:
    """Return, per context, the time of a step over its floor and over plain loops; a column per format."""
    formats = list(dict.fromkeys(row["format"] for row in rows))
    lines = []
    for context, num_rows, kind in dict.fromkeys((row["context"], row["rows"], row["as"]) for row in rows):
        found = {
            row["format"]: f"{row['over_floor']:.2f} / {row['over_loops']:.2f}"
            for row in rows
            if (row["context"], row["rows"], row["as"]) == (context, num_rows, kind)
        }
        lines.append([context, num_rows, kind, *(found.get(name, "") for name in formats)])
    return _table(["context", "rows", "as", *formats], lines)


def speculation_table(rows: Sequence[Row]) -> str:
    """Return the speed-up over naive and the conversion; a row per workload and batch, a column per method."""
    rows = [row for row in rows if row["method"] != "naive"]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    keys = [key for key in ("quantization", "workload", "batch") if key in rows[0]]
    lines = []
    for case in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        found = {
            row["method"]: f"{row['speed_up']:.2f} ({row['conversion']:.2f})"
            for row in rows
            if tuple(row[key] for key in keys) == case
        }
        lines.append([*case, *(found.get(name, "") for name in methods)])
    return _table([*keys, *methods], lines)


def peers_table(rows: Sequence[Row]) -> str:
    """Return ratios of tokens per second, this engine's over a peer's."""
    ratios = [row for row in rows if row["over"] != "tokens/s"]
    jobs = [job for job in JOBS if any(row.get(job) is not None for row in ratios)]
    lines = [
        [row["bits"], row["engine"], row["over"], *("" if row[job] is None else f"{row[job]:.2f}" for job in jobs)]
        for row in ratios
    ]
    return _table(["bits", "FastDeploy", "over", *jobs], lines)


TABLES = {"decode": decode_table, "speculation": speculation_table, "peers": peers_table}


def section(run: Row) -> str:
    """Return the table of one run, and a line that says where and how it was measured."""
    made = run["environment"]
    source = f"Measured on {made['processor']} (path `{made['isa']}`), commit {made['commit']}: `{made['command']}`"
    return f"{TABLES[run['benchmark']](run['results'])}\n\n{source}\n"


def fresh_pages(pages: Iterable[Path] = PAGES, data: Path = DATA) -> dict[Path, str]:
    """Return the pages with tables as they should be.

    Raises:
        FileNotFoundError: a page names a table without data.
    """

    def fill(match: re.Match[str]) -> str:
        run = json.loads((data / f"{match[2]}.json").read_text())
        return f"{match[1]}\n{section(run)}\n{match[3]}"

    return {page: SECTION.sub(fill, page.read_text()) for page in pages}


def _table(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)


if __name__ == "__main__":
    for path, text in fresh_pages().items():
        path.write_text(text)
