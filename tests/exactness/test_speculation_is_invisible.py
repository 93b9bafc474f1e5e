# SPDX-License-Identifier: Apache-2.0
"""The law of exactness on the demonstration model: no way of computing a request changes what it comes to.

Every case compares tokens, endings and log-probabilities, bit for bit, with plain decoding of each request alone, and
asserts from counters that what it is about really happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.speculative_config import EXTENSIONS
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.step import StepPlan
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.ops.sampling import RowStatus
from fastdeploy.spec_decode.adaptive.adaptive_length import AdaptiveLength
from fastdeploy.spec_decode.adaptive.step_times import DraftPasses, StepTimes
from fastdeploy.spec_decode.proposers.base import Proposer
from fastdeploy.worker.model_runner import ModelRunner
from tests.doubles import OracleProposer
from tests.exactness.requests import Text, make_requests, run_all, run_alone

Texts = dict[tuple[str, int], Text]
Run = Callable[[Engine, Sequence[GenerationRequest]], Texts]
CHUNKS = (1, 7, 64, 2048)
NUM_DRAFTS = (1, 3, 5, 16)
# the width of a chunk and what is proposed meet only in the mechanism that n-gram and oracle drafts go through too
CASES = [  # method, chunk, most drafts
    *((method, chunk, num) for method in ("ngram", "oracle") for chunk in CHUNKS for num in NUM_DRAFTS),
    *(("suffix", chunk, num) for chunk in (7, 2048) for num in NUM_DRAFTS),
    *(("mtp", chunk, num) for chunk in (7, 2048) for num in (1, 2, 3)),
    *(("draft_model", chunk, num) for chunk, num in ((7, 3), (2048, 1), (2048, 16))),
    *((strategy, 7, 5) for strategy in ("with_ngram", "with_suffix")),
]


MODELS = ("mtp", "with_ngram", "with_suffix", "draft_model")
METHODS = ("ngram", "suffix", "oracle", *MODELS)


def config(
    method: str = "naive",
    num_drafts: int = 0,
    chunk: int = 2048,
    num_blocks: int | None = None,
    prefix_caching: bool = False,
    verify_strategy: str = "topp",
    accept_policy: str = "normal",
    dtype: str = "auto",
) -> EngineConfig:
    return EngineConfig(
        model="demo",
        dtype=dtype,
        max_model_len=256,
        seed=0,
        cache=CacheConfig(block_size=16, num_blocks=num_blocks, enable_prefix_caching=prefix_caching),
        scheduler=SchedulerConfig(
            max_num_seqs=16, max_num_batched_tokens=256, long_prefill_token_threshold=min(chunk, 256)
        ),
        speculative=parse_speculative_config(
            {
                "method": "mtp" if method in EXTENSIONS else method,
                "num_speculative_tokens": num_drafts,
                "model": "demo/draft" if method == "draft_model" else None,
                "mtp_strategy": method if method in EXTENSIONS else None,
                "verify_strategy": verify_strategy,
                "accept_policy": accept_policy,
                "adaptive": False,
            }
        ),
    )


def proposer_of(method: str, texts: Texts, seed: int) -> Proposer | None:
    """Return the oracle, or None for the proposer of the configuration."""
    return oracle_of(texts, corruption=0.25, seed=seed) if method == "oracle" else None


def configured(method: str) -> str:
    """Return the method to name in the configuration; the oracle stands in for ngram's proposer."""
    return "ngram" if method == "oracle" else method


def oracle_of(texts: Texts, corruption: float, seed: int = 0) -> OracleProposer:
    return OracleProposer({key: list(text.token_ids) for key, text in texts.items()}, corruption, seed)


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    return make_requests(Tokenizer.from_pretrained(resolve_model_path("demo")), make_engine(config()))


@pytest.fixture(scope="module")
def plain(requests: list[GenerationRequest]) -> Texts:
    """Plain decoding, one request at a time, whole prompts, no cache: what every case must equal."""
    return run_alone(make_engine(config()), requests)


def build(cfg: EngineConfig, proposer: Proposer | None = None) -> Engine:
    return make_engine(cfg, proposer=proposer)


def test_plain_texts_use_what_they_are_meant_to_use(plain: Texts) -> None:
    assert {text.finish_reason for text in plain.values()} == {"stop", "length"}
    stops = [text.stop_reason for text in plain.values()]
    assert any(isinstance(reason, str) for reason in stops), stops
    assert any(isinstance(reason, int) for reason in stops), stops
    assert sum(text.logprobs is not None for text in plain.values()) == 2
    assert sum(text.prompt_logprobs is not None for text in plain.values()) == 1


