# SPDX-License-Identifier: Apache-2.0
"""How many distinct experts do neighbouring rows of a text read, and rows of several texts?

    python -m benchmarks.bench_distinct_experts MODEL [--dummy] [--workload plain] [--requests 1 4 16]
        [--rows 1 2 3 4 6 8] [--max-tokens 96]

MODEL is a checkpoint with experts or, with --dummy, a folder with a config.json whose weights are random. Its steps
compute the text's own answers, all of whose tokens are proposed as drafts, so that every step has the given number of
rows of each request. `experts` is the mean of sparse layers and steps; `of_one_row` is their number over that of one
row, `independent` the same for rows that are routed independently. `exponent` is p if n rows read as many experts as
n ** p independent ones: what adaptive length learns for a source of drafts, or for requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from statistics import fmean

from benchmarks.replay import replay_answers
from benchmarks.report import Row, make_parser, print_report
from benchmarks.workloads import WORKLOADS, Turn, sessions
from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.request import Draft, DraftQuota, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.spec_decode.proposers.naive import NaiveProposer
from fastdeploy.worker.model_runner import ModelRunner

MAX_PROMPT_TOKENS = 256


class AnswerProposer(NaiveProposer):
    """Proposes the next tokens of recorded answers."""

    name = "answer"

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[str, list[int]] = {}
        self.length = 0

    def propose(self, requests: Sequence[Request], quotas: Sequence[DraftQuota]) -> list[Draft]:
        """Return `length` tokens for each request, fewer at the end of its answer."""
        return [
            Draft(self.answers[r.request_id][r.num_output_tokens :][: min(self.length, quota.max_drafts)], self.name)
            for r, quota in zip(requests, quotas)
        ]


class Bench:
    """An engine whose drafts are all accepted."""

    def __init__(self, model: str, load_choices: str, max_seqs: int, max_drafts: int, max_tokens: int) -> None:
        length = MAX_PROMPT_TOKENS + max_tokens
        config = EngineConfig(
            model=model,
            load_choices=load_choices,
            max_model_len=length,
            cache=CacheConfig(num_blocks=max_seqs * -(-length // CacheConfig.block_size), enable_prefix_caching=False),
            scheduler=SchedulerConfig(max_num_seqs=max_seqs, max_num_batched_tokens=max_seqs * length),
            speculative=parse_speculative_config(
                {"method": "ngram", "num_speculative_tokens": max(1, max_drafts), "adaptive": False}
            ),
        )
        self.proposer = AnswerProposer()
        self.engine = make_engine(config, proposer=self.proposer)
        assert isinstance(self.engine.runner, ModelRunner)
        load = self.engine.runner.model.expert_load
        if load is None:
            raise SystemExit(f"{model}: expected a model with experts")
        self.load = load
        replay_answers(self.engine, self.proposer.answers)

    def mean_experts(self, turns: Sequence[Turn], rows_each: int) -> float:
        """Return the mean number of distinct experts of a step of all turns' answers, all layers together."""
        self.proposer.length = rows_each - 1
        for i, turn in enumerate(turns):
            self.proposer.answers[str(i)] = turn.answer
            params = SamplingParams(temperature=0.0, max_tokens=len(turn.answer), ignore_eos=True)
            self.engine.add_request(GenerationRequest(str(i), turn.prompt, params))
        self.engine.step()  # the prompts, in one step
        counts, num_steps = list[int](), (min(len(turn.answer) for turn in turns) - 1) // rows_each
        for _ in range(num_steps):
            self.engine.step()
            counts.append(int(self.load.array[:, 0].sum()))
        while self.engine.has_unfinished():
            self.engine.step()
        return fmean(counts)

    def row(self, turns: Sequence[Turn], rows_each: int) -> Row:
        """Measure steps of `rows_each` rows of each turn."""
        load, num_requests = self.load, len(turns)
        num_layers, num_rows = len(load.array), num_requests * rows_each
        total = self.mean_experts(turns, rows_each)
        idle = 1 - load.num_chosen / load.num_experts  # share of experts that a row leaves idle
        idle_share = 1 - total / num_layers / load.num_experts
        exponent = None  # if all experts have rows in all steps
        if idle_share > 0 and num_rows > 1:
            exponent = log(log(idle_share) / log(idle)) / log(num_rows)
        return {
            "requests": num_requests,
            "rows_each": rows_each,
            "experts": total / num_layers,
            "of_one_row": total / num_layers / load.num_chosen,
            "independent": load.num_experts * (1 - idle**num_rows) / load.num_chosen,
            "exponent": exponent,
        }


def main() -> None:
    """Print one row per number of requests and rows, and one JSON line."""
    parser = make_parser(__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--workload", default="plain", choices=list(WORKLOADS))
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8], help="of each request")
    parser.add_argument("--max-tokens", type=int, default=96, help="of each answer (default: 96)")
    args = parser.parse_args()
    load_choices = "dummy" if args.dummy else EngineConfig.load_choices
    bench = Bench(args.model, load_choices, max(args.requests), max(args.rows) - 1, args.max_tokens)
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("demo" if args.dummy else args.model))
    texts = sessions(args.workload, tokenizer, max(args.requests), 1, MAX_PROMPT_TOKENS, args.max_tokens, 0)
    turns = [session[0] for session in texts]
    rows = [bench.row(turns[:requests], rows) for requests in args.requests for rows in args.rows]
    print_report("distinct_experts", f"{args.model}, {args.workload}: distinct experts of a layer", rows)


if __name__ == "__main__":
    main()
