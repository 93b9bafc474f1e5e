# SPDX-License-Identifier: Apache-2.0
"""Thousands of random mixes of requests: each output is that of plain decoding alone, and no block leaks."""

from __future__ import annotations

from collections import Counter
from itertools import count

import numpy as np
import pytest

from fastdeploy.config.engine_config import SchedulerConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams, SpeculativeParams
from fastdeploy.core.seeds import choice_seed
from fastdeploy.engine.engine import Engine
from fastdeploy.ops.suffix_cache import SuffixConfig
from fastdeploy.spec_decode.adaptive.adaptive_length import AdaptiveLength
from fastdeploy.spec_decode.adaptive.step_times import DraftPasses, StepTimes
from fastdeploy.spec_decode.proposers.base import Proposer
from fastdeploy.spec_decode.proposers.naive import NaiveProposer
from fastdeploy.spec_decode.proposers.ngram import NgramProposer
from fastdeploy.spec_decode.proposers.suffix import SuffixProposer
from tests.doubles import VOCAB, OracleProposer, make_engine, plain_text

MAX_LEN = 48


def random_request(random: np.random.Generator, name: str) -> GenerationRequest:
    head = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6][: random.integers(0, 13)]
    prompt = head + random.integers(0, VOCAB, random.integers(1, 20)).tolist()
    speculative = [None, SpeculativeParams("off"), SpeculativeParams(num_speculative_tokens=2)][random.integers(3)]
    params = SamplingParams(
        n=int(random.integers(1, 3)),
        seed=int(random.integers(0, 1000)),
        max_tokens=int(random.integers(1, 30)),
        ignore_eos=bool(random.random() < 0.7),
        stop_token_ids=[int(random.integers(1, VOCAB))] if random.random() < 0.2 else [],
        speculative=speculative,
    )
    salt, priority = str(random.integers(2)), int(random.integers(-1, 2))
    return GenerationRequest(name, prompt, params, cache_salt=salt, priority=priority)


def expected_texts(requests: list[GenerationRequest]) -> dict[tuple[str, int], list[int]]:
    return {
        (r.request_id, i): plain_text(r.prompt_token_ids, choice_seed(r.params.seed or 0, i), r.params, MAX_LEN)
        for r in requests
        for i in range(r.params.n)
    }


def make_proposer(name: str, texts: dict[tuple[str, int], list[int]], seed: int) -> Proposer:
    if name == "oracle":
        return OracleProposer(texts, corruption=0.3, seed=seed)
    if name == "suffix":
        return SuffixProposer(SuffixConfig(max_tree_depth=8, max_drafts=4, max_cached_requests=3))
    return NgramProposer(4, 1) if name == "ngram" else NaiveProposer()


def run_randomly(
    engine: Engine, requests: list[GenerationRequest], random: np.random.Generator
) -> tuple[dict[tuple[str, int], list[int]], set[str]]:
    """Add requests at random times, abort a few, and check integrity after each step."""
    waiting, aborted = list(requests), set()
    texts: dict[tuple[str, int], list[int]] = {}
    while waiting or engine.has_unfinished():
        while waiting and random.random() < 0.6:
            engine.add_request(waiting.pop())
        if random.random() < 0.03 and (added := [r for r in requests if r not in waiting]):
            request_id = added[random.integers(len(added))].request_id
            if engine.abort(request_id):
                aborted.add(request_id)
        for delta in engine.step():
            texts.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
        engine.check_integrity()
    return texts, aborted


def adaptive_policy(seed: int) -> AdaptiveLength:
    """Return a deterministic policy for which drafts pay at some batch sizes and not at others."""
    slope = (0.02, 0.3, 2.0)[seed % 3]
    ticks = count()
    passes = DraftPasses("oracle", 4, *2 * [StepTimes({1: 0.2, 2: 0.3})]) if seed % 2 else None
    return AdaptiveLength(StepTimes({1: 1.0, 8: 1.0 + 7 * slope}, 0.1), passes, True, lambda: 0.7 * next(ticks))


@pytest.mark.parametrize(
    ("method", "adaptive"),
    [(method, False) for method in ("naive", "ngram", "suffix", "oracle")]
    + [(method, True) for method in ("ngram", "suffix", "oracle")],
)
def test_outputs_in_any_mix_are_those_of_plain_decoding(method: str, adaptive: bool) -> None:
    totals: Counter[str] = Counter()
    for round_seed in range(400 if adaptive else 1000):
        random = np.random.default_rng(round_seed)
        requests = [random_request(random, f"r{i}") for i in range(random.integers(1, 9))]
        expected = expected_texts(requests)
        budget = int(random.choice([6, 9, 17, 64]))
        engine = make_engine(
            make_proposer(method, expected, round_seed),
            num_blocks=int(random.choice([12, 16, 40])),
            max_model_len=MAX_LEN,
            num_speculative_tokens=0 if method == "naive" else int(random.integers(1, 6)),
            prefix_caching=bool(random.random() < 0.8),
            scheduler=SchedulerConfig(
                max_num_seqs=int(random.integers(1, 9)),
                max_num_batched_tokens=budget,
                long_prefill_token_threshold=int(random.choice([0, 1, 3, 7])),
            ),
            length_policy=adaptive_policy(round_seed) if adaptive else None,
        )
        texts, aborted = run_randomly(engine, requests, random)
        for key, text in expected.items():
            if key[0] in aborted:
                assert text[: len(texts.get(key, []))] == texts.get(key, [])
            else:
                assert texts[key] == text, f"round {round_seed}, choice {key}"
        stats = engine.stats()
        assert stats.num_free_blocks == stats.num_blocks
        totals.update(
            requests=len(requests),
            preempted=stats.num_preemptions,
            hits=stats.num_prefix_hit_tokens,
            accepted=stats.num_accepted_tokens,
            rejected=stats.num_draft_tokens - stats.num_accepted_tokens,
            aborted=len(aborted),
            withheld=stats.draft_length.num_withheld_tokens,
        )
    assert totals["requests"] > (1600 if adaptive else 4000)
    assert (totals["withheld"] > 0) == adaptive
    assert min(totals["preempted"], totals["hits"], totals["aborted"]) > 0, totals
    if method != "naive":
        assert min(totals["accepted"], totals["rejected"]) > 0, totals
