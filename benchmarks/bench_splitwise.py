# SPDX-License-Identifier: Apache-2.0
"""What does it cost to compute a prompt on one node and its text on another one?

    python -m benchmarks.bench_splitwise [--shape benchmarks/shapes/qwen3-0.6b] [--parts copies latency ...] [--smoke]

Nodes are servers of the shape with random weights and one thread per engine, on a Redis of their own. Parts:

    copies      export and import of a prompt's blocks with their checksums, as ratios to one thread's memcpy of the
                same bytes in the same run, for caches of bfloat16 and int8
    latency     one prefill and one decode node, asked at the decode node, beside one mixed node: `ttft_ratio` of the
                time to the first token; `second_token` is the time from the first to the second token beyond the
                mixed node's time per output token, as a part of the prefill
    processor   streams asked at the prefill node, which the decode node decodes: `share` is what API processes, agents
                and Redis take beyond the API process of a node alone, over what the engines take
    redis       commands per request and bytes per token, with `global` and with `splitwise`, idle traffic subtracted
    prefixes    conversations whose turns are asked at either of two mixed nodes: tokens found in the prefix caches,
                over those of one node

`--smoke` measures less of everything, to try the benchmark itself.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import block_copies
from benchmarks.bench_http import Server, serving
from benchmarks.bench_isolation import make_model
from benchmarks.cluster_nodes import Redis, cpu_by_kind, metric, nodes, wait_until
from benchmarks.report import Row, make_parser, print_json, print_table
from benchmarks.shape_engine import SHAPE

IDLE_S = 4.0  # for the traffic of nodes that do nothing
REPORT_S = 1.0  # after which the metrics of a node have everything before
SHORT_PROMPT = 160  # of streams: more than the default of --splitwise-min-prompt
CONVERSATIONS = 8
WARM_UP = 2  # rounds that do not count


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        prompt, tokens, streams: tokens of a long prompt and of an answer, and streams at a time.
        rounds: of each measurement.
        turns, turn_tokens: of a conversation, and tokens that each turn adds.
    """

    prompt: int = 2048
    tokens: int = 64
    streams: int = 16
    rounds: int = 5
    turns: int = 5
    turn_tokens: int = 192


SMOKE = Sizes(prompt=192, tokens=8, streams=3, rounds=1, turns=2, turn_tokens=130)


class Bench:
    """The flags of every node, and prompts that no cache holds."""

    def __init__(self, flags: Sequence[str], sizes: Sizes, seed: int) -> None:
        self.flags, self.sizes = [*flags], sizes
        self._random = random.Random(seed)

    def prompt(self, num_tokens: int) -> list[int]:
        """Return a new prompt."""
        return [self._random.randrange(100, 3000) for _ in range(num_tokens)]

    def body(self, prompt: list[int]) -> Row:
        """Return a greedy completion of `tokens` tokens."""
        fields = {"model": "default", "max_tokens": self.sizes.tokens, "temperature": 0, "ignore_eos": True}
        return {**fields, "prompt": prompt}

    def latency(self) -> list[Row]:
        """Alternate between a mixed node and a pair; each prompt is new."""
        gaps, firsts, tpots = [], {"mixed": list[float](), "split": list[float]()}, []
        with Redis() as redis, serving(self.flags) as one, nodes(self.flags, redis, ("prefill", "decode")) as pair:
            for i in range(self.sizes.rounds + WARM_UP):
                for name, server in self._shuffled({"mixed": one, "split": pair[1]}):
                    times = server.stream_bodies([self.body(self.prompt(self.sizes.prompt))])[0]["times"]
                    if i < WARM_UP:
                        continue
                    firsts[name].append(times[0])
                    if name == "split":
                        gaps.append(times[:2][-1] - times[0])  # 0 where one event held both tokens
                    else:
                        tpots.append((times[-1] - times[0]) / (self.sizes.tokens - 1))
            wait_until(lambda: metric(pair[1], "kv_transfer_imported_tokens_total") > 0, "blocks have moved")
        prefill_s, tpot_s = statistics.median(firsts["mixed"]), statistics.median(tpots)
        return [
            {
                "prompt": self.sizes.prompt,
                "ttft_mixed_ms": prefill_s * 1e3,
                "ttft_split_ms": statistics.median(firsts["split"]) * 1e3,
                "ttft_ratio": statistics.median(firsts["split"]) / prefill_s,
                "tpot_ms": tpot_s * 1e3,
                "second_token_ms": statistics.median(gaps) * 1e3,
                "second_token": max(0.0, statistics.median(gaps) - tpot_s) / prefill_s,
            }
        ]

    def processor(self) -> list[Row]:
        """Compare processor time per token of a node alone with that of streams that cross two nodes."""
        num_tokens = self.sizes.rounds * self.sizes.streams * self.sizes.tokens
        with serving(self.flags) as one:
            alone = self._cpu_of_streams([one], one)
        with Redis() as redis, nodes(self.flags, redis, ("prefill", "decode")) as pair:
            redis_s = redis.counters()["s"]
            split = self._cpu_of_streams(pair, pair[0])
            redis_s = redis.counters()["s"] - redis_s
        beyond = split["api"] + split["agent"] + redis_s - alone["api"]
        parts = {"api_local": alone["api"], "api": split["api"], "agent": split["agent"], "redis": redis_s}
        per_token = {f"{name}_us": seconds / num_tokens * 1e6 for name, seconds in parts.items()}
        engine_us = split["engine"] / num_tokens * 1e6
        return [{"streams": self.sizes.streams, "engine_us": engine_us, **per_token, "share": beyond / split["engine"]}]

    def _cpu_of_streams(self, servers: Sequence[Server], asked: Server) -> Row:
        self._stream_all(asked)  # warms up
        before = cpu_by_kind(servers)
        for _ in range(self.sizes.rounds):
            self._stream_all(asked)
        after = cpu_by_kind(servers)
        return {kind: after[kind] - before[kind] for kind in ("api", "agent", "engine")}

    def _stream_all(self, asked: Server) -> None:
        answers = asked.stream_bodies([self.body(self.prompt(SHORT_PROMPT)) for _ in range(self.sizes.streams)])
        assert all(answer["times"] for answer in answers), answers

    def redis(self) -> list[Row]:
        """Count commands and bytes of streams that another node computes."""
        return [self._traffic("global", ("mixed", "mixed")), self._traffic("splitwise", ("prefill", "decode"))]

    def _traffic(self, scheduler: str, roles: Sequence[str]) -> Row:
        with Redis() as redis, nodes(self.flags, redis, roles, scheduler) as running:
            self._stream_all(running[0])
            idle, idle_s = _difference(redis, running, lambda: time.sleep(IDLE_S))
            found, busy_s = _difference(redis, running, lambda: self._rounds(running[0]))
        num_requests = self.sizes.rounds * self.sizes.streams
        own = {name: found[name] - idle[name] * busy_s / idle_s for name in found}
        return {
            "scheduler": scheduler,
            "requests": num_requests,
            "tokens_each": self.sizes.tokens,
            "commands_per_request": own["commands"] / num_requests,
            "commands_per_token": own["commands"] / (num_requests * self.sizes.tokens),
            "bytes_per_token": own["bytes"] / (num_requests * self.sizes.tokens),
            "idle_commands_per_s": idle["commands"] / idle_s,
        }

    def _rounds(self, asked: Server) -> None:
        for _ in range(self.sizes.rounds):
            self._stream_all(asked)

    def prefixes(self) -> list[Row]:
        """Let conversations go on at one node, and at random ones of two."""
        conversations = [
            [self.prompt(self.sizes.turn_tokens) for _ in range(self.sizes.turns)] for _ in range(CONVERSATIONS)
        ]
        with serving(self.flags) as one:
            alone = self._hits(conversations, [one])
        with Redis() as redis, nodes(self.flags, redis, ("mixed", "mixed")) as pair:
            shared = self._hits(conversations, pair)
        row = {"conversations": len(conversations), "turns": self.sizes.turns, "hits_one": alone, "hits_two": shared}
        return [{**row, "ratio": shared / alone}]

    def _hits(self, conversations: Sequence[Sequence[list[int]]], servers: Sequence[Server]) -> float:
        """Return how many tokens were found in the prefix caches."""
        draw = random.Random(0)
        for turn in range(self.sizes.turns):
            for conversation in draw.sample([*conversations], len(conversations)):
                prompt = [token for part in conversation[: turn + 1] for token in part]
                draw.choice([*servers]).stream_bodies([self.body(prompt)])
        return sum(metric(server, "prefix_cache_token_num_total") for server in servers)

    def _shuffled(self, servers: dict[str, Server]) -> list[tuple[str, Server]]:
        return self._random.sample([*servers.items()], len(servers))


