# SPDX-License-Identifier: Apache-2.0
"""How much of a decoding step is spent outside its operators, and how much of that on choosing draft lengths?

    python -m benchmarks.bench_overhead [--shape benchmarks/shapes/qwen3-0.6b] [--requests 1 16 64]

Each number of requests is decoded without speculation (`naive`, the baseline), with n-gram drafts of adaptive length,
and, if the model has a tokenizer (--shape demo), under a JSON grammar without speculation. Figures are medians over
steps:

    outside_us    the step without its operators: scheduler, batch index, sampling metadata, bookkeeping, and encoding
                  the step's messages to one client; calling an operator through Paddle counts as the operator
    choosing_us   of that, the length policy: choosing how many drafts are verified and proposed (aim at one request:
                  at most 15)
    proposing_us  of that, matching text; the mean, since adaptive length does not propose at every step

With --clock cpu only the calling thread's processor time counts, which other processes on the machine disturb less. It
needs FD_NUM_THREADS=1.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import Row, make_parser, print_report
from benchmarks.shape_engine import SHAPE
from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.guided_decoding import GuidedDecodingParams
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.engine import Engine
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.ipc.messages import encode, split_deltas
from fastdeploy.ops import registry
from fastdeploy.ops.backends.cpu.graph import OpGraph
from fastdeploy.ops.backends.cpu.library import num_threads

NUM_WARM_STEPS = 8  # the prefill and the first steps of a batch
NUM_DRAFTS = 5
PROMPT_TOKENS = 8
NAIVE, GRAMMAR = "naive", "grammar"
METHODS: dict[str, dict[str, Any]] = {
    NAIVE: {"method": "naive"},
    "ngram": {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS},
    GRAMMAR: {"method": "naive"},
}
NUMBERS = GuidedDecodingParams(json={"type": "array", "items": {"type": "integer"}, "minItems": 10_000})


class Stopwatch:
    """Adds up the time spent in the functions that it wraps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._clock = clock

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with its time added to `seconds`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self._clock()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += self._clock() - begin

        return timed


class Overhead:
    """Times the steps of one engine and the parts of them that are not the model."""

    def __init__(self, engine: Engine, operators: Stopwatch, clock: Callable[[], float], grammar: bool) -> None:
        self.engine, self._operators, self._clock = engine, operators, clock
        self._grammar = NUMBERS if grammar else None
        self._choosing, self._proposing = Stopwatch(clock), Stopwatch(clock)
        policy = engine.length_policy
        for name in ("trim_drafts", "draft_quotas", "on_drafts_proposed"):
            setattr(policy, name, self._choosing.wrap(getattr(policy, name)))
        engine.proposer.propose = self._proposing.wrap(engine.proposer.propose)  # type: ignore[method-assign]

    def measure(self, num_requests: int, num_steps: int) -> Row:
        """Decode `num_requests` short requests together; return medians over `num_steps` steps."""
        self._add_requests(num_requests, (NUM_WARM_STEPS + num_steps) * (NUM_DRAFTS + 1))
        for _ in range(NUM_WARM_STEPS):
            self.engine.step()
        steps = [self._time_step() for _ in range(num_steps)]
        for request_id in [request.request_id for request in self.engine.scheduler.running]:
            self.engine.abort(request_id)
        step_s, outside_s, choosing_s, _ = (statistics.median(column) for column in zip(*steps))
        proposing_s = statistics.fmean(step[3] for step in steps)
        return {
            "requests": num_requests,
            "step_ms": 1e3 * step_s,
            "outside_us": 1e6 * outside_s,
            "outside_us_per_request": 1e6 * outside_s / num_requests,
            "choosing_us": 1e6 * choosing_s,
            "proposing_us": 1e6 * proposing_s,
            "outside_share": outside_s / step_s,
        }

    def _add_requests(self, num_requests: int, max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, guided_decoding=self._grammar)
        for index in range(num_requests):
            prompt = [(31 * index + position) % 500 for position in range(PROMPT_TOKENS)]
            self.engine.add_request(GenerationRequest(f"{num_requests}-{index}", prompt, params))

    def _time_step(self) -> tuple[float, float, float, float]:
        """Run a step; return its seconds, and those outside operators, choosing lengths and proposing."""
        stopwatches = (self._operators, self._choosing, self._proposing)
        before = [stopwatch.seconds for stopwatch in stopwatches]
        begin = self._clock()
        encode(split_deltas(self.engine.step()))
        step_s = self._clock() - begin
        operators_s, choosing_s, proposing_s = (s.seconds - b for s, b in zip(stopwatches, before))
        return step_s, step_s - operators_s, choosing_s, proposing_s


def time_operators(clock: Callable[[], float]) -> Stopwatch:
    """Time every registered operator and every replay of a captured step from now on."""
    operators = Stopwatch(clock)
    for entry in registry.entries().values():
        entry.run = operators.wrap(entry.run)
    OpGraph.replay = operators.wrap(OpGraph.replay)  # type: ignore[method-assign]
    return operators


def make_engine(shape: str, method: str, num_steps: int) -> Engine:
    """Build an engine of random weights whose requests have room for so many steps."""
    config = EngineConfig(
        model=shape,
        load_choices="dummy",
        max_model_len=PROMPT_TOKENS + (NUM_WARM_STEPS + num_steps) * (NUM_DRAFTS + 1) + 1,
        speculative=parse_speculative_config(METHODS[method]),
    )
    return Engine.from_config(config)


def main() -> None:
    """Print one row per method and number of requests, and one JSON line."""
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default=SHAPE, help=f"folder with a config.json (default: {SHAPE})")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--steps", type=int, default=30, help="steps per number of requests (default: 30)")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu needs FD_NUM_THREADS=1")
    args = parser.parse_args()
    if args.clock == "cpu" and num_threads() != 1:
        parser.error("--clock cpu: expected FD_NUM_THREADS=1")
    clock = time.thread_time if args.clock == "cpu" else time.perf_counter
    has_tokenizer = (Path(resolve_model_path(args.shape)) / "tokenizer.json").exists()
    methods = [method for method in METHODS if method != GRAMMAR or has_tokenizer]
    engines = {method: make_engine(args.shape, method, args.steps) for method in methods}
    operators = time_operators(clock)
    overheads = {name: Overhead(engine, operators, clock, name == GRAMMAR) for name, engine in engines.items()}
    results = [
        {"method": method, **overhead.measure(count, args.steps)}
        for count in args.requests
        for method, overhead in overheads.items()
    ]
    title = f"{args.shape}, {num_threads()} threads, {args.clock} time: steps outside their operators"
    print_report("overhead", title, results, shape=args.shape, clock=args.clock)


if __name__ == "__main__":
    main()
