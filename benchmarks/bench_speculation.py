# SPDX-License-Identifier: Apache-2.0
"""Tokens per second with and without speculation, in one run, on work made of real local text.

    python -m benchmarks.bench_speculation [--model demo] [--workload editing loop] [--batch 1 4 16 64]
        [--method ngram mtp+suffix '{"method": "suffix", "num_speculative_tokens": 16}'] [--num-speculative-tokens 8]
    python -m benchmarks.bench_speculation --replay [--shape benchmarks/shapes/qwen3-0.6b] [--quantization w4a8]

Without --replay the model answers for itself; with it, random weights of a shape compute every step and the recorded
answers are emitted (benchmarks.replay); a layer for multi-token prediction computes its drafts too, in whose place come
those that the demonstration model's layer makes of the same answers. The answers of the workloads in --own-answers are
that model's own, which its layer was trained to foresee; the others are those of the text. A name that ends in -fixed
runs without the adaptive length. Methods take turns, group by group; all engines read one copy of the weights, as
equal engines whose weights lie elsewhere differ by up to a tenth. Naive has two engines: the ratio of naive to naive
shows the noise. Outputs are shared within a session of one round only. `rows_per_step` are the rows of the target.
Milliseconds are those of a step: `draft` of the proposer, `model` of the target's layers, head, sampling and
verification, `verify` of writing and reading their buffers, `overhead` of the rest. `conversion` is how much of the
mean acceptance length became speed: speed_up over mean_acceptance_length. A loop has --turns turns, 16 by default, as
many as the local text allows for two groups of 64 sessions; recorded agents take hundreds, of which one is the first,
that nobody can know. --figures writes the results as pictures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.replay import LayerRecord, record_answers, replay_answers, replay_layer
from benchmarks.report import print_json, print_table
from benchmarks.workloads import WORKLOADS, Session, Turn, sessions
from fastdeploy.config.engine_config import EngineConfig, SchedulerConfig
from fastdeploy.config.model_config import ModelConfig, resolve_model_path
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.config.speculative_config import MAX_MODEL_STEPS, METHODS, SpeculativeConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.request import GenerationRequest, TokenArray
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine
from fastdeploy.models import loader
from fastdeploy.models.architecture import Architecture
from fastdeploy.models.weight_source import WeightSource
from fastdeploy.models.weights import DecoderWeights
from fastdeploy.worker.model_runner import ModelRunner

NAIVE, NAIVE_AGAIN, FIXED = "naive", "naive again", "-fixed"
HOST_METHODS = ("ngram", "suffix")  # these draft from text alone
ALL_METHODS = [*(method for method in METHODS if method != NAIVE), "mtp+ngram", "mtp+suffix"]
MODEL_STEPS = 3  # drafts of a model per step; text that goes on may follow them
DRAFT_MODEL = "demo/draft"  # of the demonstration model; for another one, method is a JSON mapping
SHAPE = "benchmarks/shapes/qwen3-0.6b"
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}

_ids = count()


@dataclass
class Spent:
    """What decoding came to, from the first token of the last request to start.

    Attributes:
        num_emitted, num_request_steps, num_drafts: of all decoding steps, counted for each request of a step.
    """

    total_s: float = 0.0
    draft_s: float = 0.0
    model_s: float = 0.0
    verify_s: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    num_emitted: int = 0
    num_request_steps: int = 0
    num_drafts: int = 0

    def add(self, other: Spent) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Timed:
    """An engine that tells how long its proposer and its runner take, and may replay answers."""

    def __init__(
        self, engine: Engine, clock: Callable[[], float], replay: bool, record: LayerRecord | None = None
    ) -> None:
        self.engine, self.clock = engine, clock
        self.draft_s = self.model_s = self.verify_s = 0.0
        self.answers: dict[str, list[int]] | None = None
        if replay:
            self.answers = {}
            replay_answers(engine, self.answers)
        self.record, self.drafts = record, dict[str, list[TokenArray]]()
        if record is not None:
            replay_layer(engine, self.drafts)
        for part, name, bucket in (
            (engine.proposer, "observe", "draft_s"),
            (engine.proposer, "propose", "draft_s"),
            (engine.runner, "run", "verify_s"),
        ):
            setattr(part, name, self._timed(getattr(part, name), bucket))
        assert isinstance(engine.runner, ModelRunner)
        for routine in (engine.runner._forward, engine.runner._choose):
            run: Any = self._timed(routine.run, "model_s", "verify_s")
            routine.run = run  # type: ignore[method-assign]

    def _timed(self, function: Callable[..., Any], bucket: str, within: str | None = None) -> Callable[..., Any]:
        """Return the function, its time counted in one bucket and not in that of the function that it is part of."""

        def call(*arguments: Any) -> Any:
            begin = self.clock()
            result = function(*arguments)
            seconds = self.clock() - begin
            setattr(self, bucket, getattr(self, bucket) + seconds)
            if within is not None:
                setattr(self, within, getattr(self, within) - seconds)
            return result

        return call

    def run(self, turns: list[Turn], params: SamplingParams, salt: str) -> tuple[Spent, list[list[int]]]:
        """Run prompts side by side; return what decoding took and the texts."""
        self._read(turns, salt)
        texts: dict[str, list[int]] = {}
        before = self.engine.stats()
        for turn in turns:
            request_id = f"bench-{next(_ids)}"
            texts[request_id] = []
            if self.answers is not None:
                self.answers[request_id] = turn.answer
            if self.record is not None:
                self.drafts[request_id] = self.record.drafts_of(turn.prompt, turn.answer)
            self.engine.add_request(GenerationRequest(request_id, turn.prompt, params, cache_salt=salt))
        while not all(texts.values()):
            self._step(texts)
        spent = Spent(draft_s=-self.draft_s, model_s=-self.model_s, verify_s=-self.verify_s)
        begin = self.clock()
        while self.engine.has_unfinished():
            spent.num_tokens += self._step(texts)
            spent.num_steps += 1
        after = self.engine.stats()
        spent.num_emitted = after.num_emitted_tokens - before.num_emitted_tokens
        spent.num_request_steps = after.num_steps - before.num_steps
        spent.num_drafts = after.num_draft_tokens - before.num_draft_tokens
        spent.add(Spent(self.clock() - begin, self.draft_s, self.model_s, self.verify_s))
        return spent, list(texts.values())

    def _read(self, turns: list[Turn], salt: str) -> None:
        """Leave the prompts in the cache, so that all begin in one step: none decodes while others are read."""
        params = SamplingParams(temperature=0.0, max_tokens=1)
        for turn in turns:
            self.engine.add_request(GenerationRequest(f"read-{next(_ids)}", turn.prompt, params, cache_salt=salt))
        while self.engine.has_unfinished():
            self.engine.step()

    def _step(self, texts: dict[str, list[int]]) -> int:
        deltas = self.engine.step()
        for delta in deltas:
            texts[delta.request_id] += delta.token_ids
        return sum(len(delta.token_ids) for delta in deltas)


@dataclass
class Lane:
    """One method and what it came to."""

    name: str
    timed: Timed
    tokens_per_s: list[float] = field(default_factory=list)
    spent: Spent = field(default_factory=Spent)
    texts: list[list[int]] = field(default_factory=list)

    def run(self, group: list[Session], params: SamplingParams, salt: str, first_turn: int) -> None:
        """Run a group's turns one after the other, its sessions side by side; time those from `first_turn` on."""
        spent, self.texts = Spent(), []
        for number, turns in enumerate(zip(*group)):
            one, texts = self.timed.run(list(turns), params, salt)
            if number >= first_turn:
                spent.add(one)
            self.texts += texts
        self.tokens_per_s.append(spent.num_tokens / spent.total_s)
        self.spent.add(spent)


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


