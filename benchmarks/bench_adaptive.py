# SPDX-License-Identifier: Apache-2.0
"""What the adaptive draft length is worth, in virtual time: the same figures on every machine, however busy.

    python -m benchmarks.bench_adaptive [--machine demo 0.6b] [--workload editing random] [--batch 1 4 16 64]
        [--method ngram suffix mtp mtp+ngram mtp+suffix draft_model] [--noise 0.3] [--tilt 0.2]

Recorded answers, the real scheduler, proposers and choice of lengths; the time of a step is read from a table
(benchmarks.virtual_time). `adaptive` and `fixed` are tokens per second over naive's, with sessions that follow one
another; `cold` is `adaptive` of engines that have seen nothing yet, over the length of their first answers;
`drafting_share` is the part of the time that proposing takes. mtp and draft_model are simulated: their drafts are right
as often as the workload is easy. --noise and --tilt tell the engine wrong times: scattered ones, and of many rows too
long ones.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from benchmarks.bench_speculation import method_mapping
from benchmarks.report import print_json, print_table
from benchmarks.virtual_time import MACHINES, Machine, SimulatedModel, VirtualEngine, make_virtual_engine
from benchmarks.workloads import WORKLOADS, Turn, sessions
from fastdeploy.config.model_config import resolve_model_path
from fastdeploy.config.speculative_config import SpeculativeConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer

EASE = {  # share of a simulated layer's drafts that are right, passage by passage
    "editing": (0.9,),
    "loop": (0.9,),
    "quoting": (0.9, 0.5),
    "plain": (0.6,),
    "random": (0.02,),
}
MIXED = "mixed"  # one session in two of editing, the others random
METHODS = ["ngram", "suffix", "mtp", "mtp+ngram", "mtp+suffix", "draft_model"]
WARM_TOKENS = 32
MIN_SESSIONS, ROUNDS, COLD_RUNS = 8, 2, 4


@dataclass(frozen=True)
class Recorded(Turn):
    """A turn, and the workload that it comes from."""

    kind: str


def recorded(
    workload: str, tokenizer: Tokenizer, count: int, turns: int, max_prompt_tokens: int, num_tokens: int
) -> list[list[Recorded]]:
    """Return the sessions of a workload; those of a loop have `turns` turns."""
    if workload == MIXED:
        sizes = (-(-count // 2), turns, max_prompt_tokens, num_tokens)
        halves = (recorded(kind, tokenizer, *sizes) for kind in ("editing", "random"))
        return [session for pair in zip(*halves) for session in pair]
    turns = turns if workload == "loop" else 1
    found = sessions(workload, tokenizer, count, turns, max_prompt_tokens, num_tokens, seed=0)
    return [[Recorded(turn.prompt, turn.answer, workload) for turn in session] for session in found]


class Load:
    """Keeps a number of sessions going, round and round."""

    def __init__(self, virtual: VirtualEngine, texts: list[list[Recorded]]) -> None:
        self._virtual = virtual
        self._sessions = ((f"{round_}-{i}", iter(turns)) for round_ in count() for i, turns in enumerate(texts))
        self._running: dict[str, tuple[str, Iterator[Recorded]]] = {}
        self._num_started = 0

    def start(self, salt: str, rest: Iterator[Recorded]) -> None:
        """Start a session's next turn, or the next session where it has none."""
        turn = next(rest, None)
        if turn is None:
            self.start(*next(self._sessions))
            return
        request_id = str(self._num_started)
        self._num_started += 1
        self._running[request_id] = salt, rest
        self._virtual.reciter.answers[request_id] = turn.answer
        if isinstance(self._virtual.drafting, SimulatedModel):
            self._virtual.drafting.reliabilities[request_id] = EASE[turn.kind]
        params = SamplingParams(temperature=0.0, max_tokens=len(turn.answer), ignore_eos=True)
        self._virtual.engine.add_request(GenerationRequest(request_id, turn.prompt, params, cache_salt=salt))

    def run(self, num_sessions: int, num_tokens: int) -> int:
        """Advance until so many tokens are emitted; return how many were."""
        while len(self._running) < num_sessions:
            self.start(*next(self._sessions))
        emitted = 0
        while emitted < num_tokens:
            for delta in self._virtual.engine.step():
                emitted += len(delta.token_ids)
                if delta.finish_reason is not None:
                    self.start(*self._running.pop(delta.request_id))
        return emitted


