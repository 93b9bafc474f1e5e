# SPDX-License-Identifier: Apache-2.0
"""How much faster than plain decoding is each method of speculation, on work made of real local text?

    python -m benchmarks.bench_speculation [--model demo] [--workload editing loop] [--batch 1 4 16 64]
        [--method ngram mtp+suffix '{"method": "suffix", "num_speculative_tokens": 16}'] [--num-speculative-tokens 8]
        [--temperature 0 0.7]
    python -m benchmarks.bench_speculation --replay [--shape benchmarks/shapes/qwen3-0.6b] [--layers N]
        [--quantization w4a8] [--alike 0.5]

Without --replay the model generates its own answers. With it, random weights of a shape compute each step and emit
recorded answers (benchmarks/replay.py); drafts of the demonstration model's layer and heads replace those of random
weights. The recorded answers of the workloads in --own-answers are those of the demonstration model, which its layer
and heads were trained to predict; the others are the text's own. Random weights route neighbouring rows apart; with
--alike this share of all tokens has one embedding in the target, so that more rows choose the same experts. The suffix
-fixed on a method switches adaptive length off.

The workloads chat-* are conversations with an instruct model (benchmarks/chats.py): plain decoding gives the answers,
which end where the model ends them and which later prompts contain; then all engines give them again.

The engines share weights and cache memory and alternate in stretches of a few steps (benchmarks/interleave.py) until
naive, the baseline, has decoded for --seconds. `naive again` is a second plain engine: its ratio to the first is noise
that `error` (one standard error over the stretches) does not show. The last lines name the methods slower than naive.
Cached outputs are shared only within a session of one round.

`rows_per_step` counts rows of the target. Milliseconds are per step: `draft` of the proposer, `model` of layers, head,
sampling and verification, `verify` of writing and reading their buffers, `overhead` of the rest. `conversion` is
speed_up / mean_acceptance_length. A loop has --turns turns; recorded agents take hundreds, and only in the first is
there nothing to repeat. --figures draws the results.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from benchmarks.chats import CHATS, Partner, conversations
from benchmarks.interleave import Comparison, Contender, TimedEngine, speed_up
from benchmarks.replay import DraftRecord, make_tokens_alike, record_answers
from benchmarks.report import Row, make_parser, print_json, print_table
from benchmarks.shape_engine import SHAPE, shape_of_layers
from benchmarks.shape_heads import write_shape_head
from benchmarks.workloads import WORKLOADS, Session, sessions
from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.config.speculative_config import MAX_DRAFTS, METHODS
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine import engine_factory
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.memory_plan import allocate_kv_caches
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.models import loader
from fastdeploy.models.architecture import Architecture
from fastdeploy.models.weight_source import DummySource, WeightSource
from fastdeploy.models.weights import DecoderWeights
from fastdeploy.ops.caches import LayerCache

NAIVE, NAIVE_AGAIN, FIXED = "naive", "naive again", "-fixed"
TEXT_METHODS = ("ngram", "suffix")  # draft from text alone
ALL_METHODS = [*(method for method in METHODS if method != NAIVE), "mtp+ngram", "mtp+suffix"]
MAX_SLOWDOWN = 0.02  # against naive, beyond that of naive again: what is slower is named
MODEL_STEPS = 3  # draft passes per step; matches may extend their drafts
HEADS = {"eagle": "demo/eagle", "eagle3": "demo/eagle3", "mlp_speculator": "demo/mlp", "medusa": "demo/medusa"}
DRAFTING_MODELS = {"draft_model": "demo/draft", **HEADS}  # of the demonstration model; others need a JSON mapping
REPLAYED = ("mtp", *HEADS)  # random weights of such a model take the place of trained ones
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def method_mapping(method: str, k: int) -> dict[str, Any]:
    """Return the speculative configuration of a name, such as mtp+suffix, or of a JSON mapping."""
    if method.startswith("{"):
        mapping: dict[str, Any] = json.loads(method)
        return mapping
    if method == NAIVE:
        return {"method": method}
    if method.endswith(FIXED):
        return method_mapping(method.removesuffix(FIXED), k) | {"adaptive": False}
    if method in TEXT_METHODS:
        return {"method": method, "num_speculative_tokens": k}
    first, _, extension = method.partition("+")
    if not extension:
        model = {"model": DRAFTING_MODELS[first]} if first in DRAFTING_MODELS else {}
        return {"method": first, "num_speculative_tokens": min(k, MODEL_STEPS), **model}
    more = {"mtp_strategy": f"with_{extension}", "num_model_steps": min(k, MODEL_STEPS)}
    return {"method": first, "num_speculative_tokens": k, **more}


def make_timed(
    method: str, args: argparse.Namespace, memory: SharedMemory, record: DraftRecord | None = None
) -> TimedEngine:
    """Build the engine of a method; `record` has the drafts of a drafting model for a replay.

    Raises:
        ConfigError: the model does not support the method.
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
        speculative=parse_speculative_config(method_mapping(method, args.num_speculative_tokens)),
    )
    return TimedEngine(memory.build(config), CLOCKS[args.clock], args.replay, record)


