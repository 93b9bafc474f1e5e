# SPDX-License-Identifier: Apache-2.0
"""Reading prompts of a model's shape, in every format, against the machine's bf16 peak.

    python -m benchmarks.bench_prefill [--quantization none w8a8] [--tokens 512 2048] [--rounds 3]

Operations are 2 x parameters (the layers' for every token, the head's for the last; no embedding) and the causal half
of attention. `share` is operations / seconds / bf16 peak, `share of own peak` takes the int8 peak for the products that
a format makes of integers (two of a weight and an input in wint8 and wint4); the peaks are read before and after each
prompt. Formats take turns, so `over bf16` is a median of ratios within rounds. The engine itself steps here; a prompt
is one step.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from typing import Any

from benchmarks.report import print_json, print_table
from benchmarks.roofline import Roofline, add_clock_flag, make_roofline
from benchmarks.shape_engine import TOKEN, ShapeEngine, StepShape, add_shape_flags


@dataclass
class Case:
    """Prompts of one length in one format, and what they took."""

    loaded: ShapeEngine
    tokens: int
    seconds: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    own_shares: list[float] = field(default_factory=list)


def time_prompt(case: Case, roofline: Roofline) -> None:
    """Read one prompt between two readings."""
    engine, work = case.loaded.engine, case.loaded.work
    before = roofline.measure()
    case.loaded.add([TOKEN] * case.tokens, max_tokens=1)
    begin = roofline.clock()
    emitted = engine.step()
    seconds = roofline.clock() - begin
    after = roofline.measure()
    assert emitted and not engine.has_unfinished(), "one step takes the whole prompt"
    step = StepShape(1, case.tokens, case.tokens)
    computed = sum(work.model_operations(step, logits_rows=1))
    case.seconds.append(seconds)
    for shares, operations in ((case.shares, (computed, 0.0)), (case.own_shares, work.operations(step, logits_rows=1))):
        shares.append(statistics.mean(reading.floor_s(0, *operations) for reading in (before, after)) / seconds)


def measure(cases: list[Case], roofline: Roofline, rounds: int) -> None:
    """Warm every case up, then let them take turns."""
    for case in cases:
        time_prompt(case, roofline)
        for noted in (case.seconds, case.shares, case.own_shares):
            noted.clear()
    for _ in range(rounds):
        for case in cases:
            time_prompt(case, roofline)


def describe(case: Case, cases: list[Case]) -> dict[str, Any]:
    """Return a case's medians."""
    of_length = (c for c in cases if c.tokens == case.tokens)
    bf16 = next((c for c in of_length if c.loaded.work.quantization == "none"), None)
    seconds = statistics.median(case.seconds)
    return {
        "format": case.loaded.work.quantization,
        "tokens": case.tokens,
        "ms": 1e3 * seconds,
        "tokens_per_s": case.tokens / seconds,
        "share": statistics.median(case.shares),
        "share_of_own_peak": statistics.median(case.own_shares),
        "over_bf16": statistics.median(a / b for a, b in zip(bf16.seconds, case.seconds)) if bf16 else None,
    }


def main() -> None:
    """Print one row per format and length, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_flags(parser)
    add_clock_flag(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048], help="lengths of prompts, up to 2048")
    parser.add_argument("--rounds", type=int, default=3, help="prompts of every case")
    args = parser.parse_args()
    if not all(16 <= tokens <= 2048 for tokens in args.tokens):
        parser.error(f"--tokens: expected 16 to 2048, got {args.tokens}")
    roofline = make_roofline(parser, args)
    engines = [
        ShapeEngine.load(args.shape, quantization, max_num_seqs=1, max_model_len=max(args.tokens) + 16)
        for quantization in args.quantization
    ]
    cases = [Case(loaded, tokens) for tokens in args.tokens for loaded in engines]
    measure(cases, roofline, args.rounds)
    rows = [describe(case, cases) for case in cases]
    print_table(f"{args.shape}: {roofline.median}", list(rows[0]), [list(row.values()) for row in rows])
    print_json({"benchmark": "prefill", "shape": args.shape, "roofline": roofline.describe(), "results": rows})


if __name__ == "__main__":
    main()
