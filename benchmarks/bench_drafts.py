# SPDX-License-Identifier: Apache-2.0
"""How good drafts are, without a model: proposers replay recorded answers. One Python version, one set of figures.

    python -m benchmarks.bench_drafts [--method ngram suffix] [--workload editing loop] [--num-speculative-tokens 5 16]

The workloads are those of benchmarks.workloads; the turns of a session share a salt. `rows_per_token` is what the
target computes for a token of the answer, drafts that are rejected included.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.replay import Tally, replay_drafts
from benchmarks.report import print_json, print_table
from benchmarks.workloads import WORKLOADS, sessions
from fastdeploy.config.model_config import resolve_model_path
from fastdeploy.config.speculative_config import SpeculativeConfig
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.spec_decode.proposers.registry import make_proposer

NUM_SESSIONS, NUM_TURNS = 24, 6


def measure(method: str, k: int, workload: str, tokenizer: Tokenizer, num_tokens: int) -> dict[str, Any]:
    """Replay a workload."""
    config = SpeculativeConfig.from_mapping({"method": method, "num_speculative_tokens": k})
    proposer, tally = make_proposer(config), Tally()
    for number, session in enumerate(sessions(workload, tokenizer, NUM_SESSIONS, NUM_TURNS, 4096, num_tokens, seed=0)):
        for turn in session:
            replay_drafts(proposer, turn.prompt, turn.answer, k, str(number), number, tally)
    return {
        "workload": workload,
        "k": k,
        "method": method,
        "mean_acceptance_length": tally.emitted / tally.steps,
        "acceptance_rate": tally.accepted / max(1, tally.drafted),
        "rows_per_token": (tally.drafted + tally.steps) / tally.emitted,
    }


def main() -> None:
    """Print one row per workload, K and method, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", nargs="+", default=["ngram", "suffix"], help="those that need no model")
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--num-speculative-tokens", type=int, nargs="+", default=[5, 8, 16])
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("demo"))
    cases = [(w, k, method) for w in args.workload for k in args.num_speculative_tokens for method in args.method]
    rows = [measure(method, k, workload, tokenizer, args.max_tokens) for workload, k, method in cases]
    print_table("drafts on recorded answers", list(rows[0]), [list(row.values()) for row in rows])
    print_json({"benchmark": "drafts", "results": rows})


if __name__ == "__main__":
    main()