def cold_tokens_per_s(virtual: VirtualEngine, batch: int, texts: list[list[Recorded]]) -> float:
    """Return tokens per virtual second of an engine that begins with these texts, for the length of an answer."""
    num_tokens = Load(virtual, texts).run(batch, sum(len(turns[0].answer) for turns in texts[:batch]))
    return num_tokens / virtual.busy_s()


def tokens_per_s(virtual: VirtualEngine, batch: int, texts: list[list[Recorded]]) -> float:
    """Return tokens per virtual second, with `batch` sessions at a time; what an engine learns first is not timed."""
    load = Load(virtual, texts)
    load.run(batch, batch * WARM_TOKENS)
    begin_s = virtual.busy_s()
    num_tokens = load.run(batch, ROUNDS * sum(len(turn.answer) for session in texts for turn in session))
    return num_tokens / (virtual.busy_s() - begin_s)


def tilted(machine: Machine, tilt: float) -> Machine:
    """Return a machine whose steps of many rows take more (or less) time: rows ** tilt times as much."""
    return replace(machine, rows_s={rows: seconds * rows**tilt for rows, seconds in machine.rows_s.items()})


def measure(
    args: argparse.Namespace, name: str, workload: str, batch: int, texts: list[list[Recorded]]
) -> list[dict[str, Any]]:
    """Return a row per method."""
    machine, rows = MACHINES[name], []

    def engine(mapping: dict[str, Any]) -> VirtualEngine:
        config = SpeculativeConfig.from_mapping(mapping)
        longest = max(len(turn.prompt) + len(turn.answer) for session in texts for turn in session)
        return make_virtual_engine(config, machine, batch, longest + 1, tilted(machine, args.tilt), args.noise)

    def speed(mapping: dict[str, Any]) -> tuple[float, VirtualEngine]:
        virtual = engine(mapping)
        return tokens_per_s(virtual, batch, texts), virtual

    def cold_speed(mapping: dict[str, Any]) -> float:
        begins = [texts[first:] + texts[:first] for first in range(0, len(texts), max(batch, len(texts) // COLD_RUNS))]
        return statistics.harmonic_mean([cold_tokens_per_s(engine(mapping), batch, begin) for begin in begins])

    naive, _ = speed(method_mapping("naive", 0))
    cold_naive = cold_speed(method_mapping("naive", 0))
    for method in args.method:
        mapping = method_mapping(method, args.num_speculative_tokens)
        fixed, _ = speed(mapping | {"adaptive": False})
        adaptive, virtual = speed(mapping | {"adaptive": True})
        stats = virtual.engine.stats()
        rows.append(
            {
                "machine": name,
                "workload": workload,
                "batch": batch,
                "method": method,
                "adaptive": adaptive / naive,
                "fixed": fixed / naive,
                "cold": cold_speed(mapping | {"adaptive": True}) / cold_naive,
                "mean_acceptance_length": stats.num_emitted_tokens / stats.num_steps,
                "drafts_per_step": stats.num_draft_tokens / stats.num_steps,
                "drafting_share": virtual.drafting.busy_s / virtual.busy_s(),
            }
        )
    return rows


def main() -> None:
    """Print one row per machine, workload, batch size and method, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", nargs="+", default=list(MACHINES), choices=list(MACHINES))
    parser.add_argument("--workload", nargs="+", default=[*WORKLOADS, MIXED], choices=[*WORKLOADS, MIXED])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--method", nargs="+", default=METHODS, help="names or JSON mappings")
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    parser.add_argument("--max-prompt-tokens", type=int, default=900)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=6, help="of a loop")
    parser.add_argument("--noise", type=float, default=0.0, help="of a step's time, as the engine sees it")
    parser.add_argument("--tilt", type=float, default=0.0, help="by which steps of many rows are believed dearer")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("demo"))
    rows = []
    for workload in args.workload:
        for batch in args.batch:
            sizes = (max(batch, MIN_SESSIONS), args.turns, args.max_prompt_tokens, args.max_tokens)
            texts = recorded(workload, tokenizer, *sizes)
            for name in args.machine:
                rows += measure(args, name, workload, batch, texts)
    print_table("virtual time", list(rows[0]), [list(row.values()) for row in rows])
    print_json({"benchmark": "adaptive", "options": vars(args), "results": rows})


if __name__ == "__main__":
    main()
