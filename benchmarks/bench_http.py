# SPDX-License-Identifier: Apache-2.0
"""How much slower is streaming over HTTP than the engine alone, with the same prompts and parameters?

    python -m benchmarks.bench_http [--model demo] [--streams 16] [--max-tokens 256] [--workers 1]

For each method a server and an engine of the same configuration are loaded. The engine, the baseline, runs in this
process; the server's client runs in a process of its own (benchmarks/stream_client.py) on the same cores. Rounds
alternate, and `ratio` is the median over rounds of HTTP tokens/s to engine tokens/s. On a shared machine look at
`engine_share_of_cpu`, the engine's share of the processor time of serving. The run fails if a streamed text differs
from the engine's.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Row, make_parser, print_report
from benchmarks.workloads import sessions
from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine
from fastdeploy.hub.model_path import resolve_model_path

READY = re.compile(r"^Ready: http://([\d.]+):(\d+)/v1 ")
SPECULATION: dict[str, dict[str, Any]] = {
    "naive": {"method": "naive"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 5},
}
NUM_SOURCES = 16
_ids = count()


class Server:
    """A server process and the client process that sends it requests."""

    def __init__(self, process: subprocess.Popen[str], client: subprocess.Popen[str], host: str, port: int) -> None:
        self.process, self._client = process, client
        self.host, self.port = host, port

    def stream(self, prompts: list[list[int]], max_tokens: int) -> list[Row]:
        """Stream the answers to all prompts at once; return what the client measured."""
        common = {"model": "default", "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
        return self.stream_bodies([{**common, "prompt": prompt} for prompt in prompts])

    def stream_bodies(self, bodies: list[Row], key: str = "") -> list[Row]:
        """Stream the answers to several requests at once, with an API key; return what the client measured."""
        assert self._client.stdin is not None and self._client.stdout is not None
        streamed = [{**body, "stream": True} for body in bodies]
        job = {"host": self.host, "port": self.port, "bodies": streamed, "key": key}
        self._client.stdin.write(json.dumps(job) + "\n")
        self._client.stdin.flush()
        results: list[Row] = json.loads(self._client.stdout.readline())
        return results

    def cpu_s(self) -> list[float]:
        """Return the processor seconds of the API, the engine and the client."""
        api = self._api()
        engine = [pid for pid in self.children() if pid not in api]
        return [sum(map(cpu_s, pids)) for pids in (api, engine, [self._client.pid])]

    def children(self) -> list[int]:
        """Return its processes but the first."""
        listed = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=False)
        return [int(line) for line in listed.stdout.split()]

    def _api(self) -> list[int]:
        """Return the API processes: the server's own process and its workers."""
        workers = [pid for pid in self.children() if "openai.api_worker" in Path(f"/proc/{pid}/cmdline").read_text()]
        return [self.process.pid, *workers]


def cpu_s(pid: int) -> float:
    """Return the processor seconds of all threads of a process."""
    return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3), which Python lacks for other processes


