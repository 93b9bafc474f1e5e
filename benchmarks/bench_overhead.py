# SPDX-License-Identifier: Apache-2.0
"""What a decoding step spends outside its operators: scheduler, batch index, results, bookkeeping, messages.

    python -m benchmarks.bench_overhead [--shape benchmarks/shapes/qwen3-0.6b] [--requests 1 16 64]

The engine itself steps; `outside` is a step's time less that inside calls of operators and replays (with Paddle's part
of the call), plus the encoding of the step's messages to one client. Medians of steps. With --clock cpu the calling
thread's own time counts, so that others on the machine do not: it needs FD_NUM_THREADS=1, and the share is then that of
one core.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.report import print_json, print_table
from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.engine import Engine
from fastdeploy.ipc.messages import encode, split_deltas
from fastdeploy.ops import registry
from fastdeploy.ops.backends.cpu.graph import OpGraph
from fastdeploy.ops.backends.cpu.library import num_threads

WARM_STEPS = 8  # prompts, and the first steps of a batch


class OperatorClock:
    """Adds up the time inside operators once `install` has put it around them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds = 0.0

    def install(self) -> None:
        """Time every registered operator and every replay from now on."""
        for entry in registry.entries().values():
            entry.run = self._timed(entry.run)
        OpGraph.replay = self._timed(OpGraph.replay)  # type: ignore[method-assign]

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self.clock()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += self.clock() - begin

        return timed


def measure(engine: Engine, operators: OperatorClock, num_requests: int, steps: int) -> dict[str, Any]:
    """Decode `num_requests` short requests together; return medians over `steps` steps."""
    for index in range(num_requests):
        params = SamplingParams(temperature=0.0, max_tokens=WARM_STEPS + steps + 1, ignore_eos=True)
        prompt = [(31 * index + position) % 500 for position in range(8)]
        engine.add_request(GenerationRequest(f"{num_requests}-{index}", prompt, params))
    for _ in range(WARM_STEPS):
        engine.step()
    step_s, outside_s = [], []
    for _ in range(steps):
        inside, begin = operators.seconds, operators.clock()
        encode(split_deltas(engine.step()))
        step_s.append(operators.clock() - begin)
        outside_s.append(step_s[-1] - (operators.seconds - inside))
    while engine.has_unfinished():
        engine.step()
    outside, whole = statistics.median(outside_s), statistics.median(step_s)
    return {
        "requests": num_requests,
        "step_ms": 1e3 * whole,
        "outside_us": 1e6 * outside,
        "us_per_request": 1e6 * outside / num_requests,
        "share": outside / whole,
    }


def main() -> None:
    """Print one row per number of requests and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="benchmarks/shapes/qwen3-0.6b", help="folder with a config.json")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--steps", type=int, default=30, help="steps of every number of requests (default: 30)")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu needs FD_NUM_THREADS=1")
    args = parser.parse_args()
    if args.clock == "cpu" and num_threads() != 1:
        parser.error("--clock cpu: expected FD_NUM_THREADS=1")
    engine = Engine.from_config(EngineConfig(model=args.shape, load_choices="dummy", max_model_len=256))
    operators = OperatorClock(time.thread_time if args.clock == "cpu" else time.perf_counter)
    operators.install()
    results = [measure(engine, operators, count, args.steps) for count in args.requests]
    title = f"{args.shape}, {num_threads()} threads, {args.clock} time: steps outside their operators"
    print_table(title, list(results[0]), [list(row.values()) for row in results])
    print_json({"benchmark": "overhead", "shape": args.shape, "threads": num_threads(), "results": results})


if __name__ == "__main__":
    main()
