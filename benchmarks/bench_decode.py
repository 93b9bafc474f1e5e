# SPDX-License-Identifier: Apache-2.0
"""Decoding and verification steps of a model's shape, in every format, against the least time they need.

    python -m benchmarks.bench_decode [--quantization none w8a8] [--context 128 2048] [--rows 1 8 16] [--rounds 6]
        [--kv-cache-dtype int8]

A step of M rows is either M requests (`requests`) or one request that verifies M - 1 drafts (`drafts`). `floor` is
max(bytes of weights, keys and values / bandwidth, operations / peak of the format's arithmetic), from readings before
and after each group of steps; `time/floor` its median over groups, where cases take turns. `times one` is tokens per
second over those of one row of the same format and context (of one request: rows verified over one).

The engine itself steps here. Prompts are taken as computed (benchmarks/shape_engine.py) and drafts are all rejected.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from typing import Any

from benchmarks.report import print_json, print_table
from benchmarks.roofline import Roofline, add_clock_flag, make_roofline
from benchmarks.shape_engine import ShapeEngine, StepShape, add_shape_flags
from fastdeploy.config.model_config import KV_CACHE_DTYPES

STEPS_PER_GROUP = 4
WARM_STEPS = 1  # the first step after a change of shape pays for cold code


@dataclass
class Case:
    """One shape of steps, and what its groups took."""

    step: StepShape
    step_s: list[float] = field(default_factory=list)
    over_floor: list[float] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """How its rows come together."""
        return "drafts" if self.step.rows_each > 1 else "requests"


def make_cases(contexts: list[int], rows: list[int]) -> list[Case]:
    """Return requests of one row, and one request with drafts, of every number of rows."""
    shapes = [
        step
        for context in contexts
        for m in rows
        for step in (StepShape(m, 1, context), *([StepShape(1, m, context)] if m > 1 else []))
    ]
    return [Case(step) for step in shapes]


def time_group(loaded: ShapeEngine, case: Case, roofline: Roofline) -> None:
    """Run a group of steps between two readings and note time and ratio."""
    ids = loaded.start(case.step, WARM_STEPS + STEPS_PER_GROUP)
    for _ in range(WARM_STEPS):
        loaded.engine.step()
    before = roofline.measure()
    begin = roofline.clock()
    for _ in range(STEPS_PER_GROUP):
        loaded.engine.step()
    seconds = (roofline.clock() - begin) / STEPS_PER_GROUP
    after = roofline.measure()
    loaded.stop(ids)
    floor_s = (loaded.work.floor_s(case.step, before) + loaded.work.floor_s(case.step, after)) / 2
    case.step_s.append(seconds)
    case.over_floor.append(seconds / floor_s)


def measure(args: argparse.Namespace, quantization: str, roofline: Roofline) -> list[dict[str, Any]]:
    """Measure all cases of one format, in turns; return their rows of the table."""
    loaded = ShapeEngine.load(
        args.shape,
        quantization,
        max_num_seqs=max(args.rows),
        max_model_len=max(args.context) + 2 * max(args.rows) + STEPS_PER_GROUP,
        max_drafts=max(args.rows) - 1,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    loaded.skip_prompts()
    cases = make_cases(args.context, args.rows)
    for _ in range(args.rounds):
        for case in cases:
            time_group(loaded, case, roofline)
    return [describe(case, cases, loaded, roofline) for case in cases]


def describe(case: Case, cases: list[Case], loaded: ShapeEngine, roofline: Roofline) -> dict[str, Any]:
    """Return a case's medians."""
    step, work, step_s = case.step, loaded.work, statistics.median(case.step_s)
    bf16, int8 = work.operations(step, step.rows)
    bytes_s = work.num_bytes(step) / roofline.median.bytes_per_s
    one = next((c for c in cases if c.step == StepShape(1, 1, step.context)), None)
    return {
        "format": work.quantization,
        "context": step.context,
        "rows": step.rows,
        "as": case.kind,
        "step_ms": 1e3 * step_s,
        "rows_per_s": step.rows / step_s,
        "read_gb": work.num_bytes(step) / 1e9,
        "gop": (bf16 + int8) / 1e9,
        "floor": "bytes" if bytes_s >= roofline.median.floor_s(0, bf16, int8) else "operations",
        "time_over_floor": statistics.median(case.over_floor),
        "best": min(case.over_floor),
        "times_one": statistics.median(a / b for a, b in zip(one.step_s, case.step_s)) * step.rows if one else None,
    }


def main() -> None:
    """Print one row per format, context, number of rows and kind, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_flags(parser)
    add_clock_flag(parser)
    parser.add_argument("--context", type=int, nargs="+", default=[128, 2048])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16], help="up to 17")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="(default: auto)")
    parser.add_argument("--rounds", type=int, default=6, help=f"groups of {STEPS_PER_GROUP} steps of every case")
    args = parser.parse_args()
    if not all(1 <= rows <= 17 for rows in args.rows):
        parser.error(f"--rows: expected 1 to 17, got {args.rows}")
    roofline = make_roofline(parser, args)
    results = [row for quantization in args.quantization for row in measure(args, quantization, roofline)]
    print_table(f"{args.shape}: {roofline.median}", list(results[0]), [list(row.values()) for row in results])
    print_json(
        {
            "benchmark": "decode",
            "shape": args.shape,
            "kv_cache_dtype": args.kv_cache_dtype,
            "roofline": roofline.describe(),
            "results": results,
        }
    )


if __name__ == "__main__":
    main()
