# SPDX-License-Identifier: Apache-2.0
"""How well does adaptive length predict the time of a step, and the distinct experts that it reads?

    python -m benchmarks.bench_step_times [--shape benchmarks/shapes/qwen3-30b-a3b] [--layers 4] [--quantization wint4]
        [--requests 1 4 16] [--rows 1 2 3 4 6 8 12 16] [--alike 0.0] [--rounds 5]

An engine of random weights measures its steps at the start, as every engine does. Then steps with drafts are run, as
many rounds as are asked for, and each is predicted before it runs. Their tokens are random; with --alike, a row has the
token of the row before it with this probability, so that neighbours share experts, and the predictions follow as in
serving. `time_error` compares the smallest time of a step with its last prediction, `experts_error` the means of all
rounds but the first. Engines of dense models have no experts to predict.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean

from benchmarks.report import Row, make_parser, print_report
from benchmarks.shape_engine import SHAPE, shape_of_layers
from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.quantization import FORMATS, QuantizationConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.ops.registry import selected_backend
from fastdeploy.spec_decode.adaptive.adaptive_length import AdaptiveLength
from fastdeploy.spec_decode.adaptive.step_times import StepTimes
from fastdeploy.worker.model_runner import ModelRunner
from fastdeploy.worker.step_timing import CONTEXT_TOKENS, make_plan

SOURCE = "ngram"


@dataclass
class Predicted:
    """What steps of one shape took and read, and what was predicted."""

    seconds: list[float] = field(default_factory=list)
    predicted_s: list[float] = field(default_factory=list)
    experts: list[float] = field(default_factory=list)
    predicted_experts: list[float] = field(default_factory=list)


class Bench:
    """An engine's runner, and the predictions of its length policy."""

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        max_drafts, max_seqs = max(args.rows) - 1, max(args.requests)
        length = CONTEXT_TOKENS * 2
        config = EngineConfig(
            model=folder,
            load_choices="dummy",
            quantization=QuantizationConfig.from_value(args.quantization),
            max_model_len=length,
            cache=CacheConfig(num_blocks=max_seqs * -(-length // CacheConfig.block_size)),
            scheduler=SchedulerConfig(max_num_seqs=max_seqs),
            speculative=parse_speculative_config({"method": SOURCE, "num_speculative_tokens": max_drafts}),
        )
        engine = make_engine(config)
        assert isinstance(engine.runner, ModelRunner) and isinstance(engine.length_policy, AdaptiveLength)
        self._runner, self._times = engine.runner, engine.length_policy._times
        self._tokens, self._max_drafts = _tokens(engine.vocab_size, args.alike), max_drafts
        self._clock = selected_backend().clock

    def run(self, num_requests: int, rows_each: int, found: Predicted) -> None:
        """Predict a step, run it, and let the predictions learn from it."""
        runner, times = self._runner, self._times
        num_drafts = num_requests * (rows_each - 1)
        sources = [SOURCE] * num_requests if num_drafts else []
        plan = make_plan(runner, [rows_each] * num_requests, CONTEXT_TOKENS, self._max_drafts, self._tokens)
        found.predicted_s.append(_predict(times, num_requests, sources, num_drafts))
        start_s = self._clock()
        runner.run(plan)
        found.seconds.append(self._clock() - start_s)
        if times.experts is not None and runner.model.expert_load is not None:
            found.predicted_experts += times.experts.expected(num_requests, sources, [num_drafts])
            found.experts.append(float(runner.model.expert_load.array[:, 0].sum()))
            times.experts.update(num_requests, sources, num_drafts)


def _predict(times: StepTimes, num_requests: int, sources: list[str], num_drafts: int) -> float:
    num_tokens = num_requests * CONTEXT_TOKENS
    plain_s = times.rows_s(num_requests) + times.requests_s(num_requests, num_tokens)
    return plain_s + times.drafts_s(num_requests, num_tokens, sources, num_drafts)


def _tokens(vocab_size: int, alike: float) -> Iterator[int]:
    """Yield random tokens, each of them the one before it with probability `alike`."""
    draw, token = random.Random(0), 0
    while True:
        token = token if draw.random() < alike else draw.randrange(vocab_size)
        yield token


def _row(num_requests: int, rows_each: int, found: Predicted) -> Row:
    row = {
        "requests": num_requests,
        "rows_each": rows_each,
        "ms": 1000 * min(found.seconds),
        "predicted_ms": 1000 * found.predicted_s[-1],
        "time_error": found.predicted_s[-1] / min(found.seconds) - 1,
    }
    if found.experts:
        experts, predicted = fmean(found.experts[1:]), fmean(found.predicted_experts[1:])
        row |= {"experts": experts, "predicted_experts": predicted, "experts_error": predicted / experts - 1}
    return row


def main() -> None:
    """Print one row per number of requests and rows, and one JSON line."""
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default=SHAPE, help="folder with a config.json")
    parser.add_argument("--layers", type=int, help="number of layers, if it is not that of --shape")
    parser.add_argument("--quantization", choices=FORMATS, default="none")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 12, 16], help="of each request")
    parser.add_argument("--alike", type=float, default=0.0, help="probability of the token of the row before")
    parser.add_argument("--rounds", type=int, default=5, help="at least 2 (default: 5)")
    args = parser.parse_args()
    with shape_of_layers(args.shape, args.layers) as folder:
        bench = Bench(args, folder)
    found = {(requests, rows): Predicted() for requests in args.requests for rows in args.rows}
    for _ in range(args.rounds):
        for (num_requests, rows_each), step in found.items():
            bench.run(num_requests, rows_each, step)
    layers = f", {args.layers} layers" if args.layers else ""
    title = f"{args.shape}{layers}, quantization {args.quantization}, alike {args.alike}: measured and predicted steps"
    print_report("step_times", title, [_row(*shape, step) for shape, step in found.items()], shape=args.shape)


if __name__ == "__main__":
    main()
