# SPDX-License-Identifier: Apache-2.0
"""How near is a decoding or verification step to the limits of the machine, in each weight format?

    python -m benchmarks.bench_decode [--quantization none w8a8] [--context 128 2048] [--rows 1 8 16] [--rounds 6]
        [--kv-cache-dtype int8] [--layers N] [--parts]

A step of M rows is either M requests (`requests`) or one request that verifies M - 1 drafts (`drafts`). The baselines
are two lower bounds of its time, measured beside it:

    floor  max(bytes of weights, keys and values / read bandwidth, operations / peak of the format), as if the whole
           step could read and multiply at once; of experts, those that have rows
    loops  plain loops in the operators' place (benchmarks/launches.py); `by_kernel` names the operators whose kernel is
           faster than its loop, where the kernel's time is taken instead

`over_*` are medians of the step's time over the bound, over groups of steps; cases alternate. What `over_loops` leaves
are rows, scales of outputs, softmax, outputs, sampling, engine and Python. `times_one` is tokens per second over those
of one row; `loops_times_one` is what the loops allow.

--parts prints a second table: for each part of the model, each other operator and the rest of the engine, its time, the
time of its loop, and `lost`, the difference over the sum of the step's loops.

The real engine runs the steps. Prefill is skipped (benchmarks/shape_engine.py), and all drafts are rejected.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field

from benchmarks.launches import NO_WORK, LaunchFloors, LaunchWork, capture_replays, total_work
from benchmarks.report import Row, make_parser, print_json, print_table
from benchmarks.roofline import Roofline, add_clock_flag, make_roofline
from benchmarks.shape_engine import ShapeEngine, StepShape, add_shape_flags
from benchmarks.step_parts import Profile, by_part, part_names, time_parts
from fastdeploy.config.model_config import KV_CACHE_DTYPES

STEPS_PER_GROUP = 4


@dataclass
class Case:
    """A shape of steps, and the times of its groups."""

    step: StepShape
    launches: LaunchFloors
    work: LaunchWork = NO_WORK  # of the latest step that was captured
    step_s: list[float] = field(default_factory=list)
    floor_s: list[float] = field(default_factory=list)
    parts_s: list[Profile] = field(default_factory=list)  # with --parts

    @property
    def kind(self) -> str:
        """What the rows of a step are."""
        return "drafts" if self.step.rows_each > 1 else "requests"


def make_cases(contexts: list[int], rows: list[int], on_thread_time: bool) -> list[Case]:
    """Return, for each number of rows, as many requests of one row, and one request with drafts."""
    shapes = [
        step
        for context in contexts
        for m in rows
        for step in (StepShape(m, 1, context), *([StepShape(1, m, context)] if m > 1 else []))
    ]
    return [Case(step, LaunchFloors(on_thread_time)) for step in shapes]


def time_group(loaded: ShapeEngine, case: Case, roofline: Roofline, parts: bool) -> None:
    """Time a group of steps between two readings of the machine, then the loops of its operators."""
    ids = loaded.start(case.step, 3 + STEPS_PER_GROUP)
    loaded.engine.step()  # the first step of a shape finds cold caches
    replays = capture_replays(loaded.engine.step)
    case.work = total_work(replays)
    before = roofline.measure()
    begin = roofline.clock()
    for _ in range(STEPS_PER_GROUP):
        loaded.engine.step()
    case.step_s.append((roofline.clock() - begin) / STEPS_PER_GROUP)
    readings = (before, roofline.measure())
    case.launches.measure(replays)
    if parts:
        case.parts_s.append(time_parts(loaded.engine.step, loaded.model.config, roofline.clock))
    loaded.stop(ids)
    case.floor_s.append(statistics.mean(case.work.floor_s(reading) for reading in readings))


def describe_parts(case: Case, loaded: ShapeEngine) -> list[Row]:
    """Return the medians of a case's parts, the largest loss first."""
    names = part_names(loaded.model.config)
    loops = [by_part(by_kind.items(), names) for by_kind in case.launches.attainable_by_kind_s()]
    whole_s = statistics.median(case.launches.attainable_s())
    rows = []
    for part in case.parts_s[0]:
        part_s = statistics.median(parts[part] for parts in case.parts_s)
        loop_s = statistics.median(by_kind.get(part, 0.0) for by_kind in loops)
        rows.append({"part": part, "ms": 1e3 * part_s, "loop_ms": 1e3 * loop_s, "lost": (part_s - loop_s) / whole_s})
    return sorted(rows, key=lambda row: -float(row["lost"]))