@contextmanager
def serving(flags: Sequence[str]) -> Iterator[Server]:
    """Run a server and a client for it."""
    command = [sys.executable, "-m", "fastdeploy.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    client = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.stream_client"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        found = next(match for line in process.stdout if (match := READY.match(line)))
        yield Server(process, client, found.group(1), int(found.group(2)))
    finally:
        client.kill()
        process.terminate()
        process.wait(30)


def make_engine(args: argparse.Namespace, method: str) -> Engine:
    """Build the engine of the baseline."""
    config = EngineConfig(
        model=args.model,
        max_model_len=args.max_prompt_tokens + args.max_tokens,
        cache=CacheConfig(enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=args.streams),
        speculative=parse_speculative_config(SPECULATION[method]),
    )
    return Engine.from_config(config)


def server_flags(args: argparse.Namespace, method: str) -> list[str]:
    """Return the same configuration as flags of the server."""
    flags = {
        "--max-model-len": args.max_prompt_tokens + args.max_tokens,
        "--max-num-seqs": args.streams,
        "--speculative-config": json.dumps(SPECULATION[method]),
        "--workers": args.workers,
    }
    return [args.model, "--no-enable-prefix-caching", *(str(part) for pair in flags.items() for part in pair)]


def make_prompts(tokenizer: Tokenizer, args: argparse.Namespace) -> list[list[int]]:
    """Return one prompt per stream: a few functions to rewrite, cut at different lengths so that all differ."""
    sources = sessions("editing", tokenizer, min(args.streams, NUM_SOURCES), 1, 10**6, 1, args.seed)
    return [
        sources[i % NUM_SOURCES][0].prompt[: args.max_prompt_tokens - 1 - 4 * (i // NUM_SOURCES)]
        for i in range(args.streams)
    ]


def run_engine(engine: Engine, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
    """Run all prompts on the engine; return the seconds and the tokens of each."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    begin = time.perf_counter()
    for prompt in prompts:
        request_id = f"bench-{next(_ids)}"
        tokens[request_id] = []
        engine.add_request(GenerationRequest(request_id, prompt, params))
    while engine.has_unfinished():
        for delta in engine.step():
            tokens[delta.request_id] += delta.token_ids
    return time.perf_counter() - begin, list(tokens.values())


def compare(args: argparse.Namespace, tokenizer: Tokenizer, method: str) -> Row:
    """Alternate between the engine and the server; return medians and percentiles."""
    prompts, engine = make_prompts(tokenizer, args), make_engine(args, method)
    num_tokens = args.streams * args.max_tokens
    engine_times, http_times, streams = [], [], []
    cpu = np.zeros(3)  # seconds of API, engine, client
    with serving(server_flags(args, method)) as server:
        for _ in range(args.rounds):
            engine_s, token_ids = run_engine(engine, prompts, args.max_tokens)
            before = server.cpu_s()
            answers = server.stream(prompts, args.max_tokens)
            cpu += np.subtract(server.cpu_s(), before)
            for prompt, tokens, answer in zip(prompts, token_ids, answers, strict=True):
                expected = tokenizer.decode(prompt + tokens).removeprefix(tokenizer.decode(prompt))
                assert answer["text"] == expected, f"expected {expected!r}, got {answer['text']!r}"
            engine_times.append(engine_s)
            http_times.append(max(answer["end"] for answer in answers))
            streams += answers
    return {
        "method": method,
        "engine_tokens_per_s": num_tokens / statistics.median(engine_times),
        "http_tokens_per_s": num_tokens / statistics.median(http_times),
        "ratio": statistics.median(engine_s / http_s for engine_s, http_s in zip(engine_times, http_times)),
        **percentiles("ttft_ms", [answer["times"][0] for answer in streams]),
        **percentiles("itl_ms", [b - a for answer in streams for a, b in zip(answer["times"], answer["times"][1:])]),
        "api_us_per_token": cpu[0] / (args.rounds * num_tokens) * 1e6,
        "client_us_per_token": cpu[2] / (args.rounds * num_tokens) * 1e6,
        "engine_share_of_cpu": cpu[1] / cpu.sum(),
    }


def percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    """Return the median and the 99th percentile in milliseconds."""
    ordered = sorted(seconds)
    return {f"{name}_p50": ordered[len(ordered) // 2] * 1e3, f"{name}_p99": ordered[len(ordered) * 99 // 100] * 1e3}


def main() -> None:
    """Print one row per method and one JSON line."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--methods", nargs="+", choices=list(SPECULATION), default=list(SPECULATION))
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--max-prompt-tokens", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--workers", type=int, default=1, help="API processes of the server")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_pretrained(resolve_model_path(args.model))
    rows = [compare(args, tokenizer, method) for method in args.methods]
    title = f"{args.model}: {args.streams} streams over HTTP, greedy, {args.max_tokens} tokens each"
    print_report("http", title, rows, model=args.model, streams=args.streams)


if __name__ == "__main__":
    main()