class SharedMemory:
    """Builds engines that share one copy of the weights and one cache, in which their blocks are mixed at random.

    Equal engines with weights elsewhere in memory differ by up to a tenth, those with caches elsewhere by a twentieth.
    """

    def __init__(self, num_engines: int, alike: float = 0.0) -> None:
        """Share memory among this many engines; `alike` is the share of tokens with the same random embedding."""
        self.num_engines, self._alike = num_engines, alike
        self._weights: dict[str, DecoderWeights] = {}
        self._caches: list[LayerCache] = []  # by layer
        self._block_ids: list[int] = []  # of no engine yet

    def build(self, config: EngineConfig) -> Engine:
        """Build an engine; `config.cache.num_blocks` counts the blocks of all engines."""
        with (
            patch.object(loader, "load_weights", partial(self._load_once, loader.load_weights)),
            patch.object(engine_factory, "allocate_kv_caches", partial(self._allocate_once, allocate_kv_caches)),
        ):
            engine = Engine.from_config(config)
        pool = engine.scheduler.kv_cache_manager.pool
        if not self._block_ids:
            self._block_ids = random.Random(0).sample(range(pool.num_blocks), pool.num_blocks)
        pool.allocate(pool.num_blocks)  # those of the other engines stay allocated
        pool.release([self._block_ids.pop() for _ in range(pool.num_blocks // self.num_engines)])
        return engine

    def _load_once(
        self,
        load: Callable[..., DecoderWeights],
        config: ModelConfig,
        architecture: Architecture,
        source: WeightSource,
        *rest: Any,
    ) -> DecoderWeights:
        key = f"{config} {type(source)} {rest[-1]}"  # checkpoint, stored or random weights, format
        if key not in self._weights:
            if self._alike and isinstance(source, DummySource):
                make_tokens_alike(source, architecture.names.embedding, self._alike)
            self._weights[key] = load(config, architecture, source, *rest)
        return self._weights[key]

    def _allocate_once(self, allocate: Callable[..., list[LayerCache]], *sizes: Any) -> list[LayerCache]:
        self._caches = self._caches or allocate(*sizes)
        return self._caches


def make_contenders(args: argparse.Namespace) -> list[Contender]:
    """Build naive, the methods that the model supports, and naive again, an engine of its own."""
    memory = SharedMemory(len(args.method) + 2, args.alike)
    contenders = [Contender(NAIVE, make_timed(NAIVE, args, memory))]
    for method in args.method:
        mapping = method_mapping(method, args.num_speculative_tokens)
        kind = mapping["method"]
        if args.replay and kind not in (*TEXT_METHODS, *REPLAYED, NAIVE):
            print(f"{method} is left out: the random weights of its model would draft noise")
            continue
        try:
            timed = make_replayed(mapping, args, memory) if args.replay else make_timed(method, args, memory)
            contenders.append(Contender(method, timed))
        except ConfigError as error:
            print(f"{method} is left out: {error}")
    return [*contenders, Contender(NAIVE_AGAIN, make_timed(NAIVE, args, memory))]


def make_replayed(mapping: dict[str, Any], args: argparse.Namespace, memory: SharedMemory) -> TimedEngine:
    """Build an engine of random weights that proposes the drafts of the demonstration model's drafting model.

    Raises:
        ConfigError: the model does not support the method.
    """
    kind = mapping["method"]
    if kind not in REPLAYED:
        return make_timed(json.dumps(mapping), args, memory)
    drafting = {key: value for key, value in mapping.items() if key in ("method", "model")}
    record = DraftRecord(drafting, MAX_DRAFTS, args.max_prompt_tokens + args.max_tokens)
    with TemporaryDirectory() as parent:
        if kind in HEADS:
            mapping = mapping | {"model": f"{parent}/{kind}"}
            write_shape_head(kind, ModelConfig.from_pretrained(args.shape), Path(mapping["model"]))
        return make_timed(json.dumps(mapping), args, memory, record)


@dataclass(frozen=True)
class Case:
    """What is compared: a workload at a temperature, so many requests at a time."""

    workload: str
    temperature: float
    batch: int

    @classmethod
    def all(cls, args: argparse.Namespace) -> Iterator[Case]:
        """Yield those of the command's flags; random tokens have one temperature."""
        for workload, batch in product(args.workload, args.batch):
            for temperature in [1.0] if workload == "random" else args.temperature:
                yield cls(workload, temperature, batch)

    @classmethod
    def of(cls, row: Row) -> Case:
        """Return that of a result."""
        return cls(row["workload"], row["temperature"], row["batch"])

    def params(self, max_tokens: int) -> SamplingParams:
        """Return the parameters of requests; only conversations end where the model ends them."""
        ignore_eos = self.workload not in CHATS
        return SamplingParams(temperature=self.temperature, seed=1, max_tokens=max_tokens, ignore_eos=ignore_eos)

    def __str__(self) -> str:
        """Name it in one line."""
        return f"{self.workload} {self.batch}" + (f" at {self.temperature:g}" if self.temperature else "")


def make_texts(args: argparse.Namespace, tokenizer: Tokenizer, case: Case, naive: TimedEngine) -> list[Session]:
    """Return what the contenders are asked; in conversations naive has answered."""
    workload, count = case.workload, case.batch * args.groups
    if workload in CHATS:
        partner = Partner(naive.engine, tokenizer, case.params(args.max_tokens))
        return conversations(workload, partner, count, args.max_prompt_tokens, args.seed)
    num_turns = args.turns if workload == "loop" else 1
    texts = sessions(workload, tokenizer, count, num_turns, args.max_prompt_tokens, args.max_tokens, args.seed)
    if args.replay and workload in args.own_answers:
        return record_answers(texts, args.max_prompt_tokens + args.max_tokens)
    return texts


def compare(args: argparse.Namespace, tokenizer: Tokenizer, case: Case, contenders: list[Contender]) -> list[Row]:
    """Let the contenders alternate until naive has decoded for --seconds; return a row for each."""
    contenders = [Contender(contender.name, contender.timed) for contender in contenders]
    naive, batch = contenders[0], case.batch
    texts = make_texts(args, tokenizer, case, naive.timed)
    comparison = Comparison(contenders, case.params(args.max_tokens), args.stretch_ms / 1000)
    for round_ in count():
        for group in range(args.groups):
            salt, in_group = f"{case.workload}-{round_}-{group}", texts[group * batch : (group + 1) * batch]
            for turns in zip(*in_group):
                comparison.run(turns, salt)
        if not naive.total.num_steps:
            raise SystemExit(
                f"--max-tokens: an answer of {args.max_tokens} tokens ends in the first stretch; expected more"
            )
        if naive.total.total_s >= args.seconds:
            break
    return [_row(case, naive, contender) for contender in contenders]


def _row(case: Case, naive: Contender, contender: Contender) -> Row:
    total, (ratio, error) = contender.total, speed_up(naive, contender)
    length = total.num_emitted / total.num_request_steps
    step_ms = 1000 / total.num_steps
    return {
        **vars(case),
        "method": contender.name,
        "tokens_per_s": total.tokens_per_s,
        "speed_up": ratio,
        "error": error,
        "mean_acceptance_length": length,
        "conversion": ratio / length,
        "rows_per_step": (total.num_request_steps + total.num_drafts) / total.num_steps,
        "draft_ms": total.draft_s * step_ms,
        "model_ms": total.model_s * step_ms,
        "verify_ms": total.verify_s * step_ms,
        "overhead_ms": (total.total_s - total.draft_s - total.model_s - total.verify_s) * step_ms,
    }


def print_slower(rows: Sequence[Row]) -> None:
    """Name the methods slower than naive by more than MAX_SLOWDOWN beyond what naive over naive shows."""
    noise = {Case.of(row): abs(1 - row["speed_up"]) for row in rows if row["method"] == NAIVE_AGAIN}
    sure, unsure = list[str](), list[str]()
    compared = [row for row in rows if row["method"] not in (NAIVE, NAIVE_AGAIN)]
    for row in compared:
        slowdown = 1 - MAX_SLOWDOWN - noise[Case.of(row)] - row["speed_up"]
        if slowdown > 0:
            names = sure if slowdown > 2 * row["error"] else unsure
            names.append(f"{Case.of(row)} {row['method']}")
    title = f"more than {MAX_SLOWDOWN:.0%} slower than naive, beyond naive over naive, of {len(compared)}"
    print(f"{title}: {', '.join(sure) or 'none'}\nperhaps, within two errors: {', '.join(unsure) or 'none'}")


def check_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse flags that contradict each other."""
    if not args.replay and (args.layers is not None or args.alike):
        parser.error("--layers, --alike: only with --replay")
    if not 0.0 <= args.alike <= 1.0:
        parser.error(f"--alike: expected 0 to 1, got {args.alike}")
    if args.replay and set(args.workload) & set(CHATS):
        parser.error("--replay: expected recorded answers, but a conversation has the model's own")
    if args.figures is not None and len(args.temperature) > 1:
        parser.error("--figures: expected one --temperature")


def main() -> None:
    """Print one row per workload, batch size and method, and one JSON line."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--replay", action="store_true", help="emit recorded answers on random weights of --shape")
    parser.add_argument("--shape", default=SHAPE, help="folder with a config.json")
    parser.add_argument("--layers", type=int, help="number of layers, if it is not that of --shape")
    parser.add_argument("--alike", type=float, default=0.0, help="with --replay: share of tokens with one embedding")
    parser.add_argument(
        "--own-answers",
        nargs="*",
        default=["plain"],
        choices=list(WORKLOADS),
        help="workloads whose replayed answers are the demonstration model's own (default: plain)",
    )
    parser.add_argument("--quantization", default="none", help="as the flag of fastdeploy serve (default: none)")
    parser.add_argument("--method", nargs="+", default=ALL_METHODS, help="names or JSON mappings")
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), choices=[*WORKLOADS, *CHATS])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0], help="but random has 1 (default: 0)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    parser.add_argument("--max-prompt-tokens", type=int, default=900)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--groups", type=int, default=2, help="different texts per slot of the batch")
    parser.add_argument("--turns", type=int, default=16, help="of a loop (default: 16)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of decoding by naive, in whole rounds (default: 3)")
    parser.add_argument(
        "--stretch-ms", type=float, default=20.0, help="of naive before the next engine runs (default: 20)"
    )
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: processor time of all threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figures", type=Path, help="folder for charts (SVG; requires the extra `bench`)")
    args = parser.parse_args()
    check_flags(parser, args)
    draw_speculation: Callable[..., None] | None = None
    if args.figures is not None:
        from benchmarks.figures import draw_speculation  # fails now, not at the end, if matplotlib is missing
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("demo" if args.replay else args.model))
    if set(args.workload) & set(CHATS) and not tokenizer.chat_templates.templates:
        parser.error(f"--workload: {args.model} has no chat template")
    with shape_of_layers(args.shape, args.layers) as folder:
        contenders = make_contenders(argparse.Namespace(**vars(args) | {"shape": folder}))
    gc.collect()
    gc.freeze()  # as the engine process does, so that collections do not scan the objects of all engines
    layers = f" of {args.layers} layers" if args.layers else ""
    target = f"{args.shape}{layers}, replay" if args.replay else args.model
    title = f"{target}, quantization {args.quantization}, K = {args.num_speculative_tokens}"
    rows: list[Row] = []
    for case in Case.all(args):
        rows += (found := compare(args, tokenizer, case, contenders))
        print_table(title, found)
    print_slower(rows)
    if draw_speculation:
        draw_speculation([row for row in rows if row["method"] != NAIVE_AGAIN], title, args.figures)
    options = {key: value for key, value in vars(args).items() if key != "figures"}
    name = "chats" if set(args.workload) <= set(CHATS) else "speculation"
    print_json({"benchmark": name, "options": options, "results": rows})


if __name__ == "__main__":
    main()