def measure(args: argparse.Namespace, quantization: str, roofline: Roofline) -> list[Row]:
    """Measure all cases of one format in alternation; return their rows of the table, each with its `parts`."""
    loaded = ShapeEngine.load(
        args.shape,
        quantization,
        max_num_seqs=max(args.rows),
        max_model_len=max(args.context) + 2 * max(args.rows) + STEPS_PER_GROUP + 3,
        max_drafts=max(args.rows) - 1,
        kv_cache_dtype=args.kv_cache_dtype,
        layers=args.layers,
    )
    loaded.skip_prefill()
    cases = make_cases(args.context, args.rows, args.clock == "cpu")
    for _ in range(args.rounds):
        for case in cases:
            time_group(loaded, case, roofline, args.parts)
    parts = [describe_parts(case, loaded) if args.parts else [] for case in cases]
    return [{**describe(case, cases, loaded), "parts": of_case} for case, of_case in zip(cases, parts)]


def describe(case: Case, cases: list[Case], loaded: ShapeEngine) -> Row:
    """Return a case's medians."""
    step, step_s = case.step, statistics.median(case.step_s)
    one = next((c for c in cases if c.step == StepShape(1, 1, step.context)), None)
    floors = {"floor": case.floor_s, "loops": case.launches.attainable_s()}
    over = {name: [a / b for a, b in zip(case.step_s, values, strict=True)] for name, values in floors.items()}
    return {
        "format": loaded.model.quantization,
        "context": step.context,
        "rows": step.rows,
        "as": case.kind,
        "read_gb": case.work.num_bytes / 1e9,
        "step_ms": 1e3 * step_s,
        **{f"{name}_ms": 1e3 * statistics.median(values) for name, values in floors.items()},
        **{f"over_{name}": statistics.median(ratios) for name, ratios in over.items()},
        "times_one": times_one(step.rows, one.step_s, case.step_s) if one else None,
        "loops_times_one": times_one(step.rows, one.launches.attainable_s(), floors["loops"]) if one else None,
        "rows_per_s": step.rows / step_s,
        "by_kernel": ", ".join(case.launches.by_kernel()) or "-",
    }


def times_one(num_rows: int, one_s: list[float], rows_s: list[float]) -> float:
    """Return the rows per second of steps of `num_rows` rows over those of steps of one row."""
    return num_rows * statistics.median(a / b for a, b in zip(one_s, rows_s, strict=True))


def main() -> None:
    """Print one row per format, context, number of rows and kind, and one JSON line."""
    parser = make_parser(__doc__)
    add_shape_flags(parser)
    add_clock_flag(parser)
    parser.add_argument("--context", type=int, nargs="+", default=[128, 2048])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16], help="at most 17")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="(default: auto)")
    parser.add_argument("--rounds", type=int, default=6, help=f"groups of {STEPS_PER_GROUP} steps of each case")
    parser.add_argument("--parts", action="store_true", help="also time the parts of steps")
    args = parser.parse_args()
    if not all(1 <= rows <= 17 for rows in args.rows):
        parser.error(f"--rows: expected 1 to 17, got {args.rows}")
    roofline = make_roofline(parser, args)
    results = [row for quantization in args.quantization for row in measure(args, quantization, roofline)]
    print_table(f"{args.shape}: {roofline.median}", results, [column for column in results[0] if column != "parts"])
    if args.parts:
        case = ("format", "context", "rows", "as")
        parts = [{**{key: row[key] for key in case}, **part} for row in results for part in row["parts"]]
        print_table("parts of a step", parts)
    machine = {"kv_cache_dtype": args.kv_cache_dtype, "roofline": roofline.describe()}
    print_json({"benchmark": "decode", "shape": args.shape, "layers": args.layers, **machine, "results": results})


if __name__ == "__main__":
    main()
