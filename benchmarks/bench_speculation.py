# SPDX-License-Identifier: Apache-2.0
"""Tokens per second with and without speculation, in one run, on work made of real code.

    python -m benchmarks.bench_speculation [--model demo] [--method ngram suffix] [--workload editing loop]
        [--batch 1 4] [--num-speculative-tokens 5]

`editing` asks once for each function, `loop` comes back for it turn after turn, as an agent does. Methods take turns,
group by group; naive runs twice, so that the ratio of naive to naive shows the noise. Outputs are shared within a group
of one round only.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from benchmarks.report import print_json, print_table
from benchmarks.workloads import agent_loops, code_editing
from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.model_config import resolve_model_path
from fastdeploy.config.speculative_config import SpeculativeConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine

# Prompts of one group: [turn][slot of the batch]
Group = list[list[list[int]]]
NAIVE, NAIVE_AGAIN = "naive", "naive again"

_ids = count()


@dataclass
class Lane:
    """One method's engine and what it came to."""

    name: str
    engine: Engine
    tokens_per_s: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)

    def mean_acceptance_length(self) -> float:
        stats = self.engine.stats()
        return stats.num_emitted_tokens / max(1, stats.num_steps)


def make_lane(name: str, args: argparse.Namespace, batch: int) -> Lane:
    """Build the engine of one lane: a method's, or one that decodes plainly."""
    mapping: dict[str, Any] = {"method": "naive"}
    if name not in (NAIVE, NAIVE_AGAIN):
        mapping = {"method": name, "num_speculative_tokens": args.num_speculative_tokens}
    if name == "draft_model":
        mapping["model"] = args.draft_model
    config = EngineConfig(
        model=args.model,
        max_model_len=args.max_prompt_tokens + args.max_tokens,
        cache=CacheConfig(enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=batch),
        speculative=SpeculativeConfig.from_mapping(mapping),
    )
    return Lane(name, Engine.from_config(config))


def run_turn(lane: Lane, prompts: list[list[int]], max_tokens: int, salt: str) -> tuple[int, float]:
    """Run prompts together; return output tokens and seconds of decoding, from the first token of the last to start."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    index_of: dict[str, int] = {}
    for index, prompt in enumerate(prompts):
        request_id = f"bench-{next(_ids)}"
        index_of[request_id] = index
        lane.engine.add_request(GenerationRequest(request_id, prompt, params, cache_salt=salt))
    texts: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
    begin, num_tokens = 0.0, 0
    while lane.engine.has_unfinished():
        deltas = lane.engine.step()
        if all(texts.values()):
            num_tokens += sum(len(delta.token_ids) for delta in deltas)
        for delta in deltas:
            texts[index_of[delta.request_id]] += delta.token_ids
        if not begin and all(texts.values()):
            begin = time.perf_counter()
    lane.texts += [texts[index] for index in range(len(prompts))]
    return num_tokens, time.perf_counter() - begin


def run_group(lane: Lane, group: Group, max_tokens: int, salt: str) -> None:
    """Run a group's turns one after the other and note its tokens per second of decoding."""
    lane.texts = []
    results = [run_turn(lane, prompts, max_tokens, salt) for prompts in group]
    lane.tokens_per_s.append(sum(tokens for tokens, _ in results) / sum(seconds for _, seconds in results))


def compare(args: argparse.Namespace, tokenizer: Tokenizer, workload: str, batch: int) -> list[dict[str, Any]]:
    """Interleave the lanes and return each method's medians of ratios to naive."""
    groups = WORKLOADS[workload](tokenizer, batch, args)
    naive, *lanes, again = (make_lane(name, args, batch) for name in (NAIVE, *args.method, NAIVE_AGAIN))
    for round_ in range(args.rounds):
        for number, group in enumerate(groups):
            for lane in (naive, *lanes, again):
                run_group(lane, group, args.max_tokens, salt=f"{round_}-{number}")
                assert lane.texts == naive.texts, "speculation changed a text"
    rows = []
    for lane in lanes:
        ratio = statistics.median(b / a for a, b in zip(naive.tokens_per_s, lane.tokens_per_s))
        length = lane.mean_acceptance_length()
        stats = lane.engine.stats()
        rows.append(
            {
                "workload": workload,
                "batch": batch,
                "method": lane.name,
                "naive_tokens_per_s": statistics.median(naive.tokens_per_s),
                "tokens_per_s": statistics.median(lane.tokens_per_s),
                "ratio": ratio,
                "naive_to_naive": statistics.median(b / a for a, b in zip(naive.tokens_per_s, again.tokens_per_s)),
                "mean_acceptance_length": length,
                "acceptance_rate": stats.num_accepted_tokens / max(1, stats.num_draft_tokens),
                "conversion": ratio / length,
            }
        )
    return rows


def _editing(tokenizer: Tokenizer, batch: int, args: argparse.Namespace) -> list[Group]:
    prompts = code_editing(tokenizer, batch * args.groups, args.max_prompt_tokens, args.seed)
    return [[prompts[i * batch : (i + 1) * batch]] for i in range(args.groups)]


def _loop(tokenizer: Tokenizer, batch: int, args: argparse.Namespace) -> list[Group]:
    loops = agent_loops(tokenizer, batch * args.groups, args.turns, args.max_prompt_tokens, args.seed)
    return [[list(turn) for turn in zip(*loops[i * batch : (i + 1) * batch])] for i in range(args.groups)]


WORKLOADS: dict[str, Callable[[Tokenizer, int, argparse.Namespace], list[Group]]] = {
    "editing": _editing,
    "loop": _loop,
}


def main() -> None:
    """Print one row per workload, batch size and method, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--method", nargs="+", default=["ngram", "suffix"])
    parser.add_argument("--draft-model", default="demo/draft", help="of method draft_model")
    parser.add_argument("--workload", nargs="+", default=["editing", "loop"], choices=list(WORKLOADS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--max-prompt-tokens", type=int, default=900)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--groups", type=int, default=4, help="different prompts per batch slot")
    parser.add_argument("--turns", type=int, default=4, help="of a loop")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_pretrained(resolve_model_path(args.model))
    cases = [(workload, batch) for workload in args.workload for batch in args.batch]
    rows = [row for workload, batch in cases for row in compare(args, tokenizer, workload, batch)]
    title = f"{args.model}: real code, greedy, K = {args.num_speculative_tokens}"
    print_table(title, list(rows[0]), [list(row.values()) for row in rows])
    print_json({"benchmark": "speculation", "model": args.model, "k": args.num_speculative_tokens, "results": rows})


if __name__ == "__main__":
    main()
