# SPDX-License-Identifier: Apache-2.0
"""Tokens per second with and without speculation, in one run, on work made of real code.

    python -m benchmarks.bench_speculation [--model demo] [--batch 1 4] [--num-speculative-tokens 5]

Methods take turns, round by round; naive runs twice a round, so that the ratio of naive to naive shows the noise.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from benchmarks.report import print_json, print_table
from benchmarks.workloads import code_editing
from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.model_config import resolve_model_path
from fastdeploy.config.speculative_config import SpeculativeConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine

_ids = count()


@dataclass
class Lane:
    """One method's engine and what it came to."""

    name: str
    engine: Engine
    tokens_per_s: list[float] = field(default_factory=list)
    texts: dict[int, list[int]] = field(default_factory=dict)

    def mean_acceptance_length(self) -> float:
        stats = self.engine.stats()
        return stats.num_emitted_tokens / max(1, stats.num_steps)


def make_lane(name: str, args: argparse.Namespace, batch: int) -> Lane:
    """Build the engine of one lane; every lane but ngram decodes plainly."""
    mapping: dict[str, Any] = {"method": "naive"}
    if name == "ngram":
        mapping = {"method": "ngram", "num_speculative_tokens": args.num_speculative_tokens}
    config = EngineConfig(
        model=args.model,
        max_model_len=args.max_prompt_tokens + args.max_tokens,
        cache=CacheConfig(enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=batch),
        speculative=SpeculativeConfig.from_mapping(mapping),
    )
    return Lane(name, Engine.from_config(config))


def run_once(lane: Lane, prompts: list[list[int]], max_tokens: int) -> float:
    """Run all prompts; return output tokens per second of decoding, from the first token of the last to start on."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    index_of: dict[str, int] = {}
    for index, prompt in enumerate(prompts):
        request_id = f"bench-{next(_ids)}"
        index_of[request_id] = index
        lane.engine.add_request(GenerationRequest(request_id, prompt, params))
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
    lane.texts = texts
    return num_tokens / (time.perf_counter() - begin)


def compare(args: argparse.Namespace, tokenizer: Tokenizer, batch: int) -> dict[str, Any]:
    """Interleave the lanes and return the medians of their ratios."""
    prompts = code_editing(tokenizer, batch * args.groups, args.max_prompt_tokens, args.seed)
    lanes = [make_lane(name, args, batch) for name in ("naive", "ngram", "naive again")]
    for _ in range(args.rounds):
        for group in range(args.groups):
            for lane in lanes:
                chosen = prompts[group * batch : (group + 1) * batch]
                lane.tokens_per_s.append(run_once(lane, chosen, args.max_tokens))
            assert lanes[0].texts == lanes[1].texts, "speculation changed a text"
    naive, ngram, again = lanes
    ratio = statistics.median(b / a for a, b in zip(naive.tokens_per_s, ngram.tokens_per_s))
    length = ngram.mean_acceptance_length()
    return {
        "batch": batch,
        "naive_tokens_per_s": statistics.median(naive.tokens_per_s),
        "ngram_tokens_per_s": statistics.median(ngram.tokens_per_s),
        "ratio": ratio,
        "naive_to_naive": statistics.median(b / a for a, b in zip(naive.tokens_per_s, again.tokens_per_s)),
        "mean_acceptance_length": length,
        "conversion": ratio / length,
    }


def main() -> None:
    """Print one row per batch size and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--max-prompt-tokens", type=int, default=900)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--groups", type=int, default=4, help="different prompts per batch slot")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_pretrained(resolve_model_path(args.model))
    rows = [compare(args, tokenizer, batch) for batch in args.batch]
    title = f"{args.model}: editing real code, greedy, K = {args.num_speculative_tokens}"
    print_table(title, list(rows[0]), [list(row.values()) for row in rows])
    print_json({"benchmark": "speculation", "model": args.model, "k": args.num_speculative_tokens, "results": rows})


if __name__ == "__main__":
    main()
