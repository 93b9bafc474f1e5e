# SPDX-License-Identifier: Apache-2.0
"""The law of exactness on the demonstration model: no way of computing a request changes its output.

Every case compares tokens, endings and log-probabilities, bit for bit, with plain decoding of each request alone, and
asserts from counters that what it is about really happened. The cases are pairwise covers of the ways to run requests,
methods, chunks and numbers of drafts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastdeploy.core.request import GenerationRequest
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.ops.sampling import RowStatus
from fastdeploy.worker.model_runner import ModelRunner
from tests.exactness.engines import (
    CHUNKS,
    METHODS,
    NUM_DRAFTS,
    WAYS,
    Run,
    Texts,
    build,
    check_chosen_lengths,
    check_drafts,
    check_speculation,
    config,
    configured,
    exists,
    oracle_of,
    proposer_of,
    use_adaptive_length,
)
from tests.exactness.requests import PREFILL_ONLY, VARIANTS, make_requests, run_all, run_alone
from tests.pairwise import pairwise

CASES = pairwise(list(WAYS), METHODS, CHUNKS, NUM_DRAFTS, allowed=exists)


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("demo"))
    return make_requests(tokenizer, make_engine(config()), variants=(*VARIANTS, PREFILL_ONLY))


@pytest.fixture(scope="module")
def plain(requests: list[GenerationRequest]) -> Texts:
    """Plain decoding, one request at a time, without chunks or prefix cache: the expected output of every case."""
    return run_alone(make_engine(config()), requests)


def test_plain_texts_end_in_every_way(plain: Texts) -> None:
    assert {text.finish_reason for text in plain.values()} == {"stop", "length"}
    stops = [text.stop_reason for text in plain.values()]
    assert any(isinstance(reason, str) for reason in stops), stops
    assert any(isinstance(reason, int) for reason in stops), stops
    assert sum(text.logprobs is not None for text in plain.values()) == 2
    assert sum(text.prompt_logprobs is not None for text in plain.values()) == 2
    assert [text.finish_reason for text in plain.values() if not text.token_ids] == ["length"]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_batching_and_chunking(requests: list[GenerationRequest], plain: Texts, chunk: int) -> None:
    assert run_all(build(config(chunk=chunk)), requests) == plain


@pytest.mark.parametrize(("way", "method", "chunk", "num_drafts"), CASES)
def test_speculation(
    requests: list[GenerationRequest], plain: Texts, way: str, method: str, chunk: int, num_drafts: int
) -> None:
    check_speculation(way, requests, plain, method, chunk, num_drafts)


@pytest.mark.nightly
@pytest.mark.parametrize("num_drafts", NUM_DRAFTS)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", WAYS)
def test_speculation_everywhere(
    requests: list[GenerationRequest], plain: Texts, way: str, method: str, chunk: int, num_drafts: int
) -> None:
    if exists(method, chunk, num_drafts):
        check_speculation(way, requests, plain, method, chunk, num_drafts)


@pytest.mark.parametrize(("run", "slope"), [(run_all, 0.05), (run_alone, 0.2), (run_all, 1.0)])
@pytest.mark.parametrize("method", METHODS)
def test_adaptive_length(requests: list[GenerationRequest], plain: Texts, method: str, run: Run, slope: float) -> None:
    engine = build(config(configured(method), 5, prefix_caching=True), proposer_of(method, plain, 5))
    use_adaptive_length(engine, method, slope)
    assert run(engine, requests) == plain
    engine.check_integrity()
    check_chosen_lengths(engine, method, slope)


def test_suffix_drafts_from_finished_requests_of_the_same_salt_only(
    requests: list[GenerationRequest], plain: Texts
) -> None:
    whole = config("suffix", 8)  # without chunks, whose sizes depend on measured time
    engine = build(replace(whole, scheduler=replace(whole.scheduler, enable_chunked_prefill=False)))
    accepted = [0]
    for salt in ("one", "one", "two"):
        assert run_all(engine, [replace(r, cache_salt=salt) for r in requests]) == plain
        accepted.append(engine.stats().num_accepted_tokens)
    first, again, other = np.diff(accepted)
    assert again > 1.5 * first
    assert other == first


@pytest.mark.parametrize("strategy", ["topp", "target_match"])
def test_both_exact_strategies_give_the_plain_text(
    requests: list[GenerationRequest], plain: Texts, strategy: str
) -> None:
    engine = build(config("ngram", 5, verify_strategy=strategy), oracle_of(plain, 0.25))
    assert run_all(engine, requests) == plain


def test_greedy_strategy_is_plain_decoding_at_temperature_zero(requests: list[GenerationRequest]) -> None:
    cold = [replace(r, params=replace(r.params, temperature=0.0)) for r in requests]
    expected = run_alone(build(config()), cold)
    engine = build(config("ngram", 5, verify_strategy="greedy"), oracle_of(expected, 0.25))
    assert run_all(engine, requests) == expected
    check_drafts(engine, "oracle", 5)


def test_reject_all_is_exact_and_accepts_nothing(requests: list[GenerationRequest], plain: Texts) -> None:
    engine = build(config("ngram", 3, accept_policy="reject_all"), oracle_of(plain, 0.0))
    assert run_all(engine, requests) == plain
    stats = engine.stats()
    assert stats.num_draft_tokens > 0 and stats.num_accepted_tokens == 0


def test_accept_all_emits_the_drafts_and_honours_stops(requests: list[GenerationRequest], plain: Texts) -> None:
    engine = build(config("ngram", 3, accept_policy="accept_all"), oracle_of(plain, 1.0))
    texts = run_all(engine, requests)
    stats = engine.stats()
    assert texts != plain
    assert stats.num_accepted_tokens > 0
    limits = {(r.request_id, i): r.params.max_tokens for r in requests for i in range(r.params.n)}
    assert all(len(text.token_ids) <= (limits[key] or 0) for key, text in texts.items())


def test_relaxed_strategy_is_lossy_where_the_draft_survives(requests: list[GenerationRequest], plain: Texts) -> None:
    engine = build(config("ngram", 5, verify_strategy="topp_relaxed"), oracle_of(plain, 0.5))
    texts = run_all(engine, requests)
    warm = {f"r{i}" for i, r in enumerate(requests) if not r.params.is_greedy}
    assert any(texts[key] != plain[key] for key in plain if key[0] in warm)
    assert all(texts[key] == plain[key] for key in plain if key[0] not in warm)


@pytest.mark.parametrize(
    ("strategy", "policy", "skips"),
    [
        *[("topp", "normal", True), ("greedy", "normal", True)],
        *[("topp_relaxed", "normal", False), ("topp", "accept_all", False), ("topp", "reject_all", False)],
    ],
)
def test_rows_behind_a_rejected_draft_are_left_out_where_no_draft_but_the_token_is_accepted(
    requests: list[GenerationRequest], plain: Texts, strategy: str, policy: str, skips: bool
) -> None:
    engine = build(config("ngram", 3, verify_strategy=strategy, accept_policy=policy), oracle_of(plain, 1.0))
    statuses: set[int] = set()
    assert isinstance(engine.runner, ModelRunner)
    for request in requests[:3]:
        engine.add_request(request)
    for _ in range(6):
        deltas = engine.step()
        assert not any(delta.error for delta in deltas)
        statuses.update(engine.runner.sampling.status.array.tolist())
    assert statuses == {RowStatus.OK, RowStatus.SKIPPED} if skips else statuses == {RowStatus.OK}


def test_float32_is_exact_too(requests: list[GenerationRequest]) -> None:
    expected = run_alone(build(config(dtype="float32")), requests)
    engine = build(config("ngram", 5, 7, prefix_caching=True, dtype="float32"), oracle_of(expected, 0.25))
    assert run_all(engine, requests) == expected
    check_drafts(engine, "oracle", 5)
