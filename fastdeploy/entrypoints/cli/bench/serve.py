# SPDX-License-Identifier: Apache-2.0
"""`fastdeploy bench serve`: latencies and throughput of a running OpenAI-compatible server, this one or another."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from fastdeploy.core.errors import ConfigError
from fastdeploy.entrypoints.cli.bench import speculation
from fastdeploy.entrypoints.cli.bench.datasets import (
    SampleRequest,
    add_dataset_flags,
    file_requests,
    load_tokenizer,
    random_requests,
)
from fastdeploy.entrypoints.cli.bench.report import (
    RequestResult,
    describe_machine,
    goodput,
    latencies_ms,
    parse_goodput_limit,
    plot_latencies,
    print_metrics,
    require_matplotlib,
    summarize,
)
from fastdeploy.entrypoints.cli.http_client import HttpClient, ServerError, UnreachableError
from fastdeploy.entrypoints.cli.parser import (
    CommandParser,
    add_api_key_flag,
    get_api_key,
    json_mapping,
    non_negative_int,
    positive_int,
    ratio,
    server_url,
)

BACKENDS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
METRICS = ("ttft", "tpot", "itl", "e2el", "input_len", "output_len")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


def main(arguments: list[str]) -> int:
    """Run the benchmark; return 0 if every request succeeded, else 1."""
    args = make_parser().parse_own(arguments)
    if args.plot:
        require_matplotlib()
    try:
        run = asyncio.run(run_benchmark(args))
    except (ServerError, UnreachableError) as error:
        print(f"fastdeploy: error: {error}", file=sys.stderr)
        return 1
    print_metrics(run.title, {k: v for k, v in run.metrics.items() if not k.startswith(speculation.PREFIX)})
    speculation.print_speculation(run.metrics)
    for message in run.errors[:3]:
        print(f"  failed: {message}")
    if args.plot:
        plot_latencies(args.plot, run.title, {"": latencies_ms(run.results)}, dict(args.goodput))
        print(f"  plot written to {args.plot}")
    if args.save_result:
        _save_result(args, run)
    print(json.dumps(run.metrics))
    return 1 if run.errors else 0


@dataclass(frozen=True)
class BenchmarkRun:
    """The results of one benchmark.

    Attributes:
        title: model and address, for the heading of the table.
        metrics: description of the run and metrics, as in the JSON line.
    """

    title: str
    metrics: dict[str, Any]
    results: list[RequestResult]

    @property
    def errors(self) -> list[str]:
        """The distinct errors of failed requests, sorted."""
        return sorted({result.error for result in self.results if result.error})


async def run_benchmark(args: argparse.Namespace) -> BenchmarkRun:
    """Send the requests that the flags describe and measure them.

    Raises:
        ConfigError: tokenizer or dataset cannot be loaded.
        ServerError, UnreachableError: there is no OpenAI-compatible server at the address.
    """
    path = args.endpoint or BACKENDS[args.backend]
    base_url = args.base_url or f"http://{args.host}:{args.port}"
    client = HttpClient(base_url, get_api_key(args))
    model = args.model or await HttpClient(f"{base_url}/v1", get_api_key(args)).first_model()
    requests = load_requests(args, args.tokenizer or model)
    bodies = [make_body(args, args.served_model_name or model, request) for request in requests]
    await _warm_up(client, path, bodies, args.num_warmups)
    before = await speculation.read_counters(client)
    times = arrival_times(len(bodies), args.request_rate, args.seed)
    with tqdm(total=len(bodies), desc="Requests", disable=args.disable_tqdm) as bar:
        results, duration_s = await send_requests(client, path, bodies, times, args.max_concurrency, bar.update)
    drafting = speculation.speculation_metrics(before, await speculation.read_counters(client))
    metrics = {**_describe_run(args, model), **calculate_metrics(args, results, duration_s), **drafting}
    return BenchmarkRun(f"{model} at {base_url.partition('://')[2]}{path}", metrics, results)


def load_requests(args: argparse.Namespace, tokenizer_name: str) -> list[SampleRequest]:
    """Return the requests of the dataset."""
    tokenizer = load_tokenizer(tokenizer_name)
    if args.dataset_name != "random":
        return file_requests(args, tokenizer, args.num_prompts)
    return random_requests(
        tokenizer,
        args.num_prompts,
        args.random_input_len,
        args.random_output_len,
        args.random_range_ratio,
        args.random_prefix_len,
        args.seed,
    )


def make_body(args: argparse.Namespace, model: str, request: SampleRequest) -> dict[str, Any]:
    """Return the JSON body of a request: fields of OpenAI's API, and those that flags add."""
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if args.backend == "openai-chat":
        body["messages"] = [{"role": "user", "content": request.prompt}]
        body["max_completion_tokens"] = request.output_len
    else:
        body["prompt"] = request.prompt
        body["max_tokens"] = request.output_len
    if args.ignore_eos:
        body["ignore_eos"] = True
    body |= {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    return {**body, **args.hyperparameter_path, **args.extra_body}


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Return when to send each request, in seconds from the start: a Poisson process, or all at once if rate is inf."""
    if math.isinf(rate):
        return [0.0] * count
    rng, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times


async def send_requests(
    client: HttpClient,
    path: str,
    bodies: Sequence[dict[str, Any]],
    times: Sequence[float],
    max_concurrency: int | None,
    on_done: Callable[[], object],
) -> tuple[list[RequestResult], float]:
    """Send each body at its time, with at most `max_concurrency` in flight; return the results and the duration (s)."""
    semaphore = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    begin = time.perf_counter()

    async def send(body: dict[str, Any], time_s: float) -> RequestResult:
        await asyncio.sleep(begin + time_s - time.perf_counter())
        async with semaphore:
            result = await _send_request(client, path, body)
        on_done()
        return result

    results = await asyncio.gather(*(send(body, time_s) for body, time_s in zip(bodies, times, strict=True)))
    return list(results), time.perf_counter() - begin


async def _send_request(client: HttpClient, path: str, body: dict[str, Any]) -> RequestResult:
    result = RequestResult()
    begin = last = time.perf_counter()
    usage: dict[str, Any] | None = None
    try:
        async for event in client.stream(path, body):
            usage = event.get("usage") or usage
            if not any(_has_text(choice) for choice in event.get("choices", ())):
                continue
            now = time.perf_counter()
            if last == begin:
                result.ttft_s = now - begin
            else:
                result.gaps_s.append(now - last)
            last = now
    except (ServerError, UnreachableError) as error:
        result.error = str(error)
        return result
    result.e2e_s = time.perf_counter() - begin
    if usage is None:
        result.error = "the server sent no usage, so the tokens cannot be counted"
    else:
        result.input_tokens, result.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    return result


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta", {})
    keys = ("content", "reasoning", "reasoning_content", "tool_calls")
    return bool(choice.get("text") or any(delta.get(key) for key in keys))


async def _warm_up(client: HttpClient, path: str, bodies: Sequence[dict[str, Any]], count: int) -> None:
    """Send the first requests one after the other, without measuring them."""
    for body in bodies[:count]:
        async for _ in client.stream(path, body):
            pass


def calculate_metrics(args: argparse.Namespace, results: Sequence[RequestResult], duration_s: float) -> dict[str, Any]:
    """Return the metrics under the names that `vllm bench serve` uses; times are in milliseconds."""
    succeeded = [result for result in results if not result.error]
    num_input, num_output = sum(r.input_tokens for r in succeeded), sum(r.output_tokens for r in succeeded)
    metrics: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(succeeded),
        "failed": len(results) - len(succeeded),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(succeeded) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        **goodput(results, dict(args.goodput), duration_s),
    }
    times = latencies_ms(results)
    lengths = {
        "input_len": [float(r.input_tokens) for r in succeeded],
        "output_len": [float(r.output_tokens) for r in succeeded],
    }
    for name in args.percentile_metrics:
        unit, values = ("_ms", times[name]) if name in times else ("", lengths[name])
        metrics |= summarize(name, unit, values, args.metric_percentiles)
    return metrics


def _describe_run(args: argparse.Namespace, model: str) -> dict[str, Any]:
    return {
        "benchmark": "serve",
        "machine": describe_machine(),
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


def _save_result(args: argparse.Namespace, run: BenchmarkRun) -> None:
    name = args.result_filename or f"{args.backend}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    file = Path(args.result_dir) / name
    details = {"requests": [asdict(result) for result in run.results]} if args.save_detailed else {}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**run.metrics, **details}) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError("--result-dir", f"cannot write {str(file)!r}: {error.strerror}") from None
    print(f"  result written to {file}")


def make_parser() -> CommandParser:
    """Return the parser of `fastdeploy bench serve`."""
    parser = CommandParser("bench serve", "Send requests to a running OpenAI-compatible server and measure it.")
    _add_server_flags(parser)
    add_dataset_flags(parser)
    parser.add_argument("--num-prompts", type=positive_int, default=1000, help="number of requests")
    parser.add_argument("--random-input-len", type=positive_int, default=1024, help="random: prompt tokens per request")
    parser.add_argument("--random-output-len", type=positive_int, default=128, help="random: output tokens per request")
    parser.add_argument(
        "--random-range-ratio", type=ratio, default=0.0, help="random: lengths vary by this fraction, 0 to below 1"
    )
    parser.add_argument(
        "--random-prefix-len", type=non_negative_int, default=0, help="random: prompt tokens that all requests share"
    )
    parser.add_argument(
        "--request-rate", type=request_rate, default=float("inf"), help="requests per second (Poisson process), or inf"
    )
    parser.add_argument("--max-concurrency", type=positive_int, help="maximum number of requests in flight")
    parser.add_argument("--num-warmups", type=non_negative_int, default=0, help="warm-up requests, not measured")
    _add_request_flags(parser)
    _add_report_flags(parser)
    return parser


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", choices=tuple(BACKENDS), default="openai", help="API to use; openai and vllm: /v1/completions"
    )
    url_help = "address of the server, with or without /v1; overrides --host and --port"
    parser.add_argument("--base-url", "--url", type=server_url, help=url_help)
    parser.add_argument("--host", default="127.0.0.1", help="host of the server")
    parser.add_argument("--port", type=int, default=8000, help="port of the server")
    parser.add_argument("--endpoint", help="path of the requests; default: the backend's")
    add_api_key_flag(parser)
    parser.add_argument("--model", help="model to request; default: the first of /v1/models")
    parser.add_argument("--served-model-name", help="model name in the requests; default: --model")
    parser.add_argument("--tokenizer", help="tokenizer that generates and counts prompt tokens; default: the model's")


def _add_request_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ignore-eos", action="store_true", help="generate every answer to its full length")
    for name in SAMPLING:
        kind = int if name == "top_k" else float
        parser.add_argument("--" + name.replace("_", "-"), type=kind, help="sent with every request")
    parser.add_argument("--extra-body", type=json_mapping, default={}, help="further request fields, as JSON object")
    parser.add_argument("--hyperparameter-path", type=_yaml_mapping, default={}, help="YAML file of further fields")


def _add_report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--percentile-metrics",
        type=_metric_names,
        default="ttft,tpot,itl,e2el",
        help=f"metrics to report, from {', '.join(METRICS)}",
    )
    parser.add_argument(
        "--metric-percentiles", type=_percentiles, default="99", help="percentiles to report, such as 50,95,99"
    )
    parser.add_argument(
        "--goodput",
        nargs="+",
        type=parse_goodput_limit,
        default=[],
        help="limits in milliseconds, such as ttft:500 tpot:50 e2el:9000; count the requests that meet all of them",
    )
    parser.add_argument(
        "--plot", metavar="PNG", help="plot the distributions of latencies (requires fastdeploy[bench])"
    )
    parser.add_argument("--save-result", action="store_true", help="write the JSON to a file")
    parser.add_argument("--save-detailed", action="store_true", help="include every request in that file")
    parser.add_argument("--result-dir", default=".", help="folder of that file")
    parser.add_argument("--result-filename", help="name of that file; default: backend and time")
    parser.add_argument("--metadata", nargs="*", type=_pair, default=[], help="NAME=VALUE pairs to add to the JSON")
    parser.add_argument("--disable-tqdm", action="store_true", help="hide the progress bar")


def _metric_names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in METRICS:
            raise argparse.ArgumentTypeError(f"expected metrics from {', '.join(METRICS)}, got {name!r}")
    return names


def _percentiles(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"expected numbers from 0 to 100, got {text}")
    return values


def request_rate(text: str) -> float:
    """Return requests per second; may be inf."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a positive number or inf, got {text}")
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
        raise argparse.ArgumentTypeError(f"{path!r} does not contain a mapping")
    return content
