# SPDX-License-Identifier: Apache-2.0
"""The caches of a drafting model stay complete: drafts depend on the context only, not on scheduling."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from fastdeploy.core.faults import InjectedFault
from fastdeploy.core.request import DraftQuota, GenerationRequest, Request
from fastdeploy.core.sampling_params import SpeculativeParams
from fastdeploy.core.step import StepPlan
from fastdeploy.engine.engine import Engine
from fastdeploy.ops.sampling import IntColumn
from fastdeploy.spec_decode.drafting import drafter
from tests.exactness.engines import fix_step_times
from tests.exactness.requests import Text, run_all, run_alone
from tests.spec_decode.drafting.engines import (
    Drafts,
    check_equal,
    eight_requests,
    engine_with,
    greedy,
    record_drafts,
    record_rows,
)

Texts = dict[tuple[str, int], Text]
METHODS = ("mtp", "draft_model")
OFF = SpeculativeParams(method="off")


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
        check_equal(drafts, alone[2], min_common=len(alone[2]) * 9 // 10)
        drafts.clear()
    assert (engine.stats().num_prefix_hit_tokens > 0) == prefix_caching


@pytest.mark.parametrize("method", METHODS)
def test_requests_with_different_numbers_of_drafts_draft_the_same(
    requests: list[GenerationRequest], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    engine = engine_with(method)
    expected = record_drafts(engine)
    texts = run_alone(engine, requests)
    engine = engine_with(method)
    drafts, calls = record_drafts(engine), count()

    def draft_quotas(plan: StepPlan, ready: list[Request]) -> list[DraftQuota]:
        numbers = (min(next(calls) % 4, r.draft_room) for r in ready)
        return [DraftQuota(number, number) for number in numbers]

    monkeypatch.setattr(engine.length_policy, "draft_quotas", draft_quotas)
    assert run_all(engine, requests) == texts
    check_equal(drafts, expected, min_common=100)
    assert {len(draft) for draft in drafts.values()} == {0, 1, 2, 3}


@pytest.mark.parametrize("method", METHODS)
def test_next_turn_of_a_conversation_drafts_the_same_with_cached_blocks(
    requests: list[GenerationRequest], method: str
) -> None:
    found: list[Drafts] = []
    for prefix_caching in (True, False):
        engine = engine_with(method, 7, prefix_caching)
        texts = run_all(engine, requests)
        next_turns = [
            replace(r, request_id=f"again {r.request_id}", prompt_token_ids=[*r.prompt_token_ids, *emitted[:90]])
            for r in requests
            for emitted in [texts[r.request_id, 0].token_ids]
        ]
        hits, drafts = engine.stats().num_prefix_hit_tokens, record_drafts(engine)
        run_all(engine, next_turns)
        assert prefix_caching == (engine.stats().num_prefix_hit_tokens - hits > 80 * len(next_turns))
        found.append(drafts)
    assert found[0] == found[1]


@pytest.mark.parametrize("method", METHODS)
def test_backlog_is_filled_along_with_the_targets_chunks(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(drafter, "MAX_BACKLOG", 60)
    engine = engine_with(method, chunk=64)
    found = record_rows(engine)
    run_all(engine, [greedy(list(range(100, 250)), max_tokens=3)])
    assert found == [64, 64, 23]


@pytest.mark.parametrize("method", METHODS)
def test_filling_stops_after_the_last_keys_are_written(method: str) -> None:
    engine = engine_with(method)
    loop, is_complete = engine.runner.observer.loop, []  # type: ignore[attr-defined]
    fill_stage = loop.fill_stage

    def fill_and_compare(stage: int, num_seqs: int) -> None:
        fill_stage(stage, num_seqs)
        num_rows = loop.batch.buffers.totals.memory[0]
        filled = loop.output[:num_rows].clone()
        loop.stages[stage].compute(loop.batch.attention_metadata(num_rows, num_seqs))
        is_complete.append(bool((filled == loop.output[:num_rows]).all()))

    loop.fill_stage = fill_and_compare
    run_all(engine, [greedy([5 * i % 4000 for i in range(300)], 3)])  # more than the capacity of a call
    assert is_complete == [False, False]


@pytest.mark.parametrize("method", METHODS)
def test_cache_of_a_request_without_drafts_is_not_filled(method: str) -> None:
    engine = engine_with(method, chunk=64, prefix_caching=True)
    found, prompt = record_rows(engine), [5 * i % 4000 for i in range(400)]
    run_all(engine, [greedy(prompt, 8, OFF)])
    assert found == []
    drafts = record_drafts(engine)
    text = run_all(engine, [greedy(prompt, 8)])["a", 0]
    assert engine.stats().num_prefix_hit_tokens == 384
    assert found[:2] == [256, 144]  # the capacity of a call
    fresh = engine_with(method)
    expected = record_drafts(fresh)
    assert run_all(fresh, [greedy(prompt, 8)])["a", 0] == text
    assert drafts == expected


@pytest.mark.parametrize("method", METHODS)
def test_requests_that_share_an_unfilled_prefix_fill_it(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fix_step_times(monkeypatch)
    engine = engine_with(method, prefix_caching=True)
    prompt = [7 * i % 4000 for i in range(100)]
    run_all(engine, [greedy(prompt, 8, OFF)])
    drafts = record_drafts(engine)
    run_all(engine, [replace(greedy([*prompt, i], 8), request_id=str(i)) for i in range(4)])
    fresh = engine_with(method)
    expected = record_drafts(fresh)
    run_all(fresh, [replace(greedy([*prompt, i], 8), request_id=str(i)) for i in range(4)])
    assert drafts == expected


def test_tokens_of_a_pause_are_filled_when_drafting_resumes(
    monkeypatch: pytest.MonkeyPatch, requests: list[GenerationRequest], alone: tuple[str, Texts, Drafts]
) -> None:
    method, texts, drafts = alone
    prompt = tuple(requests[0].prompt_token_ids)
    contexts = sorted(len(context) for context, seed in drafts if context[: len(prompt)] == prompt and not seed)
    resumed = contexts[len(contexts) // 2]
    engine = engine_with(method)
    rows, found = record_rows(engine), record_drafts(engine)

    def draft_quotas(plan: StepPlan, ready: list[Request]) -> list[DraftQuota]:
        return [DraftQuota(r.draft_room, r.draft_room) for r in ready if r.num_tokens >= resumed]

    monkeypatch.setattr(engine.length_policy, "draft_quotas", draft_quotas)
    assert run_alone(engine, requests[:1]).items() <= texts.items()
    assert len(found) >= 10
    assert found.items() <= drafts.items()
    filled = rows.pop(0) if method == "mtp" else 0  # a layer fills many rows by a separate call
    assert filled in (0, resumed - 1)
    assert filled + rows[0] == resumed
    assert max(rows[1:]) <= 5  # the emitted tokens, and the row before them at the start of a block
    assert len(rows) == sum(map(len, found.values()))


@pytest.mark.parametrize("call", ["begin_step", "end_step"])
def test_after_a_step_that_it_did_not_see_a_drafting_model_drafts_the_same(
    requests: list[GenerationRequest], alone: tuple[str, Texts, Drafts], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter, "MAX_BACKLOG", 20)
    engine = engine_with(alone[0], 16, num_blocks=48)  # requests get blocks that others have filled
    observer, calls = engine.runner.observer, count()  # type: ignore[attr-defined]
    drafts, run_call = record_drafts(engine), getattr(observer, call)

    def raise_sometimes(*args: StepPlan) -> bool:
        if next(calls) % 2:
            raise InjectedFault
        return bool(run_call(*args))

    monkeypatch.setattr(observer, call, raise_sometimes)
    for _ in range(2):
        assert run_all(engine, requests) == alone[1]
        shown = {context: draft for context, draft in drafts.items() if draft}
        check_equal(shown, alone[2], min_common=len(alone[2]) // 10)
        assert len(shown) < len(drafts) or call == "end_step"  # which only some steps call
        drafts.clear()


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preemption_and_aborts_leave_no_gap(
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
    check_equal(drafts, alone[2], min_common=len(alone[2]) // 2)
    drafts.clear()
    assert run_alone(engine, requests) == alone[1]
    check_equal(drafts, alone[2], min_common=len(alone[2]) * 9 // 10)


def change_noise(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    metadata = engine.runner.observer._sampling_metadata  # type: ignore[attr-defined]
    write = metadata.write_draft

    def write_with_another_seed(request: Request, row: int) -> None:
        write(request, row)
        metadata.batch.int_params.array[row, IntColumn.SEED] += 1

    monkeypatch.setattr(metadata, "write_draft", write_with_another_seed)


@pytest.mark.parametrize("method", METHODS)
def test_sampled_requests_agree_more_often_with_the_noise_of_their_position(
    requests: list[GenerationRequest], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    sampled = [replace(r, params=replace(r.params, temperature=1.0, seed=5)) for r in requests]
    accepted = []
    for coupled in (True, False):
        engine = engine_with(method)
        if not coupled:
            change_noise(monkeypatch, engine)
        run_all(engine, sampled)
        stats = engine.stats()
        accepted.append(stats.accepted_per_position[0] / stats.num_draft_tokens)
    assert accepted[0] > 1.3 * accepted[1]
