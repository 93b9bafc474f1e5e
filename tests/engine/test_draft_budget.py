# SPDX-License-Identifier: Apache-2.0
"""Which drafts pay: small numbers that can be checked by hand, and what is learned from what became of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest

from fastdeploy.core.request import Draft, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.draft_budget import AdaptiveBudget, DraftBudget
from fastdeploy.spec_decode.naive import NaiveProposer
from fastdeploy.spec_decode.step_cost import StepCost
from tests.doubles import ManualClock, OracleProposer, make_engine, plain_text, run

TEXT = [3, 1, 4, 1, 5]
WRONG = [9, 9, 9, 9, 9]


def make_budget(slope: float, clock: ManualClock | None = None, drafting_model: str = "") -> AdaptiveBudget:
    """Price a step at one second, and every row above the first at `slope` seconds."""
    return AdaptiveBudget(StepCost({1: 1.0, 2: 1.0 + slope}), drafting_model, 5, clock or ManualClock())


def make_draft(tokens: Iterable[int], match_len: int = 0) -> Draft:
    return Draft(np.array(list(tokens), np.int32), "ngram", match_len=match_len)


def make_request(name: str = "a", draft: Iterable[int] = ()) -> Request:
    request = Request(GenerationRequest(name, [1, 2], SamplingParams()), 0, 0, max_total_tokens=4000, max_drafts=5)
    request.set_draft(make_draft(draft))
    return request


def live_through(
    budget: AdaptiveBudget, request: Request, draft: list[int], num_steps: int, match_len: int = 0
) -> list[int]:
    """Take steps in which the request is to emit TEXT again and again; return how many drafts each verified."""
    lengths = []
    for _ in range(num_steps):
        caps = budget.caps([request])
        if caps[0]:
            request.set_draft(make_draft(draft[: caps[0]], match_len))
            budget.proposed([request], caps)
        budget.choose([request], 0)
        lengths.append(len(request.draft))
        request.append(TEXT)
        budget.observe([request], [TEXT])
    return lengths


@pytest.mark.parametrize(
    ("slope", "length"),
    [
        (0.0, 5),  # rows for nothing: all of them
        (0.9, 0),  # a row for 0.9 steps, to save 0.7 of one
        (0.5, 1),  # (1 + 0.7) / 1.5 > (1 + 0.7 + 0.49) / 2
    ],
)
def test_untried_drafts_are_taken_by_what_rows_cost(slope: float, length: int) -> None:
    request = make_request(draft=TEXT)
    make_budget(slope).choose([request], 0)
    assert len(request.draft) == length


def test_only_the_request_whose_drafts_survive_gets_rows() -> None:
    budget = make_budget(0.3)
    right, wrong = make_request("right"), make_request("wrong")
    live_through(budget, right, TEXT, 20)
    live_through(budget, wrong, WRONG, 20)
    right.set_draft(make_draft(TEXT))
    wrong.set_draft(make_draft(WRONG))
    budget.choose([wrong, right], 0)
    assert (len(wrong.draft), len(right.draft)) == (0, 5)
    assert budget.stats().num_rows == 5


def test_a_draft_pays_at_batch_one_and_not_where_its_row_is_dearer() -> None:
    timings = {1: 1.0, 4: 1.1, 16: 12.0}  # flat, then a row costs 0.91
    alone, *crowd = (make_request(str(i), TEXT[:1]) for i in range(9))
    AdaptiveBudget(StepCost(timings), clock=ManualClock()).choose([alone], 0)
    AdaptiveBudget(StepCost(timings), clock=ManualClock()).choose(crowd, 0)
    assert len(alone.draft) == 1
    assert sum(len(request.draft) for request in crowd) == 0


def test_rows_of_a_prompt_make_drafts_as_dear_as_they_are_there() -> None:
    budget = AdaptiveBudget(StepCost({1: 1.0, 8: 1.0, 64: 57.0}), clock=ManualClock())
    beside_nothing, beside_a_prompt = make_request(draft=TEXT), make_request(draft=TEXT)
    budget.choose([beside_nothing], 0)
    budget.choose([beside_a_prompt], 20)
    assert (len(beside_nothing.draft), len(beside_a_prompt.draft)) == (5, 0)


def test_wrong_drafts_are_given_up_and_right_ones_found_again() -> None:
    budget, request = make_budget(0.3), make_request()
    given_up = live_through(budget, request, WRONG, 60)
    assert given_up[0] > 0 and sum(given_up[10:]) == 0
    assert budget.stats().num_zero_choices > 0
    recovered = live_through(budget, request, TEXT, 60)
    assert recovered[-1] == 5


def test_drafts_that_were_never_verified_teach_what_they_were_worth() -> None:
    budget, request = make_budget(0.8), make_request()
    lengths = live_through(budget, request, TEXT, 60)
    assert lengths[0] == 0 and lengths[-1] > 0  # 0.7 is too little, nearly 1 is enough


def test_long_matches_are_told_from_short_ones() -> None:
    budget, request = make_budget(0.3), make_request()
    for _ in range(30):
        live_through(budget, request, TEXT, 1, match_len=9)
        live_through(budget, request, WRONG, 1, match_len=2)
    assert live_through(budget, request, TEXT, 1, match_len=9) == [5]
    assert live_through(budget, request, WRONG, 1, match_len=2) == [0]


def test_asking_stops_where_nothing_is_found_but_for_probes() -> None:
    clock = ManualClock()
    budget, request = make_budget(0.1, clock), make_request()
    asked = []
    for _ in range(400):
        caps = budget.caps([request])
        clock.now += 0.02 * (caps[0] > 0)  # of a step of 1
        budget.proposed([request] * (caps[0] > 0), caps)
        budget.choose([request], 0)
        request.append([1])
        asked.append(caps[0] > 0)
    assert asked[:5] == [True] * 5
    assert sum(asked[100:]) in range(70, 78)  # every fourth: 0.02 / 0.005


def ask_in_turn(
    budget: AdaptiveBudget, clock: ManualClock, request: Request, draft_s: Callable[[int], float], num_steps: int
) -> list[int]:
    """Let a model draft the text itself, one draft in draft_s(step); return how many each step asked for."""
    asked = []
    for step in range(num_steps):
        caps = budget.caps([request])
        asked.append(caps[0])
        clock.now += draft_s(step) * caps[0]
        if caps[0]:
            request.set_draft(make_draft(TEXT[: caps[0]]))
            budget.proposed([request], caps)
        budget.choose([request], 0)
        request.append(TEXT)
        budget.observe([request], [TEXT])
    return asked


@pytest.mark.parametrize(
    ("draft_s", "last"),
    [
        (0.05, 5),
        (0.9, 0),  # a right token saves less than drafting and verifying it costs
    ],
)
def test_a_model_is_asked_for_as_many_drafts_as_their_making_pays(draft_s: float, last: int) -> None:
    clock = ManualClock()
    budget = make_budget(0.3, clock, "ngram")
    asked = ask_in_turn(budget, clock, make_request(), lambda step: draft_s, 100)
    assert asked[0] == 5 and asked[-1] == last


def test_a_slow_first_draft_keeps_nobody_from_the_next_ones() -> None:
    clock = ManualClock()
    budget = make_budget(0.3, clock, "ngram")
    assert ask_in_turn(budget, clock, make_request(), lambda step: 0.05 if step else 100.0, 20)[-1] == 5


def test_a_new_request_of_a_model_is_tried_though_drafting_did_not_pay_for_others() -> None:
    clock = ManualClock()
    budget = make_budget(0.3, clock, "ngram")
    old = make_request()
    assert ask_in_turn(budget, clock, old, lambda step: 0.9, 100)[-1] == 0
    budget.forget(old)
    assert ask_in_turn(budget, clock, make_request(), lambda step: 0.9, 6) == [1, 1, 1, 1, 0, 0]


def test_state_of_a_request_that_ended_is_dropped() -> None:
    budget, request = make_budget(0.3), make_request()
    live_through(budget, request, TEXT, 3)
    with pytest.raises(AssertionError):
        budget.check_integrity([])
    budget.forget(request)
    budget.check_integrity([])


def test_adaptive_engine_emits_the_plain_text_in_as_few_steps_where_rows_are_free() -> None:
    params = SamplingParams(seed=1, ignore_eos=True, max_tokens=30)
    requests = [GenerationRequest("a", [1, 2, 3], params)]
    texts = run(make_engine(NaiveProposer()), requests)
    steps = {}
    for name, budget in (("fixed", DraftBudget()), ("free", make_budget(0.0)), ("dear", make_budget(9.0))):
        engine = make_engine(OracleProposer(texts, 0.0), num_speculative_tokens=4, draft_budget=budget)
        assert run(engine, requests) == texts
        engine.check_integrity()
        steps[name] = engine.stats().num_steps
    assert steps["fixed"] == steps["free"] < steps["dear"] == 29
    assert texts["a", 0] == plain_text([1, 2, 3], 1, params)
