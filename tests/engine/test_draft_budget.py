# SPDX-License-Identifier: Apache-2.0
"""Which drafts pay: small numbers that can be checked by hand, and what is learned from what became of them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from fastdeploy.core.request import Draft, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.draft_budget import COST_PROBE_INTERVAL, AdaptiveBudget, AllDrafts
from fastdeploy.spec_decode.naive import NaiveProposer
from fastdeploy.spec_decode.step_cost import StepCost
from tests.doubles import ManualClock, OracleProposer, make_engine, plain_text, run

TEXT = [3, 1, 4, 1, 5]
WRONG = [9, 9, 9, 9, 9]


def costs(slope: float) -> StepCost:
    """Return a step of one second, and `slope` seconds for every row above the first."""
    return StepCost({1: 1.0, 2: 1.0 + slope})


def make_budget(slope: float) -> AdaptiveBudget:
    return AdaptiveBudget(costs(slope), ManualClock())


def make_request(name: str = "a", draft: Iterable[int] = ()) -> Request:
    request = Request(GenerationRequest(name, [1, 2], SamplingParams()), 0, 0, max_total_tokens=4000, max_drafts=5)
    request.set_draft(Draft(np.array(list(draft), np.int32), "ngram"))
    return request


def live_through(budget: AdaptiveBudget, request: Request, draft: list[int], num_steps: int) -> list[int]:
    """Take steps in which the request is to emit TEXT again and again; return how many drafts each verified."""
    lengths = []
    for _ in range(num_steps):
        request.append(TEXT)
        for asked in budget.select([request]):
            asked.set_draft(Draft(np.array(draft, np.int32), "ngram"))
            budget.proposed([asked])
        budget.choose([request], 0)
        lengths.append(len(request.draft))
        budget.observe([request], [TEXT])
        request.append([])
    return lengths


@pytest.mark.parametrize(
    ("slope", "lengths"),
    [
        (0.0, [5]),  # rows for nothing: all of them
        (0.9, [0]),  # a row for 0.9 steps, to save 0.7 of one
        (0.5, [1]),  # (1 + 0.7) / 1.5 > (1 + 0.7 + 0.49) / 2
    ],
)
def test_untried_drafts_are_taken_by_what_rows_cost(slope: float, lengths: list[int]) -> None:
    request = make_request(draft=TEXT)
    make_budget(slope).choose([request], 0)
    assert [len(request.draft)] == lengths


def test_only_the_request_whose_drafts_survive_gets_rows() -> None:
    budget = make_budget(0.3)
    right, wrong = make_request("right"), make_request("wrong")
    live_through(budget, right, TEXT, 20)
    live_through(budget, wrong, WRONG, 20)
    right.set_draft(Draft(np.array(TEXT, np.int32), "ngram"))
    wrong.set_draft(Draft(np.array(WRONG, np.int32), "ngram"))
    budget.choose([wrong, right], 0)
    assert (len(wrong.draft), len(right.draft)) == (0, 5)
    assert budget.stats().num_rows == 5


def test_a_draft_pays_at_batch_one_and_not_where_its_row_is_dearer() -> None:
    timings = {1: 1.0, 4: 1.1, 16: 12.0}  # flat, then a row costs 0.91
    alone, *crowd = (make_request(str(i), TEXT[:1]) for i in range(9))
    AdaptiveBudget(StepCost(timings), ManualClock()).choose([alone], 0)
    AdaptiveBudget(StepCost(timings), ManualClock()).choose(crowd, 0)
    assert len(alone.draft) == 1
    assert sum(len(request.draft) for request in crowd) == 0


def test_rows_of_a_prompt_make_drafts_as_dear_as_they_are_there() -> None:
    budget = AdaptiveBudget(StepCost({1: 1.0, 8: 1.0, 64: 57.0}), ManualClock())
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
    budget, request = make_budget(0.9), make_request()
    lengths = live_through(budget, request, TEXT, 40)
    assert lengths[0] == 0 and lengths[-1] > 0  # 0.7 is too little, nearly 1 is enough


def test_asking_stops_where_nothing_is_found_but_for_probes() -> None:
    clock = ManualClock()
    budget, request = AdaptiveBudget(costs(0.1), clock), make_request()
    asked = []
    for _ in range(400):
        request.append([1])
        chosen = budget.select([request])
        clock.now += 0.02  # of a step of 1
        budget.proposed(chosen)
        budget.choose([request], 0)
        asked.append(len(chosen))
    assert asked[0] == 1
    assert 1 <= sum(asked[-100:]) <= 30


def test_cost_of_a_row_is_measured_again_where_none_has_paid_for_long() -> None:
    budget = make_budget(5.0)
    lengths = []
    for _ in range(COST_PROBE_INTERVAL + 1):
        request = make_request(draft=TEXT)
        budget.choose([request], 0)
        lengths.append(len(request.draft))
    assert lengths == [0] * (COST_PROBE_INTERVAL - 1) + [1, 0]


def test_step_costs_follow_the_real_steps_everywhere_and_where_they_were_taken() -> None:
    cost = StepCost({1: 1.0, 2: 2.0, 4: 4.0})
    for _ in range(300):
        cost.learn(1, 2.0)
    assert cost.seconds(1) == pytest.approx(2.0, rel=0.01)
    assert 2.0 < cost.seconds(2) < 4.1
    for _ in range(300):
        cost.learn(2, 2.2)
    assert cost.seconds(2) == pytest.approx(2.2, rel=0.01)
    assert cost.seconds(8) > cost.seconds(4) > cost.seconds(2)


def test_correction_of_a_row_count_fades_while_it_is_not_computed() -> None:
    cost = StepCost({1: 1.0, 2: 1.1, 3: 1.2})
    for _ in range(100):
        cost.learn(1, 1.0)
        cost.learn(3, 3.0)
    believed = cost.seconds(3) / cost.seconds(1)
    for _ in range(3000):
        cost.learn(1, 1.0)
    assert believed > 2.0
    assert cost.seconds(3) / cost.seconds(1) == pytest.approx(1.2, rel=0.02)


def test_one_slow_step_is_not_believed() -> None:
    cost = StepCost({1: 1.0, 2: 1.5})
    cost.learn(1, 100.0)
    assert cost.seconds(1) < 1.02


def test_adaptive_engine_emits_the_plain_text_in_as_few_steps_where_rows_are_free() -> None:
    params = SamplingParams(seed=1, ignore_eos=True, max_tokens=30)
    requests = [GenerationRequest("a", [1, 2, 3], params)]
    texts = run(make_engine(NaiveProposer()), requests)
    steps = {}
    for name, budget in (("fixed", AllDrafts()), ("free", make_budget(0.0)), ("dear", make_budget(9.0))):
        engine = make_engine(OracleProposer(texts, 0.0), num_speculative_tokens=4, draft_budget=budget)
        assert run(engine, requests) == texts
        engine.check_integrity()
        steps[name] = engine.stats().num_steps
    assert steps["fixed"] == steps["free"] < steps["dear"] == 29
    assert texts["a", 0] == plain_text([1, 2, 3], 1, params)
