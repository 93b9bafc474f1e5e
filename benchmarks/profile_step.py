# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes, by operator, as a table and as stacked bars.

    python -m benchmarks.profile_step [--quantization none] [--rounds 7] [--svg docs/images/profile.svg]

The operators of a captured step are timed one launch at a time by the library, those outside of it around their call;
what is left of the step is `engine and Python`. Of every single call the least of the rounds counts, in which cases
take turns: what a busy machine adds is nobody's share. Every case is shown as shares of its own step. Operators go by
the names that the library has for them, linear layers by the part that has their shape. `unprofiled` is the same step
without timing, for what the timing itself costs.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.report import print_json, print_table
from benchmarks.shape_engine import SHAPE, TOKEN, ShapeEngine, StepShape
from benchmarks.stacked_bars import stacked_bars
from benchmarks.step_parts import REST, Calls, Profile, part_names, part_of, timed_operators
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import FORMATS


@dataclass
class Case:
    """A kind of step, how to run one, and what its runs took."""

    name: str
    run: Callable[[AbstractContextManager[None]], float]  # runs one inside the manager and returns its seconds
    calls: list[Calls] = field(default_factory=list)
    rest_s: list[float] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)

    def run_once(self) -> None:
        """Run a step without and one with timing."""
        self.plain_s.append(self.run(nullcontext()))
        calls: Calls = []
        seconds = self.run(timed_operators(calls))
        self.calls.append(calls)
        self.rest_s.append(seconds - sum(spent for _, spent in calls))

    def profile(self, names: dict[str, str]) -> Profile:
        """Return the seconds of every part: `names` maps the ends of labels to parts, other labels are parts."""
        merged: Profile = defaultdict(float)
        for same_call in zip(*self.calls, strict=True):
            merged[part_of(same_call[0][0], names)] += min(seconds for _, seconds in same_call)
        return {**merged, REST: min(self.rest_s)}


def decoding_step(loaded: ShapeEngine, step: StepShape, timing: AbstractContextManager[None]) -> float:
    """Return the seconds of the second step of a shape; the first warms it up."""
    loaded.skip_prompts()
    ids = loaded.start(step, num_steps=2)
    loaded.engine.step()
    seconds = timed_step(loaded, timing)
    loaded.stop(ids)
    return seconds


def prompt_step(loaded: ShapeEngine, num_tokens: int, timing: AbstractContextManager[None]) -> float:
    """Return the seconds of reading a prompt."""
    loaded.read_prompts()
    loaded.add([TOKEN] * num_tokens, max_tokens=1)
    return timed_step(loaded, timing)


def timed_step(loaded: ShapeEngine, timing: AbstractContextManager[None]) -> float:
    """Return the seconds of the engine's next step."""
    with timing:
        begin = time.perf_counter()
        loaded.engine.step()
        return time.perf_counter() - begin


def make_cases(shape: str, quantization: str, prompts: list[int]) -> list[Case]:
    """Return the steps to profile: decoding, verification, many requests, and prompts."""
    loaded = ShapeEngine.load(shape, quantization, max_num_seqs=16, max_model_len=2112, max_drafts=7)
    steps = {
        "1 row, context 128": StepShape(1, 1, 128),
        "1 row, context 2048": StepShape(1, 1, 2048),
        "1 request, 7 drafts, 128": StepShape(1, 8, 128),
        "1 request, 7 drafts, 2048": StepShape(1, 8, 2048),
        "16 requests, 128": StepShape(16, 1, 128),
        "16 requests, 2048": StepShape(16, 1, 2048),
    }
    return [
        *(Case(name, partial(decoding_step, loaded, step)) for name, step in steps.items()),
        *(Case(f"prompt of {n}", partial(prompt_step, loaded, n)) for n in prompts),
    ]


def main() -> None:
    """Print shares by operator and case and one JSON line; write the bars if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default=SHAPE, help=f"folder with a config.json (default: {SHAPE})")
    parser.add_argument("--quantization", choices=FORMATS, default="none")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 2048], help="their tokens, up to 2048")
    parser.add_argument("--svg", type=Path, help="write the stacked bars to this file")
    args = parser.parse_args()
    cases = make_cases(args.shape, args.quantization, args.prompts)
    names = part_names(ModelConfig.from_pretrained(args.shape))
    for _ in range(args.rounds):
        for case in cases:
            case.run_once()
    seconds = {case.name: case.profile(names) for case in cases}
    totals = {name: sum(spent.values()) for name, spent in seconds.items()}
    parts = sorted({part for spent in seconds.values() for part in spent if part != REST}, key=_most(seconds, totals))
    shares = {part: [seconds[name].get(part, 0.0) / totals[name] for name in seconds] for part in [*parts, REST]}
    plain_ms = [1e3 * min(case.plain_s) for case in cases]
    print_table(
        f"{args.shape}, {args.quantization}: shares of a step",
        ["", *seconds],
        [
            *([part, *values] for part, values in shares.items()),
            ["step ms", *(1e3 * total for total in totals.values())],
            ["unprofiled ms", *plain_ms],
        ],
    )
    if args.svg:
        title = f"{Path(args.shape).name}, {args.quantization}: where a step's time goes"
        args.svg.write_text(stacked_bars(title, list(seconds), shares), encoding="utf-8")
    print_json(
        {
            "benchmark": "profile_step",
            "shape": args.shape,
            "quantization": args.quantization,
            "unprofiled_ms": dict(zip(seconds, plain_ms)),
            "seconds": seconds,
        }
    )


def _most(seconds: dict[str, Profile], totals: dict[str, float]) -> Callable[[str], float]:
    """Order parts by the largest share that they have anywhere."""
    return lambda part: -max(spent.get(part, 0.0) / totals[name] for name, spent in seconds.items())


if __name__ == "__main__":
    main()
