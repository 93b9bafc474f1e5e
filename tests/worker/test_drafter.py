# SPDX-License-Identifier: Apache-2.0
"""A drafting model's caches stay complete: its drafts depend on the text alone, whatever became of the request."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastdeploy.core.request import GenerationRequest
from fastdeploy.engine.engine import Engine
from tests.exactness.requests import Text, run_all, run_alone
from tests.worker.drafting import Drafts, check_equal, eight_requests, engine_with, record_drafts

Texts = dict[tuple[str, int], Text]
METHODS = ("mtp", "draft_model")


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    return eight_requests()


@pytest.fixture(scope="module", params=METHODS)
def alone(request: pytest.FixtureRequest, requests: list[GenerationRequest]) -> tuple[str, Texts, Drafts]:
    """Return a method, and texts and drafts of each request alone, whole prompts, no prefix cache."""
    engine = engine_with(request.param)
    drafts = record_drafts(engine)
    texts = run_alone(engine, requests)
    return request.param, texts, drafts


@pytest.mark.parametrize("chunk", [1, 16, 17, 256])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_chunks_and_prefix_hits_draft_the_same(
    requests: list[GenerationRequest],
    alone: tuple[str, Texts, Drafts],
    chunk: int,
    prefix_caching: bool,
) -> None:
    engine = engine_with(alone[0], chunk, prefix_caching)
    drafts = record_drafts(engine)
    for _ in range(2):
        assert run_all(engine, requests) == alone[1]
        check_equal(drafts, alone[2], least=len(alone[2]) * 9 // 10)
        drafts.clear()
    assert (engine.stats().num_prefix_hit_tokens > 0) == prefix_caching


@pytest.mark.parametrize("method", METHODS)
def test_a_turn_that_goes_on_behind_emitted_blocks_drafts_the_same(
    requests: list[GenerationRequest], method: str
) -> None:
    found: list[Drafts] = []
    for prefix_caching in (True, False):
        engine = engine_with(method, 7, prefix_caching)
        texts = run_all(engine, requests)
        turns = [
            replace(r, request_id=f"again {r.request_id}", prompt_token_ids=[*r.prompt_token_ids, *emitted[:90]])
            for r in requests
            for emitted in [texts[r.request_id, 0].token_ids]
        ]
        hits, drafts = engine.stats().num_prefix_hit_tokens, record_drafts(engine)
        run_all(engine, turns)
        assert prefix_caching == (engine.stats().num_prefix_hit_tokens - hits > 80 * len(turns))
        found.append(drafts)
    assert found[0] == found[1]


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preemption_and_aborts_leave_no_hole(
    requests: list[GenerationRequest],
    alone: tuple[str, Texts, Drafts],
    prefix_caching: bool,
) -> None:
    random = np.random.default_rng(11)
    engine = engine_with(alone[0], 13, prefix_caching, num_blocks=30)
    drafts = record_drafts(engine)
    for round_ in range(3):
        for request in requests:
            engine.add_request(replace(request, request_id=f"{round_} {request.request_id}"))
        doomed = [f"{round_} {requests[i].request_id}" for i in random.permutation(len(requests))[:3]]
        while engine.has_unfinished():
            engine.step()
            if doomed and random.random() < 0.1:
                engine.abort(doomed.pop())
            engine.check_integrity()
    assert engine.stats().num_preemptions > 0
    check_equal(drafts, alone[2], least=len(alone[2]) // 2)
    drafts.clear()
    assert run_alone(engine, requests) == alone[1]
    check_equal(drafts, alone[2], least=len(alone[2]) * 9 // 10)


def shift_noise(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    rules = engine.runner.observer._rules  # type: ignore[attr-defined]
    write = rules.write_draft
    monkeypatch.setattr(rules, "write_draft", lambda request, row, drafted: write(request, row, drafted + 100_000))


@pytest.mark.parametrize("method", METHODS)
def test_sampled_requests_agree_more_often_with_the_noise_of_their_position(
    requests: list[GenerationRequest], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    warm = [replace(r, params=replace(r.params, temperature=1.0, seed=5)) for r in requests]
    accepted = []
    for coupled in (True, False):
        engine = engine_with(method)
        if not coupled:
            shift_noise(monkeypatch, engine)
        run_all(engine, warm)
        stats = engine.stats()
        accepted.append(stats.accepted_per_position[0] / stats.num_draft_tokens)
    assert accepted[0] > 1.3 * accepted[1]
