# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of measured figures from docs/results/data.

    python scripts/make_result_tables.py [NAME OUTPUT ...]

A page shows the file NAME.json of that folder between the marks `<!-- table: NAME -->` and `<!-- end of table -->`.
With arguments, NAME.json is first written from the outputs of a benchmark, whose last lines are JSON documents. Several
outputs are runs of one commit and machine that differ in their option --quantization. `fastdeploy check-device --bench`
counts as a benchmark.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "results" / "data"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "results").glob("*.md")))
SECTION = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
JOBS = ("decode-128", "decode-2048", "verify-2", "verify-4", "prefill-512", "prefill-2048", "streams-16")
SPLITWISE_COLUMNS = {
    "copies": [("export", "export over memcpy", 2), ("import", "import over memcpy", 2)],
    "latency": [
        ("ttft_ratio", "time to the first token over one node", 2),
        ("second_token", "first to second token beyond a step, over the prefill", 3),
    ],
    "processor": [("share", "owner, agent and Redis over the engines", 3)],
    "redis": [("commands_per_request", "commands per request", 1), ("bytes_per_token", "bytes per token", 0)],
    "prefixes": [("ratio", "prefix hits of two nodes over one", 2)],
}
"""Part of `bench_splitwise` -> key, label and digits of what is shown."""
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
    rows = [row for row in rows if row["method"] not in ("naive", "naive again")]
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


def peers_table(rows: Sequence[Row], data: Path = DATA) -> str:
    """Return ratios of tokens per second, this engine's over a peer's, and what both formats lose of a real model."""
    ratios = [row for row in rows if row["over"] != "tokens/s"]
    jobs = [job for job in JOBS if any(row.get(job) is not None for row in ratios)]
    losses = _losses(data)
    lines = [
        [
            row["engine"],
            losses.get(row["engine"], ""),
            row["over"],
            losses.get(row["over"].lower(), ""),
            *("" if row[job] is None else f"{row[job]:.2f}" for job in jobs),
        ]
        for row in ratios
    ]
    return _table(["FastDeploy", "loses", "over", "loses", *jobs], lines)


def files_table(rows: Sequence[Row]) -> str:
    """Return ratios of tokens per second, this engine's over llama.cpp's with the same GGUF file."""
    ratios = [row for row in rows if row["over"] != "tokens/s"]
    jobs = [job for job in JOBS if any(row.get(job) is not None for row in ratios)]
    lines = []
    for row in ratios:
        file = row["over"].removeprefix("llama.cpp ").partition(",")[0].upper()
        engine = row["engine"].removeprefix("FastDeploy ").partition(",")[0]
        inputs = "8 bits" if "a8" in engine else "16 bits"
        lines.append([file, inputs, *("" if row[job] is None else f"{row[job]:.2f}" for job in jobs)])
    return _table(["file", "inputs", *jobs], lines)


def chats_table(rows: Sequence[Row]) -> str:
    """Return speed-ups over plain decoding and tokens per step; a row per kind of conversation, a column per method."""
    methods = [name for name in dict.fromkeys(row["method"] for row in rows) if name != "naive"]
    keys = ("workload", "temperature", "batch")
    lines = []
    for case in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        found = {row["method"]: row for row in rows if tuple(row[key] for key in keys) == case}
        lines.append([case[0].removeprefix("chat-"), *case[1:], *(_speed_up(found.get(name)) for name in methods)])
    return _table(["conversation", *keys[1:], *methods], lines)


def _speed_up(row: Row | None) -> str:
    """Return a speed-up with its error and, of a method that drafts, the tokens per step; nothing for no row."""
    if row is None:
        return ""
    length = row["mean_acceptance_length"]
    return f"{row['speed_up']:.2f} ± {row['error']:.2f}" + (f" ({length:.1f})" if length > 1 else "")


def _losses(data: Path) -> dict[str, str]:
    """Return the change of SmolLM2's perplexity by the formats of both engines, as they are named in comparisons."""
    rows = json.loads((data / "quality-smollm2.json").read_text())["results"]
    losses = {row["format"].lower(): f"{row['worse_%']:+.1f} %" for row in rows}
    return losses | {"none": losses["bf16"], "llama.cpp bf16": "0 %"}


def isolation_table(rows: Sequence[Row]) -> str:
    """Return, per attack, what the other client and /health notice of it."""
    lines = [
        [
            row["attack"],
            f"{row['itl_ratio']:.2f}",
            f"{row['ttft_steps']:.1f} ({row['ordinary_steps']:.1f})",
            f"{row['health_s']:.2f}",
        ]
        for row in rows
    ]
    return _table(["attack", "time between tokens", "steps to the first token (ordinary)", "/health, s"], lines)


def quality_table(rows: Sequence[Row]) -> str:
    """Return what each format costs, a row per format."""
    columns = {
        "perplexity": "{:.3f}",
        "worse_%": "{:+.2f} %",
        "change": "{:.3f}",
        "change_99%": "{:.2f}",
        "kl": "{:.4f}",
        "same_token": "{:.3f}",
        "weights_mib": "{:.1f}",
    }
    header = ["perplexity", "over", "mean change", "99 % quantile", "KL", "same token", "weights, MiB"]
    lines = []
    for row in rows:
        cells = [text.format(row[key]) for key, text in columns.items()]
        is_reference = row["format"] == row["over"]
        over = "" if is_reference else f"{cells[1]} {row['over']}"
        lines.append([row["format"], cells[0], over, *([""] * 4 if is_reference else cells[2:-1]), cells[-1]])
    return _table(["format", *header], lines)