@pytest.mark.parametrize("chunk", CHUNKS)
def test_batching_and_chunking(requests: list[GenerationRequest], plain: Texts, chunk: int) -> None:
    assert run_all(build(config(chunk=chunk)), requests) == plain


@pytest.mark.parametrize("run", [run_all, run_alone])
@pytest.mark.parametrize(("method", "chunk", "num_drafts"), CASES)
def test_speculation(
    requests: list[GenerationRequest], plain: Texts, method: str, run: Run, chunk: int, num_drafts: int
) -> None:
    engine = build(config(configured(method), num_drafts, chunk), proposer_of(method, plain, num_drafts))
    assert run(engine, requests) == plain
    check_bite(engine, method, num_drafts)


@pytest.mark.parametrize(("run", "slope"), [(run_all, 0.05), (run_alone, 0.2), (run_all, 1.0)])
@pytest.mark.parametrize("method", METHODS)
def test_adaptive_length(requests: list[GenerationRequest], plain: Texts, method: str, run: Run, slope: float) -> None:
    engine = build(config(configured(method), 5, prefix_caching=True), proposer_of(method, plain, 5))
    adapt(engine, method, slope)
    assert run(engine, requests) == plain
    engine.check_integrity()
    check_choice(engine, method, slope)


@pytest.mark.parametrize("run", [run_all, run_alone])
@pytest.mark.parametrize(("method", "chunk", "num_drafts"), CASES)
def test_prefix_hits(
    requests: list[GenerationRequest], plain: Texts, method: str, run: Run, chunk: int, num_drafts: int
) -> None:
    cfg = config(configured(method), num_drafts, chunk, prefix_caching=True)
    engine = build(cfg, proposer_of(method, plain, num_drafts))
    assert run(engine, requests) == plain
    before = engine.stats().num_prefix_hit_tokens
    assert run(engine, requests) == plain
    assert engine.stats().num_prefix_hit_tokens > before
    check_bite(engine, method, num_drafts)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize(("method", "chunk", "num_drafts"), CASES)
def test_forced_preemption(
    requests: list[GenerationRequest], plain: Texts, method: str, prefix_caching: bool, chunk: int, num_drafts: int
) -> None:
    cfg = config(configured(method), num_drafts, chunk, num_blocks=24, prefix_caching=prefix_caching)
    engine = build(cfg, proposer_of(method, plain, num_drafts))
    assert run_all(engine, requests) == plain
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_free_blocks == stats.num_blocks
    check_bite(engine, method, num_drafts)


def test_suffix_drafts_from_finished_requests_of_the_same_salt_only(
    requests: list[GenerationRequest], plain: Texts
) -> None:
    whole = config("suffix", 8)  # prompts are read whole: how chunks share steps depends on what those took
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
    check_bite(engine, "oracle", 5)


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
    check_bite(engine, "oracle", 5)


def adapt(engine: Engine, method: str, slope: float) -> None:
    """Let an engine of 5 drafts choose their number: a row costs `slope` of a step."""
    ticks, run, now = count(), engine.runner.run, 0.0

    def clock() -> float:
        return now + 0.001 * next(ticks)

    def step(plan: StepPlan) -> Any:
        nonlocal now
        now += 1.0
        return run(plan)

    engine.runner.run = step  # type: ignore[method-assign]
    is_model = method in MODELS
    passes = DraftPasses(engine.proposer.name, 5, 0.01, 0.0) if is_model else None
    times = StepTimes({1: 1.0, 2: 1.0 + slope})
    policy = AdaptiveLength(times, passes, not is_model or method in EXTENSIONS, clock)
    engine.scheduler.length_policy = engine.length_policy = policy


def check_choice(engine: Engine, method: str, slope: float) -> None:
    """Assert that drafts were accepted and rejected, if rows are cheap, and that not all were made and verified."""
    stats = engine.stats()
    if slope < 1.0:
        assert stats.num_draft_tokens > stats.num_accepted_tokens > 0
    if method in ("mtp", "draft_model"):  # which are asked for no more than is verified
        assert stats.num_draft_tokens < 5 * stats.num_steps
    else:
        assert stats.draft_length.num_withheld_tokens > 0


def check_bite(engine: Engine, method: str, num_drafts: int) -> None:
    """Assert that drafts were accepted and rejected, for the oracle at every length 0 .. K."""
    stats = engine.stats()
    assert stats.num_accepted_tokens > 0, stats
    assert stats.num_draft_tokens > stats.num_accepted_tokens, stats
    if method in EXTENSIONS:
        assert len(stats.accepted_per_position) > 1 and stats.accepted_per_position[-1] > 0
    if method == "oracle":
        assert len(stats.accepted_per_position) == num_drafts
        assert stats.accepted_per_position[0] > 0
        assert num_drafts > 5 or stats.accepted_per_position[-1] > 0
