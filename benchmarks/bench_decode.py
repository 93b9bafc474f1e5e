# SPDX-License-Identifier: Apache-2.0
"""Decoding and verification steps of a model's shape, in every format, against the least time they need.

    python -m benchmarks.bench_decode [--quantization none w8a8] [--context 128 2048] [--rows 1 8 16] [--rounds 6]
        [--kv-cache-dtype int8] [--parts]

A step of M rows is either M requests (`requests`) or one request that verifies M - 1 drafts (`drafts`). Three floors
stand under its time, each measured beside it:

    floor    max(bytes of weights, keys and values / bandwidth, operations / peak of the format's arithmetic), as if
             the whole step could read and multiply at once; from readings before and after each group of steps
    in turn  the same of every linear layer, head and attention by itself, added up: they follow one another
    loops    plain loops in their place, after each group: they load the same memory, expand and multiply it by as
             many rows, do what the format asks of sums (scales of groups, limbs) and nothing else
             (benchmarks/launches.py). `by kernel` names what the kernel does faster

`over_*` are medians over groups of a step's time over that group's floor; cases take turns. What a step takes over
`loops` is what the kernels add (rows, scales of outputs, softmax, outputs), sampling, engine and Python. `times one` is
tokens per second over those of one row of the same format and context (of one request: rows verified over one);
`loops_times_one` is what these loops allow.

`--parts` says where that goes: a further step of every group is timed operator by operator, and a second table holds
for every part of the model, every other operator, and the rest of the engine, what it took, what its loop took (0
for what has none), and `lost`, the difference over the sum of the step's loops.

The engine itself steps here. Prompts are taken as computed (benchmarks/shape_engine.py) and drafts are all rejected.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from typing import Any

from benchmarks.launches import LaunchFloors, capture_replays
from benchmarks.report import print_json, print_table
from benchmarks.roofline import Roofline, add_clock_flag, make_roofline
from benchmarks.shape_engine import ShapeEngine, StepShape, add_shape_flags
from benchmarks.step_parts import REST, Calls, Profile, by_part, part_names, timed_operators
from fastdeploy.config.model_config import KV_CACHE_DTYPES

STEPS_PER_GROUP = 4


@dataclass
class Case:
    """One shape of steps, and what its groups took."""

    step: StepShape
    launches: LaunchFloors
    step_s: list[float] = field(default_factory=list)
    floor_s: list[float] = field(default_factory=list)
    in_turn_s: list[float] = field(default_factory=list)
    parts_s: list[Profile] = field(default_factory=list)  # where --parts asks for them

    @property
    def kind(self) -> str:
        """How its rows come together."""
        return "drafts" if self.step.rows_each > 1 else "requests"


def make_cases(contexts: list[int], rows: list[int], on_thread_time: bool) -> list[Case]:
    """Return requests of one row, and one request with drafts, of every number of rows."""
    shapes = [
        step
        for context in contexts
        for m in rows
        for step in (StepShape(m, 1, context), *([StepShape(1, m, context)] if m > 1 else []))
    ]
    return [Case(step, LaunchFloors(on_thread_time)) for step in shapes]


def time_group(loaded: ShapeEngine, case: Case, roofline: Roofline, parts: bool) -> None:
    """Run a group of steps between two readings, then the loops of its operators; note times and floors."""
    ids = loaded.start(case.step, 3 + STEPS_PER_GROUP)
    loaded.engine.step()  # the first step of a shape pays for cold code
    replays = capture_replays(loaded.engine.step)
    before = roofline.measure()
    begin = roofline.clock()
    for _ in range(STEPS_PER_GROUP):
        loaded.engine.step()
    seconds = (roofline.clock() - begin) / STEPS_PER_GROUP
    after = roofline.measure()
    case.launches.measure(replays)
    if parts:
        case.parts_s.append(time_parts(loaded, case.launches.on_thread_time, roofline))
    loaded.stop(ids)
    case.step_s.append(seconds)
    case.floor_s.append(statistics.mean(loaded.work.floor_s(case.step, reading) for reading in (before, after)))
    case.in_turn_s.append(statistics.mean(case.launches.in_turn_s(reading) for reading in (before, after)))


def time_parts(loaded: ShapeEngine, on_thread_time: bool, roofline: Roofline) -> Profile:
    """Run a step; return the seconds of each of its parts."""
    calls: Calls = []
    begin = roofline.clock()
    with timed_operators(calls, on_thread_time):
        loaded.engine.step()
    seconds = roofline.clock() - begin
    calls.append((REST, seconds - sum(spent for _, spent in calls)))
    return by_part(calls, part_names(loaded.work.config))


def describe_parts(case: Case, loaded: ShapeEngine) -> list[dict[str, Any]]:
    """Return the medians of a case's parts, in the order of what they lose."""
    names = part_names(loaded.work.config)
    loops = [by_part(by_kind.items(), names) for by_kind in case.launches.attainable_by_kind_s()]
    whole_s = statistics.median(case.launches.attainable_s())
    rows = []
    for part in case.parts_s[0]:
        part_s = statistics.median(parts[part] for parts in case.parts_s)
        loop_s = statistics.median(by_kind.get(part, 0.0) for by_kind in loops)
        rows.append({"part": part, "ms": 1e3 * part_s, "loop_ms": 1e3 * loop_s, "lost": (part_s - loop_s) / whole_s})
    return sorted(rows, key=lambda row: -float(row["lost"]))


