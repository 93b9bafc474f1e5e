# SPDX-License-Identifier: Apache-2.0
"""`fastdeploy bench throughput`: how many tokens per second the engine makes of many requests at once."""

from __future__ import annotations

import argparse
from typing import Any

from fastdeploy.config.args import parse_engine_args
from fastdeploy.core.errors import ConfigError
from fastdeploy.entrypoints.cli.bench.datasets import (
    Sample,
    add_dataset_flags,
    file_samples,
    load_tokenizer,
    random_samples,
)
from fastdeploy.entrypoints.cli.bench.figures import print_figures, print_json
from fastdeploy.entrypoints.cli.bench.offline import add_engine_run_flags, make_llm, run
from fastdeploy.entrypoints.cli.parser import ENGINE_FLAGS, CommandParser, positive_int


def main(arguments: list[str]) -> int:
    """Measure and print."""
    args, flags = _parser().parse_with_engine_flags(arguments)
    if args.lora_path:
        raise ConfigError("--lora-path", "LoRA adapters are not supported")
    samples = _samples(args, flags)
    llm = make_llm(flags, max(len(sample.token_ids) + sample.output_len for sample in samples))
    seconds, num_out = run(llm, args, samples, show_progress=True)
    num_in = sum(len(sample.token_ids) for sample in samples)
    figures: dict[str, Any] = {
        "elapsed_time": seconds,
        "num_requests": len(samples),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "requests_per_second": len(samples) / seconds,
        "output_tokens_per_second": num_out / seconds,
        "tokens_per_second": (num_in + num_out) / seconds,
    }
    print_figures(f"{len(samples)} requests at once, {args.dataset_name}", figures)
    print_json({"benchmark": "throughput", "dataset": args.dataset_name, "n": args.n, **figures}, args.output_json)
    return 0


def _samples(args: argparse.Namespace, flags: list[str]) -> list[Sample]:
    given = parse_engine_args(flags)
    tokenizer = load_tokenizer(str(given.get("tokenizer") or given["model"]))
    if args.dataset_name != "random":
        return file_samples(args, tokenizer, args.num_prompts)
    return random_samples(
        tokenizer,
        args.num_prompts,
        args.input_len,
        args.output_len,
        args.random_range_ratio,
        args.prefix_len,
        args.seed,
    )


def _parser() -> CommandParser:
    parser = CommandParser("bench throughput", "Run many requests at once on the engine itself.", ENGINE_FLAGS)
    parser.add_argument("--backend", choices=("fastdeploy",), default="fastdeploy", help="there is one")
    add_dataset_flags(parser, "random")
    parser.add_argument("--num-prompts", type=positive_int, default=50, help="number of requests")
    parser.add_argument("--input-len", type=positive_int, default=1024, help="random: tokens of a prompt")
    parser.add_argument("--output-len", type=positive_int, default=128, help="random: tokens asked for")
    parser.add_argument("--prefix-len", type=int, default=0, help="random: tokens that all prompts share")
    parser.add_argument("--random-range-ratio", type=float, default=0.0, help="random: lengths vary by this part")
    parser.add_argument("--lora-path", help="refused: LoRA adapters are not supported")
    add_engine_run_flags(parser)
    return parser
