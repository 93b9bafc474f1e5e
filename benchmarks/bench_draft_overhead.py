# SPDX-License-Identifier: Apache-2.0
"""What handling drafts costs a step beside the model: proposing, choosing, comparing, counting.

    python -m benchmarks.bench_draft_overhead [--workload random editing] [--batch 1 4 16] [--method ngram suffix]

Engines without a model (benchmarks.virtual_time), which take turns; the time of the calling thread in one step beyond
that of the same step without speculation. Random text is where adaptive drafting rests, editing where it drafts. `mean`
counts the steps in which resting engines look again; the highest twentieth of all is left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from benchmarks.bench_adaptive import Load, Recorded, recorded
from benchmarks.bench_speculation import FIXED, NAIVE, method_mapping
from benchmarks.report import print_json, print_table
from benchmarks.virtual_time import MACHINES, BusyClock, make_virtual_engine
from fastdeploy.config.model_config import resolve_model_path
from fastdeploy.config.speculative_config import SpeculativeConfig
from fastdeploy.detokenize.tokenizer import Tokenizer

TURNS, PROMPT_TOKENS, ANSWER_TOKENS, SESSIONS = 1, 900, 160, 16


class Lane:
    """An engine of one method under load, and what its steps took."""

    def __init__(self, method: str, k: int, batch: int, texts: list[list[Recorded]]) -> None:
        config = SpeculativeConfig.from_mapping(method_mapping(method, k))
        length = PROMPT_TOKENS + ANSWER_TOKENS + 1
        self.virtual = make_virtual_engine(config, MACHINES["demo"], batch, length, clock=BusyClock())
        self.load, self.batch, self.step_us = Load(self.virtual, texts), batch, list[float]()

    def step(self) -> None:
        """Take a step; keep its time unless requests begin or end in it."""
        before = self.virtual.engine.stats().num_prompt_tokens
        begin_s = time.thread_time()
        self.load.run(self.batch, 1)
        step_us = 1e6 * (time.thread_time() - begin_s)
        if self.virtual.engine.stats().num_prompt_tokens == before:
            self.step_us.append(step_us)

    def summary(self) -> tuple[float, float]:
        """Return the median and the mean of most steps."""
        usual = sorted(self.step_us)[: len(self.step_us) * 19 // 20]
        return statistics.median(usual), statistics.fmean(usual)


def measure(
    methods: list[str], k: int, workload: str, batch: int, texts: list[list[Recorded]], steps: int
) -> list[dict[str, Any]]:
    """Return a row per method."""
    naive, *others = lanes = [Lane(method, k, batch, texts) for method in (NAIVE, *methods)]
    for _ in range(steps):
        for lane in lanes:
            lane.step()
    base, base_mean = naive.summary()
    rows = []
    for method, lane in zip(methods, others):
        (median, mean), stats = lane.summary(), lane.virtual.engine.stats()
        rows.append(
            {
                "workload": workload,
                "batch": batch,
                "method": method,
                "naive_us": base,
                "median_us": median - base,
                "mean_us": mean - base_mean,
                "drafts_per_step": stats.num_draft_tokens / stats.num_steps,
            }
        )
    return rows


def main() -> None:
    """Print one row per workload, batch size and method, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", default=["random", "editing"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--method", nargs="+", default=[m + end for m in ("ngram", "suffix") for end in (FIXED, "")])
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("demo"))
    rows = []
    for workload in args.workload:
        texts = recorded(workload, tokenizer, SESSIONS, TURNS, PROMPT_TOKENS, ANSWER_TOKENS)
        for batch in args.batch:
            rows += measure(args.method, args.num_speculative_tokens, workload, batch, texts, args.steps)
    print_table("thread time beyond naive", list(rows[0]), [list(row.values()) for row in rows])
    print_json({"benchmark": "draft_overhead", "options": vars(args), "results": rows})


if __name__ == "__main__":
    main()
