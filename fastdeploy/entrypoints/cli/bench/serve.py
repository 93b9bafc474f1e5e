# SPDX-License-Identifier: Apache-2.0
"""`fastdeploy bench serve`: load on a running server that speaks the OpenAI protocol, ours or another."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from tqdm import tqdm

from fastdeploy.core.errors import ConfigError
from fastdeploy.entrypoints.cli.bench.datasets import (
    Sample,
    add_dataset_flags,
    file_samples,
    load_tokenizer,
    random_samples,
)
from fastdeploy.entrypoints.cli.bench.figures import machine, percent_list, print_figures, spread
from fastdeploy.entrypoints.cli.bench.load import Result, arrival_times, run_load
from fastdeploy.entrypoints.cli.bench.plot import plot_latencies, require_matplotlib
from fastdeploy.entrypoints.cli.bench.slo import goodput, parse_limit
from fastdeploy.entrypoints.cli.client import add_key_flag, server_key
from fastdeploy.entrypoints.cli.http_client import HttpClient, ServerError, UnreachableError
from fastdeploy.entrypoints.cli.parser import CommandParser, json_mapping, positive_int

BACKENDS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
METRICS = ("ttft", "tpot", "itl", "e2el", "input_len", "output_len")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


def main(arguments: list[str]) -> int:
    """Run the load; return 0 if every request was answered, else 1."""
    args = make_parser().parse_own(arguments)
    if args.plot:
        require_matplotlib()
    try:
        run = asyncio.run(measure(args))
    except (ServerError, UnreachableError) as error:
        print(f"fastdeploy: error: {error}", file=sys.stderr)
        return 1
    run.report()
    if args.plot:
        plot_latencies(args.plot, run.title, {"": latencies_ms(run.results)}, dict(args.goodput))
        print(f"  plotted to {args.plot}")
    _finish(args, run)
    return 1 if run.errors else 0


@dataclass(frozen=True)
class Run:
    """A load that was sent, and what came of it."""

    title: str
    figures: dict[str, Any]
    results: list[Result]

    @property
    def errors(self) -> list[str]:
        """What requests failed of, each once."""
        return sorted({result.error for result in self.results if result.error})

    def report(self) -> None:
        """Print the figures as a table, and the first errors."""
        print_figures(self.title, self.figures)
        for error in self.errors[:3]:
            print(f"  failed: {error}")


async def measure(args: argparse.Namespace) -> Run:
    """Send the load that the flags describe.

    Raises:
        ConfigError: no tokenizer or dataset.
        ServerError, UnreachableError: no server of the protocol is there.
    """
    path = args.endpoint or BACKENDS[args.backend]
    base_url = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/")
    client = HttpClient(base_url, server_key(args))
    model = args.model or await HttpClient(f"{base_url}/v1", server_key(args)).first_model()
    samples = make_samples(args, args.tokenizer or model)
    bodies = [make_body(args, args.served_model_name or model, sample) for sample in samples]
    await _warm_up(client, path, bodies, args.num_warmups)
    times = arrival_times(len(bodies), args.request_rate, args.seed)
    with tqdm(total=len(bodies), desc="Requests", disable=args.disable_tqdm) as bar:
        results, duration_s = await run_load(client, path, bodies, times, args.max_concurrency, bar.update)
    figures = {**_head(args, model), **summarise(args, results, duration_s)}
    return Run(f"{model} at {urlsplit(base_url).netloc}{path}", figures, results)


def make_samples(args: argparse.Namespace, tokenizer_name: str) -> list[Sample]:
    """Return the prompts that the flags ask for."""
    tokenizer = load_tokenizer(tokenizer_name)
    if args.dataset_name != "random":
        return file_samples(args, tokenizer, args.num_prompts)
    return random_samples(
        tokenizer,
        args.num_prompts,
        args.random_input_len,
        args.random_output_len,
        args.random_range_ratio,
        args.random_prefix_len,
        args.seed,
    )


def make_body(args: argparse.Namespace, model: str, sample: Sample) -> dict[str, Any]:
    """Return the request for a prompt: the fields that OpenAI has, and those that the flags ask for."""
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if args.backend == "openai-chat":
        body["messages"] = [{"role": "user", "content": sample.prompt}]
        body["max_completion_tokens"] = sample.output_len
    else:
        body["prompt"] = sample.prompt
        body["max_tokens"] = sample.output_len
    if args.ignore_eos:
        body["ignore_eos"] = True
    body |= {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    return {**body, **args.hyperparameter_path, **args.extra_body}


def summarise(args: argparse.Namespace, results: Sequence[Result], duration_s: float) -> dict[str, Any]:
    """Return the figures under the names that vLLM's results have; times in milliseconds."""
    good = [result for result in results if not result.error]
    num_in, num_out = sum(r.input_tokens for r in good), sum(r.output_tokens for r in good)
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(results) - len(good),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(good) / duration_s,
        "output_throughput": num_out / duration_s,
        "total_token_throughput": (num_in + num_out) / duration_s,
        **goodput(results, dict(args.goodput), duration_s),
    }
    times = latencies_ms(results)
    lengths = {
        "input_len": [float(r.input_tokens) for r in good],
        "output_len": [float(r.output_tokens) for r in good],
    }
    for name in args.percentile_metrics:
        unit, numbers = ("_ms", times[name]) if name in times else ("", lengths[name])
        figures |= spread(name, unit, numbers, args.metric_percentiles)
    return figures


