# SPDX-License-Identifier: Apache-2.0
"""What drafting from text costs beside the model: microseconds per request and step, bytes per token.

    python -m benchmarks.bench_proposing [--shared-tokens 20000000] [--history 32000] [--batch 1 16]

The texts are Python sources. `known` requests repeat a text that suffix decoding keeps as finished outputs, `new` ones
do not; a step proposes, is held against the text and observes. The call to propose is timed from Python, its arrays
included.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from benchmarks.report import print_json, print_table
from benchmarks.workloads import source_tokens
from fastdeploy.config.model_config import resolve_model_path
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.ops.host import NgramIndex
from fastdeploy.ops.suffix_cache import SuffixCache, SuffixConfig
from fastdeploy.ops.text_batch import IntArray, TextBatch

OUTPUT_TOKENS = 1000
NGRAM_SIZES = 2, 5  # shortest and longest, by default


@dataclass(frozen=True)
class Store:
    """The live texts of a method: what it reads, drafts and forgets with, and the bytes that it holds."""

    start: Callable[[int, IntArray], None]
    draft_batch: Callable[[TextBatch], None]
    finish: Callable[[int], None]
    num_bytes: Callable[[], int]


def stores(cache: SuffixCache) -> dict[str, Store]:
    """Return n-gram matching, and suffix decoding with the outputs that it keeps."""
    index = NgramIndex(*NGRAM_SIZES)
    return {
        "ngram": Store(index.start, index.draft_batch, index.finish, index.num_bytes),
        "suffix": Store(
            lambda slot, text: cache.start(slot, "", text),
            cache.draft_batch,
            partial(cache.finish, output=[]),
            lambda: cache.usage().live_bytes,
        ),
    }


def share(cache: SuffixCache, text: IntArray) -> float:
    """Share a text as outputs of a thousand tokens; return microseconds per token."""
    start = time.perf_counter()
    for begin in range(0, len(text), OUTPUT_TOKENS):
        cache.start(0, "", [])
        cache.finish(0, text[begin : begin + OUTPUT_TOKENS])
    cache.flush()
    return (time.perf_counter() - start) / len(text) * 1e6


def accepted(tokens: IntArray, text: IntArray) -> int:
    """Return how many first tokens of the two are equal."""
    differs = np.flatnonzero(tokens != text[: len(tokens)])
    return int(differs[0]) if len(differs) else len(tokens)


def replay(store: Store, texts: list[IntArray], history: int, num_steps: int, k: int) -> dict[str, float]:
    """Let requests say the rest of their texts; return medians of microseconds per request and step, and totals."""
    slots, places = list(range(len(texts))), [history] * len(texts)
    for slot, text in zip(slots, texts):
        store.start(slot, text[:history])
    batch, emitted = TextBatch(), [text[:0] for text in texts]
    draft_us, drafted, kept = [], 0, 0
    for _ in range(num_steps):
        start = time.perf_counter()
        batch.fill(slots, [k] * len(slots), emitted)
        store.draft_batch(batch)
        draft_us.append((time.perf_counter() - start) * 1e6 / len(slots))
        for slot, text in zip(slots, texts):
            count = accepted(batch.drafts[slot, : batch.counts[slot]], text[places[slot] :])
            emitted[slot] = text[places[slot] : places[slot] + count + 1]
            places[slot] += count + 1
            drafted, kept = drafted + int(batch.counts[slot]), kept + count
    live_bytes = store.num_bytes() / sum(places)
    for slot in slots:
        store.finish(slot)
    return {
        "draft_us": float(np.median(draft_us)),
        "draft_p99_us": float(np.quantile(draft_us, 0.99)),
        "drafted_per_step": drafted / num_steps / len(slots),
        "emitted_per_step": (kept + num_steps * len(slots)) / num_steps / len(slots),
        "live_bytes_per_token": live_bytes,
    }


def main() -> None:
    """Print one row per method, batch size and kind of text, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared-tokens", type=int, default=20_000_000)
    parser.add_argument("--history", type=int, default=32_000)
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
    new, known = text[:num_new], text[num_new:]
    cache = SuffixCache(SuffixConfig(max_drafts=k, max_cache_bytes=64 * len(known)))
    insert_us = share(cache, known)
    usage = cache.usage()
    rows: list[dict[str, Any]] = []
    kinds = {"new": new, "known": known}
    for (method, store), batch, kind in product(stores(cache).items(), args.batch, kinds):
        texts = [kinds[kind][i * length : (i + 1) * length] for i in range(batch)]
        figures = replay(store, texts, args.history, args.steps, k)
        rows.append({"method": method, "batch": batch, "text": kind, **figures})
    shared = {
        "shared_tokens": usage.num_tokens,
        "insert_us_per_token": insert_us,
        "bytes_per_shared_token": usage.shared_bytes / usage.num_tokens,
        "nodes_per_shared_token": usage.num_nodes / usage.num_tokens,
    }
    print_table("shared outputs", list(shared), [list(shared.values())])
    print_table(f"per request and step, K = {k}", list(rows[0]), [list(row.values()) for row in rows])
    print_json({"benchmark": "proposing", "k": k, "shared": shared, "results": rows})


if __name__ == "__main__":
    main()
