# SPDX-License-Identifier: Apache-2.0
"""Goodput: the requests that kept every limit that they were given (service level objectives)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from fastdeploy.entrypoints.cli.bench.load import Result

LIMITED = ("ttft", "tpot", "e2el")


def parse_limit(text: str) -> tuple[str, float]:
    """Return (metric, milliseconds) of "ttft:500"."""
    name, _, value = text.partition(":")
    try:
        limit = float(value)
    except ValueError:
        limit = 0.0
    if name not in LIMITED or not limit > 0:
        raise argparse.ArgumentTypeError(f"expected {', '.join(LIMITED)} with milliseconds (ttft:500), got {text!r}")
    return name, limit


def keeps(result: Result, limits: Mapping[str, float]) -> bool:
    """Return whether a request was answered within every limit; a single token has no time per further token."""
    taken_s = {"ttft": result.ttft_s, "tpot": result.tpot_s or 0.0, "e2el": result.e2e_s}
    return not result.error and all(1e3 * taken_s[name] <= limit for name, limit in limits.items())


def goodput(results: Sequence[Result], limits: Mapping[str, float], duration_s: float) -> dict[str, float]:
    """Return the figures of the requests that kept the limits; nothing where there are none."""
    if not limits:
        return {}
    num_good = sum(keeps(result, limits) for result in results)
    return {"num_good": num_good, "request_goodput": num_good / duration_s}
