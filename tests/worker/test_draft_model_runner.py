# SPDX-License-Identifier: Apache-2.0
"""What a draft model computes, when, and what it agrees on with its target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from paddle import Tensor

from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams, SpeculativeParams
from fastdeploy.engine.engine import Engine
from fastdeploy.ops.attention import KVCache
from fastdeploy.ops.batch_index import BatchIndex
from tests.exactness.requests import run_all
from tests.worker.drafting import eight_requests, engine_with, record_drafts

OFF = SpeculativeParams(method="off")


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    return eight_requests()


def record_rows(engine: Engine) -> list[int]:
    """Return a list that fills with the number of rows of the draft model's calls."""
    model, rows = engine.runner.observer.model, []  # type: ignore[attr-defined]
    forward = model.forward

    def recorded(token_ids: Tensor, batch: BatchIndex, kv_caches: Sequence[KVCache]) -> Tensor:
        rows.append(batch.num_rows)
        return forward(token_ids, batch, kv_caches)

    model.forward = recorded
    return rows


def greedy(prompt: list[int], max_tokens: int, speculative: SpeculativeParams | None = None) -> GenerationRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, speculative=speculative)
    return GenerationRequest("a", prompt, params)


@pytest.mark.parametrize("num_blocks", [None, 30], ids=["room for all", "preemption"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_itself_as_draft_model_is_always_right(
    requests: list[GenerationRequest], temperature: float, num_blocks: int | None
) -> None:
    engine = engine_with("itself", chunk=7, prefix_caching=True, num_blocks=num_blocks)
    for _ in range(2):
        run_all(
            engine, [replace(r, params=replace(r.params, temperature=temperature, max_tokens=64)) for r in requests]
        )
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == (num_blocks is not None)
    assert stats.num_prefix_hit_tokens > 0
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 700


def test_every_token_is_computed_once_and_with_the_first_draft() -> None:
    engine = engine_with("itself")
    rows = record_rows(engine)
    run_all(engine, [greedy(list(range(100, 140)), max_tokens=10)])
    assert rows == [41, 1, 1, 4, 1, 1]


def test_a_long_prompt_is_computed_beside_the_target() -> None:
    engine = engine_with("itself", chunk=64)
    rows = record_rows(engine)
    run_all(engine, [greedy(list(range(100, 250)), max_tokens=3)])
    assert rows == [64, 64, 23]


def test_a_request_without_drafts_costs_nothing_and_leaves_no_hole() -> None:
    engine = engine_with("draft_model", chunk=64, prefix_caching=True)
    rows, prompt = record_rows(engine), [5 * i % 4000 for i in range(400)]
    run_all(engine, [greedy(prompt, 8, OFF)])
    assert rows == []
    drafts = record_drafts(engine)
    text = run_all(engine, [greedy(prompt, 8)])["a", 0]
    assert engine.stats().num_prefix_hit_tokens == 384
    assert rows[:2] == [256, 144]  # as many as a call holds
    fresh = engine_with("draft_model")
    expected = record_drafts(fresh)
    assert run_all(fresh, [greedy(prompt, 8)])["a", 0] == text
    assert drafts == expected


def test_requests_that_share_a_hole_fill_it() -> None:
    engine = engine_with("draft_model", prefix_caching=True)
    prompt = [7 * i % 4000 for i in range(100)]
    run_all(engine, [greedy(prompt, 8, OFF)])
    drafts = record_drafts(engine)
    run_all(engine, [replace(greedy([*prompt, i], 8), request_id=str(i)) for i in range(4)])
    fresh = engine_with("draft_model")
    expected = record_drafts(fresh)
    run_all(fresh, [replace(greedy([*prompt, i], 8), request_id=str(i)) for i in range(4)])
    assert drafts == expected
