# SPDX-License-Identifier: Apache-2.0
"""What `bench latency` and `bench throughput` share: an engine in this process, and requests for it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastdeploy.config.args import parse_engine_args
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.entrypoints.cli.bench.datasets import Sample
from fastdeploy.entrypoints.cli.parser import positive_int

if TYPE_CHECKING:
    from fastdeploy.entrypoints.llm import LLM

DEFAULT_MAX_MODEL_LEN = 2048


def add_engine_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of both measurements."""
    parser.add_argument("--n", type=positive_int, default=1, help="choices of every request")
    parser.add_argument("--output-json", metavar="FILE", help="write the JSON line to a file as well")
    parser.add_argument("--disable-detokenize", action="store_true", help="make tokens only, no text")


def make_llm(flags: Sequence[str], num_tokens: int) -> LLM:
    """Load the engine that the flags describe; without --max-model-len it holds `num_tokens` at least."""
    kwargs = parse_engine_args(flags)
    kwargs.setdefault("max_model_len", max(DEFAULT_MAX_MODEL_LEN, num_tokens))
    from fastdeploy.entrypoints.llm import LLM  # Paddle loads here, after every flag is known to be right

    return LLM(**kwargs)


def sampling_params(args: argparse.Namespace, output_len: int, seed: int) -> SamplingParams:
    """Return parameters under which a request takes all its tokens."""
    return SamplingParams(n=args.n, max_tokens=output_len, ignore_eos=True, seed=seed)


def run(llm: LLM, args: argparse.Namespace, samples: Sequence[Sample], show_progress: bool) -> tuple[float, int]:
    """Run all samples at once; return seconds and the number of tokens made."""
    params = [sampling_params(args, sample.output_len, seed) for seed, sample in enumerate(samples)]
    begin = time.perf_counter()
    if args.disable_detokenize:
        num_tokens = _run_tokens(llm.engine, samples, params)
    else:
        outputs: Any = llm.generate([sample.token_ids for sample in samples], params, use_tqdm=show_progress)
        num_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return time.perf_counter() - begin, num_tokens


def _run_tokens(engine: Any, samples: Sequence[Sample], params: Sequence[SamplingParams]) -> int:
    for i, (sample, one) in enumerate(zip(samples, params)):
        engine.add_request(GenerationRequest(f"bench-{i}", sample.token_ids, one))
    num_tokens = 0
    while engine.has_unfinished():
        num_tokens += sum(len(delta.token_ids) for delta in engine.step())
    return num_tokens