def make_timed(method: str, args: argparse.Namespace, record: LayerRecord | None = None) -> Timed:
    """Build the engine of a method; `record` says what a layer drafts in a replay.

    Raises:
        ConfigError: this model cannot do it.
    """
    config = EngineConfig(
        model=args.shape if args.replay else args.model,
        load_choices="dummy" if args.replay else EngineConfig.load_choices,
        quantization=QuantizationConfig.from_value(args.quantization),
        max_model_len=args.max_prompt_tokens + args.max_tokens,
        scheduler=SchedulerConfig(max_num_seqs=max(args.batch)),
        speculative=SpeculativeConfig.from_mapping(method_mapping(method, args.num_speculative_tokens)),
    )
    return Timed(Engine.from_config(config), CLOCKS[args.clock], args.replay, record)


@contextmanager
def one_copy_of_weights() -> Iterator[None]:
    """Let all engines that are built meanwhile read the same weights.

    Equal engines whose weights lie elsewhere in memory differ by up to a tenth.
    """
    load, loaded = loader.load_weights, dict[str, DecoderWeights]()

    def load_once(config: ModelConfig, architecture: Architecture, source: WeightSource, *rest: Any) -> DecoderWeights:
        key = f"{config} {type(source)} {rest[-1]}"  # a checkpoint, its own weights or random ones, their format
        if key not in loaded:
            loaded[key] = load(config, architecture, source, *rest)
        return loaded[key]

    with patch.object(loader, "load_weights", load_once):
        yield


