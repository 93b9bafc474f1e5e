# SPDX-License-Identifier: Apache-2.0
"""How good drafts are, without a model: proposers replay recorded answers. One Python version, one set of figures.

    python -m benchmarks.bench_drafts [--method ngram suffix] [--num-speculative-tokens 5 8 16]

The answers are functions of the Python standard library. editing: the function stands in the prompt, one line in eight
of the answer is another. loop: six turns without the function in the prompt, each answer the one before with one line
in twenty changed. plain: the rest of a function whose head is the prompt. `rows_per_token` is what the target computes
for a token of the answer, drafts that are rejected included.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.report import print_json, print_table
from benchmarks.workloads import library_functions
from fastdeploy.config.model_config import resolve_model_path
from fastdeploy.config.speculative_config import SpeculativeConfig
from fastdeploy.core.request import GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.spec_decode.base import Proposer
from fastdeploy.spec_decode.registry import make_proposer

NUM_FUNCTIONS, NUM_TURNS = 24, 6
Turn = tuple[str, str]  # prompt and answer


@dataclass
class Tally:
    """Sums over all answers."""

    steps: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0


def edited(source: str, share: float, lines: list[str], dice: random.Random) -> str:
    """Replace this share of the lines by others."""
    return "".join(dice.choice(lines) if dice.random() < share else line for line in source.splitlines(keepends=True))


def editing(source: str, lines: list[str], dice: random.Random) -> list[Turn]:
    """Return one turn: the function, then the function with changes."""
    return [(source + "\n\n", edited(source, 1 / 8, lines, dice))]


def loop(source: str, lines: list[str], dice: random.Random) -> list[Turn]:
    """Return turns whose answers repeat each other; their prompts do not hold them."""
    answers = [source]
    while len(answers) < NUM_TURNS:
        answers.append(edited(answers[-1], 1 / 20, lines, dice))
    return [(source.splitlines(keepends=True)[0], answer) for answer in answers]


def plain(source: str, lines: list[str], dice: random.Random) -> list[Turn]:
    """Return one turn: what follows the head of a function."""
    return [(source[:200], source[200:])]


WORKLOADS: dict[str, Callable[[str, list[str], random.Random], list[Turn]]] = {
    "editing": editing,
    "loop": loop,
    "plain": plain,
}


def replay(proposer: Proposer, request: Request, answer: list[int], k: int, tally: Tally) -> None:
    """Emit an answer token by token, as fast as the drafts are right; its first token is the prefill's."""
    proposer.start(request)
    emitted = answer[:1]
    while request.num_output_tokens + len(emitted) < len(answer):
        request.append(emitted)
        proposer.observe([request], [emitted])
        rest = answer[request.num_output_tokens :]
        draft = proposer.propose([request], [min(k, request.draft_room)])[0].token_ids.tolist()
        right = [drafted == token for drafted, token in zip(draft, rest)]
        num_right = (*right, False).index(False)
        emitted = rest[: num_right + 1]
        tally.steps += 1
        tally.emitted += len(emitted)
        tally.drafted += len(draft)
        tally.accepted += num_right
    request.append(emitted)
    proposer.finish(request)


def measure(method: str, k: int, workload: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Replay a workload; the turns of one function share a salt."""
    config = SpeculativeConfig.from_mapping({"method": method, "num_speculative_tokens": k})
    proposer, tally, dice = make_proposer(config), Tally(), random.Random(0)
    functions = library_functions(20, 80, seed=0)[:NUM_FUNCTIONS]
    lines = [line for source in functions for line in source.splitlines(keepends=True)]
    for number, source in enumerate(functions):
        for turn, (prompt, text) in enumerate(WORKLOADS[workload](source, lines, dice)):
            prompt_ids, answer = tokenizer.encode(prompt), tokenizer.encode(text)
            asked = GenerationRequest(f"{number}-{turn}", prompt_ids, SamplingParams(), cache_salt=str(number))
            request = Request(asked, 0, seed=0, max_total_tokens=len(prompt_ids) + len(answer), max_drafts=k)
            replay(proposer, request, answer, k, tally)
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
    parser.add_argument("--method", nargs="+", default=["ngram", "suffix"])
    parser.add_argument("--num-speculative-tokens", type=int, nargs="+", default=[5, 8, 16])
    args = parser.parse_args()
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("demo"))
    cases = [(w, k, method) for w in WORKLOADS for k in args.num_speculative_tokens for method in args.method]
    rows = [measure(method, k, workload, tokenizer) for workload, k, method in cases]
    print_table("drafts on recorded answers", list(rows[0]), [list(row.values()) for row in rows])
    print_json({"benchmark": "drafts", "results": rows})


if __name__ == "__main__":
    main()
