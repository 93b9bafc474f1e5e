# SPDX-License-Identifier: Apache-2.0
"""Structured output: is every answer valid, does speculation leave it as it is, and what does the grammar cost?

    python -m benchmarks.bench_structured [--model demo] [--requests 500] [--temperature 1]

Every request has a schema of `benchmarks.schemas` and a seed of its own, and runs with speculation and without. The
cost is that of a token without speculation, against texts of the same lengths without grammars in the same batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from typing import Any

import jsonschema

from benchmarks.report import print_json, print_table
from benchmarks.schemas import SCHEMAS
from fastdeploy import LLM, GuidedDecodingParams, SamplingParams
from fastdeploy.core.outputs import CompletionOutput

HEAD = "import json\n\n\ndef load():\n    # the answer as JSON:\n    return "


def make_params(count: int, temperature: float) -> list[tuple[str, SamplingParams]]:
    """Return (schema's name, parameters) of each request."""
    names = list(SCHEMAS)
    return [
        (
            names[i % len(names)],
            SamplingParams(
                temperature=temperature,
                seed=i,
                max_tokens=900,
                guided_decoding=GuidedDecodingParams(json=SCHEMAS[names[i % len(names)]]),
            ),
        )
        for i in range(count)
    ]


def generate(llm: LLM, params: list[SamplingParams]) -> tuple[list[CompletionOutput], float, int]:
    """Return the outputs, the seconds and the steps that they took."""
    begin, steps = time.perf_counter(), llm.engine.stats().num_steps
    results = llm.generate([HEAD] * len(params), params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return [result.outputs[0] for result in results], seconds, llm.engine.stats().num_steps - steps


def is_valid(name: str, output: CompletionOutput) -> bool:
    """Return True for a whole answer that obeys its schema."""
    if output.finish_reason != "stop":
        return False
    checker = jsonschema.Draft202012Validator(
        SCHEMAS[name], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    return checker.is_valid(json.loads(output.text))


def cost(llm: LLM, params: list[SamplingParams], rounds: int) -> tuple[float, float]:
    """Return the median ms per token and request with grammars, and without them for texts of the same lengths."""
    guided_ms, free_ms = [], []
    for _ in range(rounds):
        outputs, seconds, _ = generate(llm, params)
        guided_ms.append(1000 * seconds / sum(len(output.token_ids) for output in outputs))
        free = [
            replace(p, guided_decoding=None, ignore_eos=True, max_tokens=len(output.token_ids))
            for p, output in zip(params, outputs)
        ]
        outputs, seconds, _ = generate(llm, free)
        free_ms.append(1000 * seconds / sum(len(output.token_ids) for output in outputs))
    return statistics.median(guided_ms), statistics.median(free_ms)


def main() -> None:
    """Print what was valid and equal, the cost per token, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=16, help="requests of the measurement of cost")
    args = parser.parse_args()
    asked = make_params(args.requests, args.temperature)
    params = [p for _, p in asked]
    speculative = LLM(
        args.model, max_model_len=1024, speculative_config={"method": "ngram", "num_speculative_tokens": 5}
    )
    plain = LLM(args.model, max_model_len=1024)
    with_drafts, drafted_s, _ = generate(speculative, params)
    without, plain_s, _ = generate(plain, params)
    stats = speculative.engine.stats()
    guided_ms, free_ms = cost(plain, params[: args.batch], rounds=5)
    result: dict[str, Any] = {
        "requests": args.requests,
        "valid": sum(is_valid(name, output) for (name, _), output in zip(asked, with_drafts)),
        "equal": sum(one.token_ids == other.token_ids for one, other in zip(with_drafts, without)),
        "tokens": sum(len(output.token_ids) for output in with_drafts),
        "seconds_speculative": drafted_s,
        "seconds_plain": plain_s,
        "speedup": plain_s / drafted_s,
        "acceptance": stats.num_accepted_tokens / max(1, stats.num_draft_tokens),
        "forbidden_draft_tokens": stats.num_forbidden_draft_tokens,
        "ms_per_token_guided": guided_ms,
        "ms_per_token_free": free_ms,
        "cost_ratio": guided_ms / free_ms,
    }
    print_table(f"structured output, temperature {args.temperature:g}", ["", "value"], list(result.items()))
    print_json({"benchmark": "structured", "model": args.model, **result})
    for (name, p), output in zip(asked, with_drafts):
        if not is_valid(name, output):
            print(f"INVALID {name} seed {p.seed}: {output.finish_reason} {output.text[:300]!r}")


if __name__ == "__main__":
    main()
