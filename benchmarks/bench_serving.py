# SPDX-License-Identifier: Apache-2.0
"""How does a server behave under several loads? `fastdeploy bench serve` at each request rate and concurrency.

    python -m benchmarks.bench_serving --base-url http://127.0.0.1:8180 --request-rates 1 2 4 inf --goodput ttft:500 \\
        [--max-concurrencies 16] [--plot serving.png] [flags of fastdeploy bench serve]

Any server of the OpenAI protocol will do. Arrivals are Poisson; the same prompts arrive in the same order at each load.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
import sys

from benchmarks.report import Row, print_json, print_table
from fastdeploy.core.errors import ConfigError
from fastdeploy.entrypoints.cli.bench.report import latencies_ms, plot_latencies, require_matplotlib
from fastdeploy.entrypoints.cli.bench.serve import BenchmarkRun, make_parser, request_rate, run_benchmark
from fastdeploy.entrypoints.cli.http_client import ServerError, UnreachableError
from fastdeploy.entrypoints.cli.parser import positive_int

COLUMNS = ("completed", "failed", "request_throughput", "output_throughput", "request_goodput")


def main(arguments: list[str]) -> int:
    """Print one row per load and one JSON line; return 1 if a request failed."""
    parser = make_parser()
    parser.add_argument(
        "--request-rates", type=request_rate, nargs="+", default=[float("inf")], help="requests per second"
    )
    parser.add_argument("--max-concurrencies", type=positive_int, nargs="+", default=[None], help="requests at a time")
    args = parser.parse_own(arguments)
    if args.plot:
        require_matplotlib()
    runs: dict[str, BenchmarkRun] = {}
    for rate, limit in itertools.product(args.request_rates, args.max_concurrencies):
        label = f"{rate:g}/s" + (f", {limit} at once" if limit else "")
        load = argparse.Namespace(**{**vars(args), "request_rate": rate, "max_concurrency": limit})
        runs[label] = asyncio.run(run_benchmark(load))
    title = next(iter(runs.values())).title
    rows = [_row(label, run) for label, run in runs.items()]
    print_table(title, rows, list(dict.fromkeys(name for row in rows for name in row)))
    if args.plot:
        latencies = {label: latencies_ms(run.results) for label, run in runs.items()}
        plot_latencies(args.plot, title, latencies, dict(args.goodput))
    print_json({"benchmark": "serving", "runs": {label: run.metrics for label, run in runs.items()}})
    return int(any(run.errors for run in runs.values()))


def _row(label: str, run: BenchmarkRun) -> Row:
    """Return what the table shows of a run: rates, then medians and percentiles."""
    latencies = {name: value for name, value in run.metrics.items() if re.match(r"median_|p[\d.]+_", name)}
    return {"load": label, **{name: run.metrics[name] for name in COLUMNS if name in run.metrics}, **latencies}


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (ConfigError, ServerError, UnreachableError) as error:
        sys.exit(f"bench_serving: error: {error}")
