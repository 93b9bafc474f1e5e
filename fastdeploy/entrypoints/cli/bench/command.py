# SPDX-License-Identifier: Apache-2.0
"""`fastdeploy bench WHAT`: chooses the measurement."""

from __future__ import annotations

import importlib

from fastdeploy.core.errors import ConfigError

USAGE = """usage: fastdeploy bench WHAT [flags]

  serve         load on a running server of the OpenAI protocol: times to tokens, throughput
  latency       the engine alone: time of a batch of equal requests
  throughput    the engine alone: tokens per second of many requests

fastdeploy bench WHAT --help lists the flags. The last line of the output is one JSON document.
"""
KINDS = ("serve", "latency", "throughput")


def main(arguments: list[str]) -> int:
    """Run a measurement; return the exit status."""
    what = arguments[0] if arguments else "--help"
    if what in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if what not in KINDS:
        raise ConfigError("fastdeploy bench", f"expected one of {', '.join(KINDS)}, got {what!r}")
    module = importlib.import_module(f"fastdeploy.entrypoints.cli.bench.{what}")
    return int(module.main(arguments[1:]))