def make_lanes(args: argparse.Namespace) -> list[Lane]:
    """Build naive, the methods that this model can do, and naive again, an engine of its own."""
    lanes = [Lane(NAIVE, make_timed(NAIVE, args))]
    record = LayerRecord(MAX_MODEL_STEPS, args.max_prompt_tokens + args.max_tokens) if args.replay else None
    for method in args.method:
        kind = method_mapping(method, 1).get("method")
        if args.replay and kind not in (*HOST_METHODS, "mtp"):
            print(f"{method} is left out: its model's weights are random here, and it would draft noise")
            continue
        try:
            lanes.append(Lane(method, make_timed(method, args, record if kind == "mtp" else None)))
        except ConfigError as error:
            print(f"{method} is left out: {error}")
    return [*lanes, Lane(NAIVE_AGAIN, make_timed(NAIVE, args))]


def compare(
    args: argparse.Namespace, tokenizer: Tokenizer, workload: str, batch: int, lanes: list[Lane]
) -> list[dict[str, Any]]:
    """Interleave the lanes; return a row of figures for each method."""
    lanes = [Lane(lane.name, lane.timed) for lane in lanes]
    turns = args.turns if workload == "loop" else 1
    texts = sessions(
        workload, tokenizer, batch * args.groups, turns, args.max_prompt_tokens, args.max_tokens, args.seed
    )
    if args.replay and workload in args.own_answers:
        texts = record_answers(texts, args.max_prompt_tokens + args.max_tokens)
    temperature = 1.0 if workload == "random" else 0.0
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=args.max_tokens, ignore_eos=True)
    for round_ in range(args.rounds):
        for number in range(args.groups):
            for lane in lanes:
                group, salt = texts[number * batch : (number + 1) * batch], f"{workload}-{round_}-{number}"
                lane.run(group, params, salt, args.first_turn if turns > 1 else 0)
                assert lane.texts == lanes[0].texts, f"{lane.name} changed a text"
    noise = statistics.median(b / a for a, b in zip(lanes[0].tokens_per_s, lanes[-1].tokens_per_s))
    return [_row(workload, batch, lanes[0], lane, noise) for lane in lanes[:-1]]


def _row(workload: str, batch: int, naive: Lane, lane: Lane, noise: float) -> dict[str, Any]:
    spent = lane.spent
    speed_up = statistics.median(b / a for a, b in zip(naive.tokens_per_s, lane.tokens_per_s))
    length = spent.num_emitted / spent.num_request_steps
    step_ms = 1000 / spent.num_steps
    return {
        "workload": workload,
        "batch": batch,
        "method": lane.name,
        "tokens_per_s": statistics.median(lane.tokens_per_s),
        "speed_up": speed_up,
        "naive_to_naive": noise,
        "mean_acceptance_length": length,
        "conversion": speed_up / length,
        "rows_per_step": (spent.num_request_steps + spent.num_drafts) / spent.num_steps,
        "draft_ms": spent.draft_s * step_ms,
        "model_ms": spent.model_s * step_ms,
        "verify_ms": spent.verify_s * step_ms,
        "overhead_ms": (spent.total_s - spent.draft_s - spent.model_s - spent.verify_s) * step_ms,
    }


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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: processor time of all threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figures", type=Path, help="folder for pictures (SVG; needs the extra `bench`)")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("demo" if args.replay else args.model))
    with one_copy_of_weights():
        lanes = make_lanes(args)
    cases = [(workload, batch) for workload in args.workload for batch in args.batch]
    rows = [row for workload, batch in cases for row in compare(args, tokenizer, workload, batch, lanes)]
    target = f"{args.shape}, replay" if args.replay else args.model
    title = f"{target}, quantization {args.quantization}, K = {args.num_speculative_tokens}"
    print_table(title, list(rows[0]), [list(row.values()) for row in rows])
    if args.figures is not None:
        from benchmarks.figures import draw_speculation

        draw_speculation(rows, title, args.figures)
    options = {key: value for key, value in vars(args).items() if key != "figures"}
    print_json({"benchmark": "speculation", "options": options, "results": rows})


if __name__ == "__main__":
    main()
