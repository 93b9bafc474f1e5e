# SPDX-License-Identifier: Apache-2.0
"""How near is prefill to the peak of the arithmetic, in each weight format?

    python -m benchmarks.bench_prefill [--quantization none w8a8] [--tokens 512 2048] [--rounds 3] [--layers N]
        [--parts]

Operations are two per parameter and token (the head's for the last token only, no embedding), and the causal half of
attention. `share` is operations / seconds / peak, where products of integers have the int8 peak, and wint8 and wint4
need two of them per weight and input. The peaks are measured before and after each prompt. Formats alternate, so
`over_bf16` is a median of ratios within rounds. The real engine prefills each prompt in one step. --parts prints a
second table with the share of the step's time that each part of the model takes.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace

from benchmarks.launches import NO_WORK, LaunchWork, capture_replays, total_work
from benchmarks.report import Row, make_parser, print_json, print_table
from benchmarks.roofline import Roofline, add_clock_flag, make_roofline
from benchmarks.shape_engine import ShapeEngine, add_shape_flags, tokens
from benchmarks.step_parts import Profile, time_parts


@dataclass
class Case:
    """Prompts of one length in one format, and their times."""

    loaded: ShapeEngine
    tokens: int
    work: LaunchWork = NO_WORK  # operations of a prompt
    seconds: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)


def time_prompt(case: Case, roofline: Roofline) -> None:
    """Prefill one prompt between two readings of the machine."""
    engine = case.loaded.engine
    before = roofline.measure()
    case.loaded.add(tokens(case.tokens), max_tokens=1)
    begin = roofline.clock()
    emitted = engine.step()
    seconds = roofline.clock() - begin
    readings = (before, roofline.measure())
    assert emitted and not engine.has_unfinished(), "expected one step to prefill the prompt"
    case.seconds.append(seconds)
    case.shares.append(statistics.mean(case.work.floor_s(reading) for reading in readings) / seconds)


def measure(cases: list[Case], roofline: Roofline, rounds: int) -> None:
    """Warm up, then time the cases in alternation."""
    for case in cases:
        time_prompt(case, roofline)
        case.loaded.add(tokens(case.tokens), max_tokens=1)
        case.work = replace(total_work(capture_replays(case.loaded.engine.step)), num_bytes=0.0)
        case.seconds.clear()
        case.shares.clear()
    for _ in range(rounds):
        for case in cases:
            time_prompt(case, roofline)


def describe(case: Case, cases: list[Case]) -> Row:
    """Return a case's medians."""
    of_length = (c for c in cases if c.tokens == case.tokens)
    bf16 = next((c for c in of_length if c.loaded.model.quantization == "none"), None)
    seconds = statistics.median(case.seconds)
    return {
        "format": case.loaded.model.quantization,
        "tokens": case.tokens,
        "ms": 1e3 * seconds,
        "tokens_per_s": case.tokens / seconds,
        "share": statistics.median(case.shares),
        "over_bf16": statistics.median(a / b for a, b in zip(bf16.seconds, case.seconds)) if bf16 else None,
    }


def shares_of_parts(case: Case, roofline: Roofline) -> Profile:
    """Prefill one more prompt; return part -> share of the step, the largest first."""
    case.loaded.add(tokens(case.tokens), max_tokens=1)
    parts = time_parts(case.loaded.engine.step, case.loaded.model.config, roofline.clock)
    return {part: parts[part] / sum(parts.values()) for part in sorted(parts, key=lambda part: -parts[part])}


def main() -> None:
    """Print one row per format and length, and one JSON line."""
    parser = make_parser(__doc__)
    add_shape_flags(parser)
    add_clock_flag(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048], help="lengths of prompts, at most 2048")
    parser.add_argument("--rounds", type=int, default=3, help="prompts of each case")
    parser.add_argument("--parts", action="store_true", help="also time the parts of a step")
    args = parser.parse_args()
    if not all(16 <= tokens <= 2048 for tokens in args.tokens):
        parser.error(f"--tokens: expected 16 to 2048, got {args.tokens}")
    roofline = make_roofline(parser, args)
    engines = [
        ShapeEngine.load(
            args.shape, quantization, max_num_seqs=1, max_model_len=max(args.tokens) + 16, layers=args.layers
        )
        for quantization in args.quantization
    ]
    cases = [Case(loaded, tokens) for tokens in args.tokens for loaded in engines]
    measure(cases, roofline, args.rounds)
    results = [describe(case, cases) for case in cases]
    print_table(f"{args.shape}: {roofline.median}", results)
    if args.parts:
        parts = [shares_of_parts(case, roofline) for case in cases]
        cells = [{"format": r["format"], "tokens": r["tokens"], **shares} for r, shares in zip(results, parts)]
        print_table("parts of a step", cells)
        results = [{**row, "parts": shares} for row, shares in zip(results, parts)]
    machine = {"layers": args.layers, "roofline": roofline.describe()}
    print_json({"benchmark": "prefill", "shape": args.shape, **machine, "results": results})


if __name__ == "__main__":
    main()
