# SPDX-License-Identifier: Apache-2.0
"""`fastdeploy bench latency` and `fastdeploy bench throughput`: benchmarks of an engine in this process."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastdeploy.config.args import parse_engine_args
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.entrypoints.cli.bench.datasets import (
    SampleRequest,
    add_dataset_flags,
    file_requests,
    load_tokenizer,
    random_requests,
)
from fastdeploy.entrypoints.cli.bench.report import print_json, print_metrics, summarize
from fastdeploy.entrypoints.cli.parser import ENGINE_FLAGS, CommandParser, non_negative_int, positive_int, ratio
from fastdeploy.hub.model_path import local_folder

if TYPE_CHECKING:
    from fastdeploy.entrypoints.llm import LLM

DEFAULT_MAX_MODEL_LEN = 2048
PERCENTILES = (10, 25, 50, 75, 90, 99)


def bench_latency(arguments: list[str]) -> int:
    """Time batches of equal requests; the prompts of every batch are new, so that none is in the prefix cache."""
    args, flags = _latency_parser().parse_with_engine_flags(arguments)
    for name in ("use_beam_search", "profile"):
        if getattr(args, name):
            raise ConfigError("--" + name.replace("_", "-"), "not supported")
    llm = _make_llm(flags, args.input_len + args.output_len)
    latencies_s = []
    for i in range(args.num_iters_warmup + args.num_iters):
        batch = random_requests(llm.tokenizer, args.batch_size, args.input_len, args.output_len, 0.0, 0, seed=i)
        latency_s, num_tokens = _run_batch(llm, args, batch, show_progress=False)
        if num_tokens != args.batch_size * args.output_len * args.n:
            max_model_len = llm.engine.max_model_len
            raise ConfigError("--output-len", f"input and output exceed the context of {max_model_len} tokens")
        latencies_s.append(latency_s)
    measured = latencies_s[args.num_iters_warmup :]
    metrics = summarize("latency", "_s", measured, PERCENTILES)
    metrics["median_s_per_token"] = metrics["median_latency_s"] / args.output_len
    shape = {name: getattr(args, name) for name in ("input_len", "output_len", "batch_size", "n")}
    print_metrics(f"{args.batch_size} requests, {args.input_len} input and {args.output_len} output tokens", metrics)
    print_json({"benchmark": "latency", **shape, **metrics, "latencies_s": measured}, args.output_json)
    return 0


def bench_throughput(arguments: list[str]) -> int:
    """Submit many requests at once and measure the tokens per second."""
    args, flags = _throughput_parser().parse_with_engine_flags(arguments)
    if args.lora_path:
        raise ConfigError("--lora-path", "LoRA adapters are not supported")
    requests = _load_requests(args, flags)
    llm = _make_llm(flags, max(len(request.token_ids) + request.output_len for request in requests))
    seconds, num_output = _run_batch(llm, args, requests, show_progress=True)
    num_input = sum(len(request.token_ids) for request in requests)
    metrics: dict[str, Any] = {
        "elapsed_time": seconds,
        "num_requests": len(requests),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "requests_per_second": len(requests) / seconds,
        "output_tokens_per_second": num_output / seconds,
        "tokens_per_second": (num_input + num_output) / seconds,
    }
    print_metrics(f"{len(requests)} requests of the dataset {args.dataset_name}", metrics)
    print_json({"benchmark": "throughput", "dataset": args.dataset_name, "n": args.n, **metrics}, args.output_json)
    return 0


def _latency_parser() -> CommandParser:
    parser = CommandParser("bench latency", "Time batches of equal requests on the engine alone.", ENGINE_FLAGS)
    parser.add_argument("--input-len", type=positive_int, default=32, help="prompt tokens per request")
    parser.add_argument("--output-len", type=positive_int, default=128, help="output tokens per request")
    parser.add_argument("--batch-size", type=positive_int, default=8, help="requests per batch")
    parser.add_argument("--num-iters-warmup", type=non_negative_int, default=10, help="warm-up batches, not measured")
    parser.add_argument("--num-iters", type=positive_int, default=30, help="measured batches")
    parser.add_argument("--use-beam-search", action="store_true", help="not supported")
    parser.add_argument("--profile", action="store_true", help="not supported")
    _add_common_flags(parser)
    return parser


def _throughput_parser() -> CommandParser:
    parser = CommandParser(
        "bench throughput", "Submit many requests at once to the engine alone and measure its throughput.", ENGINE_FLAGS
    )
    parser.add_argument("--backend", choices=("fastdeploy",), default="fastdeploy", help="engine to measure")
    add_dataset_flags(parser)
    parser.add_argument("--num-prompts", type=positive_int, default=50, help="number of requests")
    parser.add_argument("--input-len", type=positive_int, default=1024, help="random: prompt tokens per request")
    parser.add_argument("--output-len", type=positive_int, default=128, help="random: output tokens per request")
    parser.add_argument("--prefix-len", type=non_negative_int, default=0, help="random: prompt tokens that all share")
    parser.add_argument(
        "--random-range-ratio", type=ratio, default=0.0, help="random: lengths vary by this fraction, 0 to below 1"
    )
    parser.add_argument("--lora-path", help="not supported")
    _add_common_flags(parser)
    return parser


def _add_common_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--n", type=positive_int, default=1, help="choices per request")
    parser.add_argument("--output-json", metavar="FILE", help="also write the JSON line to this file")
    parser.add_argument("--disable-detokenize", action="store_true", help="generate token ids without text")


def _make_llm(flags: Sequence[str], num_tokens: int) -> LLM:
    """Load the engine; without --max-model-len its context holds at least `num_tokens` tokens."""
    kwargs = parse_engine_args(flags, local_folder)
    kwargs.setdefault("max_model_len", max(DEFAULT_MAX_MODEL_LEN, num_tokens))
    from fastdeploy.entrypoints.llm import LLM  # imports Paddle, so only after all flags are checked

    return LLM(**kwargs)


def _load_requests(args: argparse.Namespace, flags: list[str]) -> list[SampleRequest]:
    engine_args = parse_engine_args(flags, local_folder)
    tokenizer = load_tokenizer(str(engine_args.get("tokenizer") or engine_args["model"]))
    if args.dataset_name != "random":
        return file_requests(args, tokenizer, args.num_prompts)
    return random_requests(
        tokenizer,
        args.num_prompts,
        args.input_len,
        args.output_len,
        args.random_range_ratio,
        args.prefix_len,
        args.seed,
    )


def _run_batch(
    llm: LLM, args: argparse.Namespace, requests: Sequence[SampleRequest], show_progress: bool
) -> tuple[float, int]:
    """Run all requests at once, each to its full length; return the seconds and the number of output tokens."""
    params = [
        SamplingParams(n=args.n, max_tokens=request.output_len, ignore_eos=True, seed=seed)
        for seed, request in enumerate(requests)
    ]
    begin = time.perf_counter()
    if args.disable_detokenize:
        num_tokens = _generate_token_ids(llm.engine, requests, params)
    else:
        outputs: Any = llm.generate([request.token_ids for request in requests], params, use_tqdm=show_progress)
        num_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return time.perf_counter() - begin, num_tokens


def _generate_token_ids(engine: Any, requests: Sequence[SampleRequest], params: Sequence[SamplingParams]) -> int:
    for i, (request, sampling_params) in enumerate(zip(requests, params)):
        engine.add_request(GenerationRequest(f"bench-{i}", request.token_ids, sampling_params))
    num_tokens = 0
    while engine.has_unfinished():
        num_tokens += sum(len(delta.token_ids) for delta in engine.step())
    return num_tokens