def latencies_ms(results: Sequence[Result]) -> dict[str, list[float]]:
    """Return the times of the requests that were answered, by metric."""
    good = [result for result in results if not result.error]
    return {
        "ttft": [1e3 * r.ttft_s for r in good],
        "tpot": [1e3 * r.tpot_s for r in good if r.tpot_s is not None],
        "itl": [1e3 * gap for r in good for gap in r.gaps_s],
        "e2el": [1e3 * r.e2e_s for r in good],
    }


def _head(args: argparse.Namespace, model: str) -> dict[str, Any]:
    return {
        "benchmark": "serve",
        "machine": machine(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "backend": args.backend,
        "model_id": model,
        "dataset": args.dataset_name,
        "num_prompts": args.num_prompts,
        "request_rate": "inf" if args.request_rate == float("inf") else args.request_rate,
        "max_concurrency": args.max_concurrency,
        "seed": args.seed,
        **({"goodput_limits_ms": dict(args.goodput)} if args.goodput else {}),
        **dict(pair.split("=", 1) for pair in args.metadata),
    }


async def _warm_up(client: HttpClient, path: str, bodies: Sequence[dict[str, Any]], count: int) -> None:
    """Send the first requests and throw their times away."""
    for body in bodies[:count]:
        async for _ in client.stream(path, body):
            pass


def _finish(args: argparse.Namespace, run: Run) -> None:
    """Write the file if one is asked for, and print the JSON line."""
    if args.save_result:
        name = args.result_filename or f"{args.backend}-{time.strftime('%Y%m%d-%H%M%S')}.json"
        file = Path(args.result_dir) / name
        details = {"requests": [asdict(result) for result in run.results]} if args.save_detailed else {}
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({**run.figures, **details}) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError("--result-dir", f"cannot write {str(file)!r}: {error.strerror}") from None
        print(f"  written to {file}")
    print(json.dumps(run.figures))


def make_parser() -> CommandParser:
    """Return the parser of all flags."""
    parser = CommandParser("bench serve", "Send load to a running server of the OpenAI protocol and measure it.")
    parser.add_argument("--backend", choices=tuple(BACKENDS), default="openai", help="openai is /v1/completions")
    parser.add_argument("--base-url", help="address without /v1; else --host and --port")
    parser.add_argument("--host", default="127.0.0.1", help="of the server")
    parser.add_argument("--port", type=int, default=8000, help="of the server")
    parser.add_argument("--endpoint", help="path of the requests; else the backend's")
    add_key_flag(parser)
    parser.add_argument("--model", help="model to ask for; else the first that the server has")
    parser.add_argument("--served-model-name", help="name in the requests, where it differs from the model's")
    parser.add_argument("--tokenizer", help="folder of the tokenizer that makes and counts prompts; else the model's")
    add_dataset_flags(parser, "random")
    parser.add_argument("--num-prompts", type=positive_int, default=1000, help="number of requests")
    parser.add_argument("--random-input-len", type=positive_int, default=1024, help="random: tokens of a prompt")
    parser.add_argument("--random-output-len", type=positive_int, default=128, help="random: tokens asked for")
    parser.add_argument("--random-range-ratio", type=_ratio, default=0.0, help="random: lengths vary by this part")
    parser.add_argument("--random-prefix-len", type=int, default=0, help="random: tokens that all prompts share")
    parser.add_argument("--request-rate", type=request_rate, default=float("inf"), help="requests per second, Poisson")
    parser.add_argument("--max-concurrency", type=positive_int, help="most requests at once")
    parser.add_argument("--num-warmups", type=int, default=0, help="requests before, which do not count")
    parser.add_argument("--ignore-eos", action="store_true", help="every answer takes all its tokens")
    for name in SAMPLING:
        kind = int if name == "top_k" else float
        parser.add_argument("--" + name.replace("_", "-"), type=kind, help="sent with every request")
    parser.add_argument("--extra-body", type=json_mapping, default={}, help="JSON mapping of further fields")
    parser.add_argument("--hyperparameter-path", type=_yaml_mapping, default={}, help="YAML file of further fields")
    parser.add_argument("--percentile-metrics", type=_metrics, default="ttft,tpot,itl,e2el", help=", ".join(METRICS))
    parser.add_argument("--metric-percentiles", type=percent_list, default="99", help="such as 50,95,99")
    parser.add_argument(
        "--goodput", nargs="+", type=parse_limit, default=[], help="limits in ms, such as ttft:500 tpot:50 e2el:9000"
    )
    parser.add_argument("--plot", metavar="PNG", help="draw the distributions of the times (extra: bench)")
    parser.add_argument("--save-result", action="store_true", help="write the figures to a file")
    parser.add_argument("--save-detailed", action="store_true", help="with the times of every request")
    parser.add_argument("--result-dir", default=".", help="folder of the file")
    parser.add_argument("--result-filename", help="name of the file; else backend and time")
    parser.add_argument("--metadata", nargs="*", type=_pair, default=[], help="NAME=VALUE for the result")
    parser.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")
    return parser


def _metrics(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in METRICS:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(METRICS)}, got {name!r}")
    return names


def request_rate(text: str) -> float:
    """Return requests per second, inf included."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected requests per second, or inf, got {text}")
    return value


def _ratio(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a number in [0, 1), got {text}")
    return value


def _pair(text: str) -> str:
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return text


def _yaml_mapping(path: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {path!r}: {error}") from None
    if not isinstance(content, dict):
        raise argparse.ArgumentTypeError(f"{path!r} holds no mapping")
    return content
