# SPDX-License-Identifier: Apache-2.0
"""`fastdeploy bench latency`: how long the engine takes for a batch of equal requests."""

from __future__ import annotations

from fastdeploy.core.errors import ConfigError
from fastdeploy.entrypoints.cli.bench.datasets import random_samples
from fastdeploy.entrypoints.cli.bench.figures import print_figures, print_json, spread
from fastdeploy.entrypoints.cli.bench.offline import add_engine_run_flags, make_llm, run
from fastdeploy.entrypoints.cli.parser import ENGINE_FLAGS, CommandParser, positive_int

PERCENTS = (10, 25, 50, 75, 90, 99)


def main(arguments: list[str]) -> int:
    """Measure and print; every batch has prompts of its own, so that no prefix is found in the cache."""
    parser = CommandParser("bench latency", "Time batches of equal requests on the engine itself.", ENGINE_FLAGS)
    parser.add_argument("--input-len", type=positive_int, default=32, help="tokens of a prompt")
    parser.add_argument("--output-len", type=positive_int, default=128, help="tokens made")
    parser.add_argument("--batch-size", type=positive_int, default=8, help="requests at once")
    parser.add_argument("--num-iters-warmup", type=int, default=10, help="batches before, which do not count")
    parser.add_argument("--num-iters", type=positive_int, default=30, help="batches that count")
    parser.add_argument("--use-beam-search", action="store_true", help="refused: there is no beam search")
    parser.add_argument("--profile", action="store_true", help="refused: there is no profiler to start")
    add_engine_run_flags(parser)
    args, flags = parser.parse_with_engine_flags(arguments)
    for name in ("use_beam_search", "profile"):
        if getattr(args, name):
            raise ConfigError("--" + name.replace("_", "-"), "is not available")
    llm = make_llm(flags, args.input_len + args.output_len)
    seconds = []
    for i in range(args.num_iters_warmup + args.num_iters):
        batch = random_samples(llm.tokenizer, args.batch_size, args.input_len, args.output_len, 0.0, 0, seed=i)
        took_s, num_tokens = run(llm, args, batch, show_progress=False)
        if num_tokens != args.batch_size * args.output_len * args.n:
            raise ConfigError("--output-len", f"the context of {llm.engine.max_model_len} tokens ends before it")
        seconds.append(took_s)
    measured = seconds[args.num_iters_warmup :]
    figures = spread("latency", "_s", measured, PERCENTS)
    figures["median_s_per_token"] = figures["median_latency_s"] / args.output_len
    shape = {name: getattr(args, name) for name in ("input_len", "output_len", "batch_size", "n")}
    print_figures(f"{args.batch_size} requests, {args.input_len} tokens in, {args.output_len} out", figures)
    print_json({"benchmark": "latency", **shape, **figures, "latencies_s": measured}, args.output_json)
    return 0
