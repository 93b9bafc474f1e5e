# SPDX-License-Identifier: Apache-2.0
"""What does drafting from text cost beside the model, in microseconds per request and step and in bytes per token?

    python -m benchmarks.bench_proposing [--shared-tokens 20000000] [--history 32000] [--batch 1 16]

The texts are Python sources. `known` requests repeat a text that suffix decoding has among its cached outputs, `new`
ones do not. Each step proposes, verifies against the text and emits. The call to propose is timed from Python, filling
its arrays included. `insert_us_per_token` is the cost of caching an output.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np

from benchmarks.report import Row, make_parser, print_report, print_table
from benchmarks.workloads import source_tokens
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.ops.host import NgramIndex
from fastdeploy.ops.suffix_cache import SuffixCache, SuffixConfig
from fastdeploy.ops.text_batch import IntArray, TextBatch

OUTPUT_TOKENS = 1000  # of a cached output
NGRAM_SIZES = 2, 5  # the default min_ngram_size and max_ngram_size


@dataclass(frozen=True)
class Matcher:
    """The calls of a method that matches text."""

    start: Callable[[int, IntArray], None]
    draft_batch: Callable[[TextBatch], None]
    finish: Callable[[int], None]
    num_bytes: Callable[[], int]  # held for the live requests


def make_matchers(cache: SuffixCache) -> dict[str, Matcher]:
    """Return n-gram matching, and suffix decoding with the cached outputs of `cache`."""
    index = NgramIndex(*NGRAM_SIZES)
    return {
        "ngram": Matcher(index.start, index.draft_batch, index.finish, index.num_bytes),
        "suffix": Matcher(
            lambda slot, text: cache.start(slot, "", text),
            cache.draft_batch,
            partial(cache.finish, output=[]),
            lambda: cache.usage().live_bytes,
        ),
    }


def cache_outputs(cache: SuffixCache, text: IntArray) -> float:
    """Cache a text as outputs of OUTPUT_TOKENS tokens; return microseconds per token."""
    begin_s = time.perf_counter()
    for begin in range(0, len(text), OUTPUT_TOKENS):
        cache.start(0, "", [])
        cache.finish(0, text[begin : begin + OUTPUT_TOKENS])
    cache.flush()
    return (time.perf_counter() - begin_s) / len(text) * 1e6


def num_equal(tokens: IntArray, text: IntArray) -> int:
    """Return the length of the longest common prefix."""
    differs = np.flatnonzero(tokens != text[: len(tokens)])
    return int(differs[0]) if len(differs) else len(tokens)


def measure(matcher: Matcher, texts: list[IntArray], history: int, num_steps: int, k: int) -> Row:
    """Decode the rest of each text behind `history` tokens; return medians per request and step, and means."""
    slots, ends = list(range(len(texts))), [history] * len(texts)
    for slot, text in zip(slots, texts):
        matcher.start(slot, text[:history])
    batch, emitted = TextBatch(), [text[:0] for text in texts]
    draft_us, num_drafted, num_accepted = [], 0, 0
    for _ in range(num_steps):
        begin_s = time.perf_counter()
        batch.fill(slots, [k] * len(slots), emitted)
        matcher.draft_batch(batch)
        draft_us.append((time.perf_counter() - begin_s) * 1e6 / len(slots))
        for slot, text, (draft, _) in zip(slots, texts, batch.proposals()):
            count = num_equal(np.asarray(draft, np.int32), text[ends[slot] :])
            emitted[slot] = text[ends[slot] : ends[slot] + count + 1]
            ends[slot] += count + 1
            num_drafted, num_accepted = num_drafted + len(draft), num_accepted + count
    live_bytes, num_request_steps = matcher.num_bytes() / sum(ends), num_steps * len(slots)
    for slot in slots:
        matcher.finish(slot)
    return {
        "draft_us": float(np.median(draft_us)),
        "draft_p99_us": float(np.quantile(draft_us, 0.99)),
        "drafted_per_step": num_drafted / num_request_steps,
        "emitted_per_step": 1 + num_accepted / num_request_steps,
        "live_bytes_per_token": live_bytes,
    }


def main() -> None:
    """Print one row per method, batch size and kind of text, and one JSON line."""
    parser = make_parser(__doc__)
    parser.add_argument("--shared-tokens", type=int, default=20_000_000, help="tokens of cached outputs")
    parser.add_argument("--history", type=int, default=32_000, help="tokens of each request before the first step")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--num-speculative-tokens", type=int, default=16)
    args = parser.parse_args()
    k = args.num_speculative_tokens
    length = args.history + args.steps * (k + 1)
    num_new = length * max(args.batch)
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("demo"))
    sources = source_tokens(tokenizer, args.shared_tokens + num_new)
    text = np.concatenate([np.asarray(tokens, np.int32) for tokens in sources])
    kinds = {"new": text[:num_new], "known": text[num_new:]}
    cache = SuffixCache(SuffixConfig(max_drafts=k, max_cache_bytes=64 * len(kinds["known"])))
    insert_us = cache_outputs(cache, kinds["known"])
    usage = cache.usage()
    rows: list[Row] = []
    for (method, matcher), batch, kind in product(make_matchers(cache).items(), args.batch, kinds):
        texts = [kinds[kind][i * length : (i + 1) * length] for i in range(batch)]
        figures = measure(matcher, texts, args.history, args.steps, k)
        rows.append({"method": method, "batch": batch, "text": kind, **figures})
    shared = {
        "shared_tokens": usage.num_tokens,
        "insert_us_per_token": insert_us,
        "bytes_per_shared_token": usage.shared_bytes / usage.num_tokens,
    }
    print_table("cached outputs", [shared])
    print_report("proposing", f"per request and step, K = {k}", rows, k=k, shared=shared)


if __name__ == "__main__":
    main()
