# SPDX-License-Identifier: Apache-2.0
"""`fastdeploy bench`: benchmarks of a running server (serve) and of the engine alone (latency, throughput)."""

from __future__ import annotations

from fastdeploy.entrypoints.cli.parser import run_subcommand

USAGE = """usage: fastdeploy bench COMMAND [flags]

  serve         send requests to a running OpenAI-compatible server; report latencies and throughput
  latency       time the engine alone on batches of equal requests
  throughput    measure the tokens per second of the engine alone on many requests

fastdeploy bench COMMAND --help lists the flags. The last line of the output is one JSON document.
"""
COMMANDS = {
    "serve": "fastdeploy.entrypoints.cli.bench.serve:main",
    "latency": "fastdeploy.entrypoints.cli.bench.offline:bench_latency",
    "throughput": "fastdeploy.entrypoints.cli.bench.offline:bench_throughput",
}


def main(arguments: list[str]) -> int:
    """Run a benchmark; return the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    return run_subcommand("bench ", COMMANDS, arguments)