def splitwise_table(rows: Sequence[Row]) -> str:
    """Return one line per quantity of each part of the benchmark."""
    lines = []
    for row in rows:
        for name, label, digits in SPLITWISE_COLUMNS[row["part"]]:
            of = row.get("cache") or row.get("scheduler") or ""
            lines.append([row["part"], label, {"auto": "bfloat16"}.get(of, of), f"{row[name]:.{digits}f}"])
    return _table(["part", "quantity", "of", "measured"], lines)


def gpu_host_table(rows: Sequence[Row]) -> str:
    """Return one line per number of requests, with the microseconds of the host for each method."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    host_us = {(row["requests"], row["method"]): f"{row['host_us']:.0f}" for row in rows}
    counts = sorted({row["requests"] for row in rows})
    header = ["requests", *(f"host between two steps, {method}, us" for method in methods)]
    return _table(header, ([count, *(host_us[count, method] for method in methods)] for count in counts))


def device_table(rows: Sequence[Row]) -> str:
    """Return one line per case of `fastdeploy check-device --bench`: its time, and its share of the measured peak."""
    lines = ([row["case"], f"{row['us']:.1f}", f"{row['share_of_peak']:.2f}"] for row in rows)
    return _table(["case", "us", "share of the peak"], lines)


def experts_table(rows: Sequence[Row]) -> str:
    """Return, per format and number of rows, the products over their floor and the router's share."""
    columns = [("experts", 1), ("over_floor", 2), ("router_%", 1)]
    header = ["format", "rows", "experts that have rows", "products over floor", "router, % of the layer's operators"]
    lines = ([row["format"], row["rows"], *(f"{row[key]:.{digits}f}" for key, digits in columns)] for row in rows)
    return _table(header, lines)


TABLES = {
    "decode": decode_table,
    "device": device_table,
    "chats": chats_table,
    "experts": experts_table,
    "files": files_table,
    "gpu_host": gpu_host_table,
    "isolation": isolation_table,
    "speculation": speculation_table,
    "peers": peers_table,
    "quality": quality_table,
    "splitwise": splitwise_table,
}


def section(run: Row) -> str:
    """Return the table of one run, and a line that says where and how it was measured."""
    where = run["environment"]
    version = f"commit {where['commit']}" if "commit" in where else f"operators {where['operator_library']}"
    source = f"Measured on {where['processor']} (path `{where['isa']}`), {version}: `{where['command']}`"
    return f"{TABLES[run['benchmark']](run['results'])}\n\n{source}\n"


def merge_runs(outputs: Sequence[str]) -> Row:
    """Return the JSON document of a benchmark's output; that of several with the quantization of each in its rows.

    Raises:
        ValueError: the outputs come from different machines, commits or benchmarks.
    """
    runs = [_run_of(json.loads(output.splitlines()[-1])) for output in outputs]
    first = runs[0]
    for run in runs[1:]:
        if any(_origin(run)[key] != value for key, value in _origin(first).items()):
            raise ValueError(f"expected runs of {_origin(first)}, got {_origin(run)}")
    if len(runs) == 1:
        return dict(first)
    rows = [{"quantization": run["options"]["quantization"], **row} for run in runs for row in run["results"]]
    command = re.sub(r"(--quantization) \S+", r"\1 FORMAT", first["environment"]["command"])
    return {**first, "environment": {**first["environment"], "command": command}, "results": rows}


def _run_of(document: Row) -> Row:
    """Return the document of a benchmark, or that of `fastdeploy check-device --bench` in the same form."""
    if "benchmark" in document:
        return document
    times, command = document["times"], "fastdeploy check-device --bench"
    where = {"processor": document["device"].partition(",")[0], "isa": document["isa"], "command": command}
    return {
        "benchmark": "device",
        "environment": {**where, "operator_library": document["operator_library"]},
        "copy_bytes_per_s": times["copy_bytes_per_s"],
        "product_ops_per_s": times["product_ops_per_s"],
        "results": [{"case": name, **case} for name, case in times["cases"].items()],
    }


def _origin(run: Row) -> Row:
    return {"benchmark": run["benchmark"], **{key: run["environment"][key] for key in ("processor", "isa", "commit")}}


def write_data(name: str, run: Row, data: Path = DATA) -> None:
    """Write a data file with a line per row, so that changes of a figure can be read."""
    head = {key: value for key, value in run.items() if key != "results"}
    lines = ",\n  ".join(json.dumps(row) for row in run["results"])
    (data / f"{name}.json").write_text(f'{json.dumps(head)[:-1]}, "results": [\n  {lines}\n]}}\n')


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
    if sys.argv[1:]:
        write_data(sys.argv[1], merge_runs([Path(output).read_text() for output in sys.argv[2:]]))
    for path, text in fresh_pages().items():
        path.write_text(text)
