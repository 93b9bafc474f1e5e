# SPDX-License-Identifier: Apache-2.0
"""Engines of the demonstration model for the tests of exactness, and checks that a test did what it is about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.speculative_config import EXTENSIONS
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.step import StepPlan
from fastdeploy.engine.batch_scheduler import BatchScheduler
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.spec_decode.adaptive.adaptive_length import AdaptiveLength
from fastdeploy.spec_decode.adaptive.step_times import DraftPasses, StepTimes
from fastdeploy.spec_decode.proposers.base import Proposer
from tests.doubles import OracleProposer
from tests.drafting_models import DRAFTING_MODELS, HEADS
from tests.exactness.requests import Text, run_all, run_alone

Texts = dict[tuple[str, int], Text]
Run = Callable[[Engine, Sequence[GenerationRequest]], Texts]
CHUNKS = (7, 2048, 1, 64)
NUM_DRAFTS = (5, 1, 16, 3)
MODELS = ("mtp", "with_ngram", "with_suffix", "draft_model")
METHODS = ("ngram", "suffix", "oracle", *MODELS)


@dataclass(frozen=True)
class Way:
    """A way to run the requests: together or one by one, with a prefix cache, and with few blocks."""

    run: Run
    prefix_caching: bool = False
    num_blocks: int | None = None


WAYS = {
    "together": Way(run_all),
    "alone": Way(run_alone),
    "prefix-hits-together": Way(run_all, prefix_caching=True),
    "prefix-hits-alone": Way(run_alone, prefix_caching=True),
    "preemption": Way(run_all, num_blocks=24),
    "preemption-prefix-caching": Way(run_all, prefix_caching=True, num_blocks=24),
}


def exists(*case: Any) -> bool:
    """Return False for a case, which ends in (method, chunk, number of drafts), that its method does not support."""
    method, _, num_drafts = case[-3:]
    return num_drafts <= 3 if method == "mtp" else num_drafts > 1 or method not in EXTENSIONS


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
    """Return a configuration whose drafts have a fixed length and whose prefill takes `chunk` tokens per step."""
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
                "model": DRAFTING_MODELS.get(method),
                "mtp_strategy": method if method in EXTENSIONS else None,
                "verify_strategy": verify_strategy,
                "accept_policy": accept_policy,
                "adaptive": False,
            }
        ),
    )


def proposer_of(method: str, texts: Texts, seed: int) -> Proposer | None:
    """Return the oracle, or None for the configuration's own proposer."""
    return oracle_of(texts, corruption=0.25, seed=seed) if method == "oracle" else None


def configured(method: str) -> str:
    """Return the method for the configuration; the oracle replaces the proposer of ngram."""
    return "ngram" if method == "oracle" else method


def oracle_of(texts: Texts, corruption: float, seed: int = 0) -> OracleProposer:
    """Return a proposer of the texts themselves, of whose tokens the share `corruption` is wrong."""
    return OracleProposer({key: list(text.token_ids) for key, text in texts.items()}, corruption, seed)


def build(cfg: EngineConfig, proposer: Proposer | None = None) -> Engine:
    """Build an engine, with the given proposer in place of the configuration's."""
    return make_engine(cfg, proposer=proposer)


def use_adaptive_length(engine: Engine, method: str, slope: float) -> None:
    """Let an engine with K = 5 choose draft lengths in virtual time, in which a row takes `slope` of a step."""
    ticks, run, now = count(), engine.runner.run, 0.0

    def clock() -> float:
        return now + 0.001 * next(ticks)

    def step(plan: StepPlan) -> Any:
        nonlocal now
        now += 1.0
        return run(plan)

    engine.runner.run = step  # type: ignore[method-assign]
    is_model = method in MODELS or method in HEADS
    passes = DraftPasses(engine.proposer.name, 5, *2 * [StepTimes({1: 0.01})]) if is_model else None
    times = StepTimes({1: 1.0, 2: 1.0 + slope})
    policy = AdaptiveLength(times, passes, not is_model or method in EXTENSIONS, clock)
    engine.scheduler.length_policy = engine.length_policy = policy


def check_chosen_lengths(engine: Engine, method: str, slope: float) -> None:
    """Assert that some drafts were accepted and some rejected if rows are cheap, and that others were not verified."""
    stats = engine.stats()
    if slope < 1.0:
        assert stats.num_draft_tokens > stats.num_accepted_tokens > 0
    if method in ("mtp", "draft_model"):  # which propose no more than is verified
        assert stats.num_draft_tokens < 5 * stats.num_steps
    else:
        assert stats.draft_length.num_withheld_tokens > 0


def fix_step_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all steps take a millisecond, so that the prefill budget does not depend on the load of the machine."""
    record = BatchScheduler.record_step_time
    monkeypatch.setattr(BatchScheduler, "record_step_time", lambda self, plan, step_s: record(self, plan, 1e-3))


def check_drafts(engine: Engine, method: str, num_drafts: int) -> None:
    """Assert that drafts were accepted and rejected; those of the oracle at every position, if it has few."""
    stats = engine.stats()
    assert stats.num_accepted_tokens > 0, stats
    assert stats.num_draft_tokens > stats.num_accepted_tokens, stats
    if method in EXTENSIONS:
        assert len(stats.accepted_per_position) > 1
        assert stats.accepted_per_position[:4][-1] > 0  # long drafts are few: none may be accepted as a whole
    if method == "oracle":
        assert len(stats.accepted_per_position) == num_drafts
        assert stats.accepted_per_position[0] > 0
        assert num_drafts > 5 or stats.accepted_per_position[-1] > 0


def check_speculation(
    name: str,
    requests: list[GenerationRequest],
    plain: Texts,
    method: str,
    chunk: int,
    num_drafts: int,
    change: Callable[[EngineConfig], EngineConfig] = lambda cfg: cfg,
    check: Callable[[Engine, str, int], None] = check_drafts,
) -> None:
    """Run requests in one of WAYS; assert that they have their plain texts, and that what the way is about took place.

    Args:
        change: of the configuration, for other numerics.
        check: of the drafts, with the method and the number of drafts.
    """
    way = WAYS[name]
    cfg = config(configured(method), num_drafts, chunk, way.num_blocks, way.prefix_caching)
    engine = build(change(cfg), proposer_of(method, plain, num_drafts))
    assert way.run(engine, requests) == plain
    if way.num_blocks is not None:
        assert engine.stats().num_preemptions > 0
    elif way.prefix_caching:
        before = engine.stats().num_prefix_hit_tokens
        assert way.run(engine, requests) == plain
        assert engine.stats().num_prefix_hit_tokens > before
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    check(engine, method, num_drafts)