def measure(args: argparse.Namespace, quantization: str, roofline: Roofline) -> list[dict[str, Any]]:
    """Measure all cases of one format, in turns; return their rows of the table, each with its `parts`."""
    loaded = ShapeEngine.load(
        args.shape,
        quantization,
        max_num_seqs=max(args.rows),
        max_model_len=max(args.context) + 2 * max(args.rows) + STEPS_PER_GROUP + 3,
        max_drafts=max(args.rows) - 1,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    loaded.skip_prompts()
    cases = make_cases(args.context, args.rows, args.clock == "cpu")
    for _ in range(args.rounds):
        for case in cases:
            time_group(loaded, case, roofline, args.parts)
    results = [describe(case, cases, loaded, roofline) for case in cases]
    for case, result in zip(cases, results):
        result["parts"] = describe_parts(case, loaded) if args.parts else []
    return results


def describe(case: Case, cases: list[Case], loaded: ShapeEngine, roofline: Roofline) -> dict[str, Any]:
    """Return a case's medians."""
    step, work, step_s = case.step, loaded.work, statistics.median(case.step_s)
    bf16, int8 = work.operations(step, step.rows)
    bytes_s = work.num_bytes(step) / roofline.median.bytes_per_s
    one = next((c for c in cases if c.step == StepShape(1, 1, step.context)), None)
    floors = {"floor": case.floor_s, "in_turn": case.in_turn_s, "loops": case.launches.attainable_s()}
    over = {name: [a / b for a, b in zip(case.step_s, values, strict=True)] for name, values in floors.items()}
    return {
        "format": work.quantization,
        "context": step.context,
        "rows": step.rows,
        "as": case.kind,
        "read_gb": work.num_bytes(step) / 1e9,
        "gop": (bf16 + int8) / 1e9,
        "limit": "bytes" if bytes_s >= roofline.median.floor_s(0, bf16, int8) else "operations",
        "step_ms": 1e3 * step_s,
        **{f"{name}_ms": 1e3 * statistics.median(values) for name, values in floors.items()},
        **{f"over_{name}": statistics.median(ratios) for name, ratios in over.items()},
        "best_over_floor": min(over["floor"]),
        "times_one": times_one(step.rows, one.step_s, case.step_s) if one else None,
        "loops_times_one": times_one(step.rows, one.launches.attainable_s(), floors["loops"]) if one else None,
        "rows_per_s": step.rows / step_s,
        "by_kernel": ", ".join(case.launches.by_kernel()) or "-",
    }


def times_one(rows: int, one_s: list[float], rows_s: list[float]) -> float:
    """Return how many times the rows per second of steps of one row steps of so many rows compute."""
    return rows * statistics.median(a / b for a, b in zip(one_s, rows_s, strict=True))


def print_parts(results: list[dict[str, Any]]) -> None:
    """Print one row per case and part."""
    case = ("format", "context", "rows", "as")
    rows = [[*(result[key] for key in case), *part.values()] for result in results for part in result["parts"]]
    print_table("where the steps' time goes", [*case, *results[0]["parts"][0]], rows)


def main() -> None:
    """Print one row per format, context, number of rows and kind, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_flags(parser)
    add_clock_flag(parser)
    parser.add_argument("--context", type=int, nargs="+", default=[128, 2048])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16], help="up to 17")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="(default: auto)")
    parser.add_argument("--rounds", type=int, default=6, help=f"groups of {STEPS_PER_GROUP} steps of every case")
    parser.add_argument("--parts", action="store_true", help="also time steps part by part")
    args = parser.parse_args()
    if not all(1 <= rows <= 17 for rows in args.rows):
        parser.error(f"--rows: expected 1 to 17, got {args.rows}")
    roofline = make_roofline(parser, args)
    results = [row for quantization in args.quantization for row in measure(args, quantization, roofline)]
    columns = [column for column in results[0] if column != "parts"]
    print_table(f"{args.shape}: {roofline.median}", columns, [[row[column] for column in columns] for row in results])
    if args.parts:
        print_parts(results)
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
