# SPDX-License-Identifier: Apache-2.0
"""Tokens per second with and without speculation, in one run, on work made of real local text.

    python -m benchmarks.bench_speculation [--model demo] [--workload editing loop] [--batch 1 4 16 64]
        [--method ngram mtp+suffix '{"method": "suffix", "num_speculative_tokens": 16}'] [--num-speculative-tokens 8]
    python -m benchmarks.bench_speculation --replay [--shape benchmarks/shapes/qwen3-0.6b] [--quantization w4a8]

Without --replay the model answers for itself; with it, random weights of a shape compute every step and the recorded
answers are emitted (benchmarks.replay); a layer for multi-token prediction computes its drafts too, in whose place come
those that the demonstration model's layer makes of the same answers. The answers of the workloads in --own-answers are
that model's own, which its layer was trained to foresee; the others are those of the text. A name that ends in -fixed
runs without the adaptive length. Engines take turns a few steps at a time (benchmarks.turns), until naive has decoded
for --seconds; they share weights and the memory of the cache. Naive has two engines: what `naive again` differs from
naive by is noise that the `error` of a ratio (one standard error, by its stretches) does not show. The last lines name
what is slower than naive. Outputs are shared within a session of one round only. `rows_per_step` are the target's rows.
Milliseconds are those of a step: `draft` of the proposer, `model` of the target's layers, head, sampling and
verification, `verify` of writing and reading their buffers, `overhead` of the rest. `conversion` is how much of the
mean acceptance length became speed: speed_up over mean_acceptance_length. A loop has --turns turns, 16 by default, as
many as the local text allows for two groups of 64 sessions; recorded agents take hundreds, of which one is the first,
that nobody can know. --figures writes the results as pictures.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.replay import LayerRecord, record_answers
from benchmarks.report import print_json, print_table
from benchmarks.turns import Lane, Timed, Turns, speed_up
from benchmarks.workloads import WORKLOADS, sessions
from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.model_config import ModelConfig, resolve_model_path
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.config.speculative_config import MAX_MODEL_STEPS, METHODS, SpeculativeConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine import engine_factory
from fastdeploy.engine.engine import Engine
from fastdeploy.models import loader
from fastdeploy.models.architecture import Architecture
from fastdeploy.models.weight_source import WeightSource
from fastdeploy.models.weights import DecoderWeights
from fastdeploy.ops.attention import KVCache

NAIVE, NAIVE_AGAIN, FIXED = "naive", "naive again", "-fixed"
HOST_METHODS = ("ngram", "suffix")  # these draft from text alone
ALL_METHODS = [*(method for method in METHODS if method != NAIVE), "mtp+ngram", "mtp+suffix"]
SLOWER = 0.02  # than naive, beyond what naive over naive shows: what nothing may be
MODEL_STEPS = 3  # drafts of a model per step; text that goes on may follow them
DRAFT_MODEL = "demo/draft"  # of the demonstration model; for another one, method is a JSON mapping
SHAPE = "benchmarks/shapes/qwen3-0.6b"
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def method_mapping(method: str, k: int) -> dict[str, Any]:
    """Return the speculative configuration that a name, such as mtp+suffix, or a JSON mapping stands for."""
    if method.startswith("{"):
        mapping: dict[str, Any] = json.loads(method)
        return mapping
    if method == NAIVE:
        return {"method": method}
    if method.endswith(FIXED):
        return method_mapping(method.removesuffix(FIXED), k) | {"adaptive": False}
    if method in HOST_METHODS:
        return {"method": method, "num_speculative_tokens": k}
    first, _, extension = method.partition("+")
    if not extension:
        model = {"model": DRAFT_MODEL} if first == "draft_model" else {}
        return {"method": first, "num_speculative_tokens": min(k, MODEL_STEPS), **model}
    more = {"mtp_strategy": f"with_{extension}", "num_model_steps": min(k, MODEL_STEPS)}
    return {"method": first, "num_speculative_tokens": k, **more}


def make_timed(method: str, args: argparse.Namespace, memory: OneMemory, record: LayerRecord | None = None) -> Timed:
    """Build the engine of a method; `record` says what a layer drafts in a replay.

    Raises:
        ConfigError: this model cannot do it.
    """
    length = args.max_prompt_tokens + args.max_tokens
    num_blocks = max(args.batch) * -(-length // CacheConfig.block_size)
    config = EngineConfig(
        model=args.shape if args.replay else args.model,
        load_choices="dummy" if args.replay else EngineConfig.load_choices,
        quantization=QuantizationConfig.from_value(args.quantization),
        max_model_len=length,
        cache=CacheConfig(num_blocks=num_blocks * memory.num_engines),
        scheduler=SchedulerConfig(max_num_seqs=max(args.batch)),
        speculative=SpeculativeConfig.from_mapping(method_mapping(method, args.num_speculative_tokens)),
    )
    return Timed(memory.build(config), CLOCKS[args.clock], args.replay, record)


class OneMemory:
    """Builds engines that read one copy of the weights and have their blocks in one cache, mixed at random.

    Equal engines whose weights lie elsewhere in memory differ by up to a tenth, those whose caches do by a twentieth.
    """

    def __init__(self, num_engines: int) -> None:
        self.num_engines = num_engines
        self._weights: dict[str, DecoderWeights] = {}
        self._caches: list[KVCache] = []  # by layer
        self._block_ids: list[int] = []  # that no engine has

    def build(self, config: EngineConfig) -> Engine:
        """Build an engine; `config.cache.num_blocks` are those of all engines together."""
        with (
            patch.object(loader, "load_weights", partial(self._load_once, loader.load_weights)),
            patch.object(engine_factory, "_allocate", partial(self._allocate_once, engine_factory._allocate)),
        ):
            engine = Engine.from_config(config)
        pool = engine.scheduler.kv.pool
        if not self._block_ids:
            self._block_ids = random.Random(0).sample(range(pool.num_blocks), pool.num_blocks)
        own = [self._block_ids.pop() for _ in range(pool.num_blocks // self.num_engines)]
        pool._free = OrderedDict.fromkeys(own)
        return engine

    def _load_once(
        self,
        load: Callable[..., DecoderWeights],
        config: ModelConfig,
        architecture: Architecture,
        source: WeightSource,
        *rest: Any,
    ) -> DecoderWeights:
        key = f"{config} {type(source)} {rest[-1]}"  # a checkpoint, its own weights or random ones, their format
        if key not in self._weights:
            self._weights[key] = load(config, architecture, source, *rest)
        return self._weights[key]

    def _allocate_once(self, allocate: Callable[..., list[KVCache]], *sizes: Any) -> list[KVCache]:
        self._caches = self._caches or allocate(*sizes)
        return self._caches


def make_lanes(args: argparse.Namespace) -> list[Lane]:
    """Build naive, the methods that this model can do, and naive again, an engine of its own."""
    memory = OneMemory(len(args.method) + 2)
    lanes = [Lane(NAIVE, make_timed(NAIVE, args, memory))]
    record = LayerRecord(MAX_MODEL_STEPS, args.max_prompt_tokens + args.max_tokens) if args.replay else None
    for method in args.method:
        kind = method_mapping(method, 1).get("method")
        if args.replay and kind not in (*HOST_METHODS, "mtp", NAIVE):
            print(f"{method} is left out: its model's weights are random here, and it would draft noise")
            continue
        try:
            lanes.append(Lane(method, make_timed(method, args, memory, record if kind == "mtp" else None)))
        except ConfigError as error:
            print(f"{method} is left out: {error}")
    return [*lanes, Lane(NAIVE_AGAIN, make_timed(NAIVE, args, memory))]


def compare(
    args: argparse.Namespace, tokenizer: Tokenizer, workload: str, batch: int, lanes: list[Lane]
) -> list[dict[str, Any]]:
    """Let the lanes take turns until naive has decoded for --seconds; return a row of figures for each."""
    lanes = [Lane(lane.name, lane.timed) for lane in lanes]
    num_turns = args.turns if workload == "loop" else 1
    texts = sessions(
        workload, tokenizer, batch * args.groups, num_turns, args.max_prompt_tokens, args.max_tokens, args.seed
    )
    if args.replay and workload in args.own_answers:
        texts = record_answers(texts, args.max_prompt_tokens + args.max_tokens)
    temperature = 1.0 if workload == "random" else 0.0
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=args.max_tokens, ignore_eos=True)
    turns = Turns(lanes, params, args.stretch_ms / 1000)
    first_turn = args.first_turn if num_turns > 1 else 0
    for round_ in count():
        for group in range(args.groups):
            salt, own = f"{workload}-{round_}-{group}", texts[group * batch : (group + 1) * batch]
            for number, side_by_side in enumerate(zip(*own)):
                turns.run(side_by_side, salt, is_timed=number >= first_turn)
        if not lanes[0].spent.num_steps:
            raise SystemExit(
                f"--max-tokens: an answer of {args.max_tokens} tokens ends in the first stretch; expected more"
            )
        if lanes[0].spent.total_s >= args.seconds:
            return [_row(workload, batch, lanes[0], lane) for lane in lanes]


def _row(workload: str, batch: int, naive: Lane, lane: Lane) -> dict[str, Any]:
    spent, (ratio, error) = lane.spent, speed_up(naive, lane)
    length = spent.num_emitted / spent.num_request_steps
    step_ms = 1000 / spent.num_steps
    return {
        "workload": workload,
        "batch": batch,
        "method": lane.name,
        "tokens_per_s": spent.tokens_per_s,
        "speed_up": ratio,
        "error": error,
        "mean_acceptance_length": length,
        "conversion": ratio / length,
        "rows_per_step": (spent.num_request_steps + spent.num_drafts) / spent.num_steps,
        "draft_ms": spent.draft_s * step_ms,
        "model_ms": spent.model_s * step_ms,
        "verify_ms": spent.verify_s * step_ms,
        "overhead_ms": (spent.total_s - spent.draft_s - spent.model_s - spent.verify_s) * step_ms,
    }


def print_slower(rows: Sequence[dict[str, Any]]) -> None:
    """Say which methods are slower than naive by more than SLOWER beyond what naive over naive shows."""
    noise = {(row["workload"], row["batch"]): abs(1 - row["speed_up"]) for row in rows if row["method"] == NAIVE_AGAIN}
    judged = [row for row in rows if row["method"] not in (NAIVE, NAIVE_AGAIN)]
    missing = [1 - SLOWER - noise[row["workload"], row["batch"]] - row["speed_up"] for row in judged]
    sure = [miss > 2 * row["error"] for row, miss in zip(judged, missing)]
    unsure = [0 < miss <= 2 * row["error"] for row, miss in zip(judged, missing)]
    for title, chosen in (
        (f"more than {SLOWER:.0%} slower than naive, beyond naive over naive, of {len(judged)}", sure),
        ("perhaps, within two errors", unsure),
    ):
        found = [f"{row['workload']} {row['batch']} {row['method']}" for row, is_so in zip(judged, chosen) if is_so]
        print(f"{title}: {', '.join(found) or 'none'}")


def main() -> None:
    """Print one row per workload, batch size and method, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--replay", action="store_true", help="emit recorded answers on random weights of --shape")
    parser.add_argument("--shape", default=SHAPE, help="folder with a config.json")
    parser.add_argument(
        "--own-answers",
        nargs="*",
        default=["plain"],
        choices=list(WORKLOADS),
        help="workloads whose replayed answers are the demonstration model's own (default: plain)",
    )
    parser.add_argument("--quantization", default="none", help="as the flag of fastdeploy serve (default: none)")
    parser.add_argument("--method", nargs="+", default=ALL_METHODS, help="names or JSON mappings")
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    parser.add_argument("--max-prompt-tokens", type=int, default=900)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--groups", type=int, default=2, help="different texts per slot of the batch")
    parser.add_argument("--turns", type=int, default=16, help="of a loop; agents take hundreds")
    parser.add_argument("--first-turn", type=int, default=0, help="of a loop that is timed; those before only run")
    parser.add_argument("--seconds", type=float, default=3.0, help="that naive decodes for, in whole rounds of groups")
    parser.add_argument("--stretch-ms", type=float, default=20.0, help="of naive, after which the next engine goes on")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: processor time of all threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figures", type=Path, help="folder for pictures (SVG; needs the extra `bench`)")
    args = parser.parse_args()
    draw_speculation: Callable[..., None] | None = None
    if args.figures is not None:
        from benchmarks.figures import draw_speculation  # what it needs may be missing: rather now than at the end
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("demo" if args.replay else args.model))
    lanes = make_lanes(args)
    gc.collect()
    gc.freeze()  # as the engine's process does: no lane is to pay for looking through what all of them hold
    target = f"{args.shape}, replay" if args.replay else args.model
    title = f"{target}, quantization {args.quantization}, K = {args.num_speculative_tokens}"
    rows: list[dict[str, Any]] = []
    for workload, batch in [(workload, batch) for workload in args.workload for batch in args.batch]:
        rows += (found := compare(args, tokenizer, workload, batch, lanes))
        print_table(title, list(found[0]), [list(row.values()) for row in found])
    print_slower(rows)
    if draw_speculation:
        draw_speculation([row for row in rows if row["method"] != NAIVE_AGAIN], title, args.figures)
    options = {key: value for key, value in vars(args).items() if key != "figures"}
    print_json({"benchmark": "speculation", "options": options, "results": rows})


if __name__ == "__main__":
    main()