def _difference(redis: Redis, servers: Sequence[Server], run: Callable[[], None]) -> tuple[Row, float]:
    """Return the bytes and the commands of the nodes while something runs, and the seconds that it takes."""

    def counters() -> Row:
        time.sleep(REPORT_S)
        num_commands = sum(metric(server, "cluster_redis_commands_total") for server in servers)
        return {"commands": num_commands, "bytes": redis.counters()["bytes"]}

    before, begin = counters(), time.perf_counter()
    run()
    after = counters()
    return {name: after[name] - before[name] for name in after}, time.perf_counter() - begin


def measure_copies(args: argparse.Namespace, sizes: Sizes) -> list[Row]:
    """Measure both kinds of caches."""
    rounds = 4 * sizes.rounds
    return [block_copies.measure(str(args.shape), cache, sizes.prompt, rounds) for cache in ("auto", "int8")]


def make_flags(args: argparse.Namespace, sizes: Sizes, folder: Path) -> list[str]:
    """Return the flags of every node."""
    max_model_len = max(sizes.prompt, sizes.turns * sizes.turn_tokens) + sizes.tokens
    flags = ["--load-choices", "dummy", "--quantization", args.quantization, "--max-model-len", str(max_model_len)]
    flags += ["--max-num-seqs", str(max(sizes.streams, CONVERSATIONS)), "--disable-log-requests"]
    return [str(make_model(args.shape, folder)), *flags]


def main() -> None:
    """Print a table per part and one JSON line."""
    parts = ("copies", "latency", "processor", "redis", "prefixes")
    parser = make_parser(__doc__)
    parser.add_argument("--shape", type=Path, default=Path(SHAPE))
    parser.add_argument("--quantization", default="w4a8")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="measure little, to try the benchmark itself")
    args = parser.parse_args()
    os.environ["FD_NUM_THREADS"] = "1"  # of the engines, which inherit it
    sizes, results = SMOKE if args.smoke else Sizes(), list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(make_flags(args, sizes, Path(folder)), sizes, args.seed)
        for part in args.parts:
            rows = measure_copies(args, sizes) if part == "copies" else getattr(bench, part)()
            results += ({"part": part, **row} for row in rows)
            print_table(part, rows)
    print_json({"benchmark": "splitwise", "shape": str(args.shape), "results": results})


if __name__ == "__main__":
    main()
