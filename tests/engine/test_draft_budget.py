# SPDX-License-Identifier: Apache-2.0
"""Which drafts pay: small numbers that can be checked by hand, and what is learned from what became of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

from fastdeploy.core.request import NO_DRAFT, Draft, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.step import StepPlan
from fastdeploy.engine.draft_budget import (
    CONTROL_STEPS,
    LONG_REST,
    REST_TIMED,
    AdaptiveBudget,
    Ask,
    DraftBudget,
    DraftingModel,
)
from fastdeploy.spec_decode.naive import NaiveProposer
from fastdeploy.spec_decode.step_cost import CallCost, StepCost
from tests.doubles import FixedCost, ManualClock, OracleProposer, make_engine, plain_text, run

TEXT = [3, 1, 4, 1, 5]
WRONG = [9, 9, 9, 9, 9]


def make_budget(slope: float, clock: ManualClock | None = None) -> AdaptiveBudget:
    """Price a step at one second, and every row above the first at `slope` seconds."""
    return AdaptiveBudget(StepCost({1: 1.0, 2: 1.0 + slope}), clock=clock or ManualClock())


def make_model_budget(clock: ManualClock, call_s: float = 0.05, row_s: float = 0.0) -> AdaptiveBudget:
    """Let a model draft, `call_s` a draft, where a step takes one second and every further row 0.3."""
    model = DraftingModel("ngram", 5, CallCost(call_s, 0.0, row_s))
    return AdaptiveBudget(FixedCost({1: 1.0, 2: 1.3}), model, clock)


def decoding_step(*requests: Request) -> StepPlan:
    """Return the plan of a step in which each request verifies its draft."""
    rows = [1 + len(request.draft) for request in requests]
    return StepPlan(requests, rows, rows, [n - 1 for n in rows], rows, [0] * len(rows))


def make_draft(tokens: Iterable[int], match_len: int = 0) -> Draft:
    return Draft(list(tokens), "ngram", match_len=match_len)


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
        if cap := ask(budget, request):
            request.set_draft(make_draft(draft[:cap], match_len))
            budget.proposed([request], [Ask(cap, 0)])
        budget.choose([request], 0)
        lengths.append(len(request.draft))
        request.append(TEXT)
        budget.observe([request], [TEXT])
    return lengths


def ask(budget: AdaptiveBudget, request: Request) -> int:
    """Return how many drafts the step asks for."""
    return budget.ask([request])[0].num_drafts if budget.wants_drafts(1) else 0


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
    budget = make_budget(0.2)
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


def asked_where_nothing_is_found(clock: ManualClock, proposing_s: float) -> list[bool]:
    """Return in which of 400 steps of a second a request was asked, of which no draft is ever made."""
    budget, request = make_budget(0.1, clock), make_request()
    asked = []
    for _ in range(400):
        cap = ask(budget, request)
        asked.append(cap > 0)
        if cap:
            clock.now += proposing_s
            budget.proposed([request], [Ask(cap, 0)])
        budget.choose([request], 0)
        clock.now += 1.0
        budget.end_step(decoding_step(request))
        request.append([1])
    return asked


def test_asking_stops_where_nothing_is_found_but_for_probes() -> None:
    asked = asked_where_nothing_is_found(ManualClock(), 0.11)
    assert asked[:5] == [True] * 5
    assert sum(asked[100:]) == 7  # one step in 40, of 1 each, for 0.11


class TickingClock(ManualClock):
    """A clock by which every look at it takes time, as what lies between two looks does."""

    def __call__(self) -> float:
        self.now += 0.02
        return self.now


def test_what_choosing_takes_is_paid_for_too() -> None:
    asked = asked_where_nothing_is_found(
        TickingClock(), 0.0
    )  # two looks at the clock alone would pay in a step of four
    assert all(asked[:5])
    assert 10 <= sum(asked[100:]) <= 30


class SlowLine:
    """Prices drafts as `line` does, in a quarter of a second."""

    def __init__(self, line: Callable[..., list[float]], clock: ManualClock) -> None:
        self._line, self._clock = line, clock

    def __call__(self, num_rows: int, num_more: int, num_requests: float) -> list[float]:
        self._clock.now += 0.25
        return self._line(num_rows, num_more, num_requests)


def test_handling_drafts_is_part_of_what_rows_cost() -> None:
    clock, believed = ManualClock(), StepCost({1: 1.0, 8: 1.0})
    budget, request = AdaptiveBudget(believed, clock=clock), make_request()
    learned: list[float] = []
    believed.learn_drafted = lambda rows, weight, seconds: learned.append(seconds)  # type: ignore[method-assign]
    believed.line = SlowLine(believed.line, clock)  # type: ignore[method-assign]
    for _ in range(2):
        request.set_draft(make_draft(TEXT))
        budget.proposed([request], [Ask(5, 0)])
        budget.choose([request], 0)
        clock.now += 1.0
        budget.observe([request], [TEXT])
        budget.end_step(decoding_step(request))
    assert learned == pytest.approx([1.25] * 2)


def ask_in_turn(
    budget: AdaptiveBudget,
    clock: ManualClock,
    request: Request,
    draft_s: Callable[[int], float],
    num_steps: int,
    draft: Sequence[int] = TEXT,
) -> list[int]:
    """Let a model draft the first tokens of `draft`, each in draft_s(step); return how many each step asked for."""
    asked = []
    for step in range(num_steps):
        cap = ask(budget, request)
        asked.append(cap)
        clock.now += draft_s(step) * cap
        if cap:
            request.set_draft(make_draft(draft[:cap]))
            budget.proposed([request], [Ask(cap, cap)])
        budget.choose([request], 0)
        clock.now += 1.0
        request.append(TEXT)
        budget.observe([request], [TEXT])
        budget.end_step(decoding_step(request))
    return asked


@pytest.mark.parametrize(
    ("believed_s", "draft_s", "first", "last"),
    [
        (0.05, 0.05, 2, 5),  # (1 + 0.7 + 0.49) / 1.7 is the best until they are known to come true
        (0.9, 0.9, 0, 0),  # a right token saves less than drafting and verifying it costs
        (0.05, 0.9, 2, 0),
    ],
)
def test_a_model_is_asked_for_as_many_drafts_as_their_making_pays(
    believed_s: float, draft_s: float, first: int, last: int
) -> None:
    clock = ManualClock()
    budget = make_model_budget(clock, believed_s)
    asked = ask_in_turn(budget, clock, make_request(), lambda step: draft_s, 90)
    assert asked[0] == first and asked[-1] == last


def test_a_slow_first_draft_keeps_nobody_from_the_next_ones() -> None:
    clock = ManualClock()
    budget = make_model_budget(clock)
    assert ask_in_turn(budget, clock, make_request(), lambda step: 0.05 if step else 100.0, 20)[-1] == 5


def rest(budget: AdaptiveBudget, clock: ManualClock, requests: Sequence[Request], seconds: float) -> None:
    """Let steps without drafts, of which one is timed, take so long together."""
    for _ in range(REST_TIMED):
        budget.choose(requests, 0)
        clock.now += seconds / REST_TIMED
        budget.end_step(decoding_step(*requests))
        budget.wants_drafts(len(requests))


def test_where_a_model_does_not_pay_the_request_that_has_waited_longest_is_tried_with_one_draft() -> None:
    clock = ManualClock()
    budget, first, second = make_model_budget(clock, 0.9), make_request("a"), make_request("b")
    assert ask_in_turn(budget, clock, first, lambda step: 0.9, 90)[-1] == 0
    second.append(TEXT)
    tried = []
    for _ in range(3):
        rest(budget, clock, [first, second], 2250.0)  # of which asking may take nine
        asks = budget.ask([first, second])
        tried.append([ask.num_steps for ask in asks])
        clock.now += 12.0
        budget.proposed([[first, second][i] for i in (0, 1) if asks[i].num_steps], [Ask(1, 1)])
        assert budget.ask([first, second]) == [Ask(0, 0), Ask(0, 0)]
    assert tried == [[1, 0], [0, 1], [1, 0]]


def test_a_try_waits_until_what_it_takes_is_saved_the_text_to_be_read_included() -> None:
    clock = ManualClock()
    budget, request = make_model_budget(clock, call_s=0.9, row_s=0.1), make_request()
    request.append([4] * 40)  # 41 tokens before the last one, 4.1 s
    tried = []
    for _ in range(7):
        tried.append(budget.ask([request]) == [Ask(1, 1)])
        rest(budget, clock, [request], 247.5)
    assert tried == [False] * 6 + [True]  # 0.99 saved each time


def test_beside_its_prompt_a_request_is_tried_at_the_prompts_expense() -> None:
    clock = ManualClock()
    budget, fresh, old = make_model_budget(clock, 0.9), make_request("a"), make_request("b")
    fresh.append([4])
    old.append([4, 4])
    prompt = decoding_step(fresh, old)
    prompt.num_scheduled[0] += 100
    budget.choose([old], 0, has_waiting=True)
    clock.now += 250.0
    budget.end_step(prompt)
    assert budget.ask([old]) == [Ask(0, 0)]
    assert budget.ask([fresh, old]) == [Ask(1, 1), Ask(0, 0)]


def test_a_request_that_is_alone_ready_is_not_taken_for_the_whole_batch() -> None:
    model = DraftingModel("ngram", 5, CallCost(0.2, 0.0, 0.0))
    cost = FixedCost({1: 1.0, 64: 1.0})
    alone, crowded = (AdaptiveBudget(cost, model, ManualClock()) for _ in range(2))
    alone.wants_drafts(1)
    crowded.wants_drafts(16)
    request = make_request()
    assert alone.ask([request])[0].num_steps > 0
    assert crowded.ask([request]) == [Ask(0, 0)]  # 0.7 of a sixteenth of the batch's tokens for a fifth of its step


def live_with_model(budget: AdaptiveBudget, clock: ManualClock, draft: list[int], num_steps: int) -> list[int]:
    """Let a model make the first tokens of `draft`, 0.05 s each; return how many each step asked for."""
    return ask_in_turn(budget, clock, make_request(), lambda step: 0.05, num_steps, draft)


def test_a_model_that_is_tried_goes_on_while_its_drafts_come_true() -> None:
    clock = ManualClock()
    budget = make_model_budget(clock)
    wrong = live_with_model(budget, clock, WRONG, 60)
    assert sum(wrong[20:]) <= 9 and max(wrong[20:]) == 1  # within a hundredth of the time, for 0.05 of a step
    right = live_with_model(budget, clock, TEXT, 60)
    assert right[-1] >= 4
    found = next(i for i, cap in enumerate(right) if cap)
    assert all(right[found:])


def test_what_a_try_takes_to_catch_up_is_not_the_price_of_a_call() -> None:
    clock = ManualClock()
    budget, request = make_model_budget(clock), make_request()
    live_with_model(budget, clock, WRONG, 40)
    for _ in range(60):
        rest(budget, clock, [request], 2000.0)  # of which asking may take ten
        assert budget.ask([request]) == [Ask(1, 1)]
        clock.now += 5.0
        budget.proposed([request], [Ask(1, 1)])
    assert live_with_model(budget, clock, TEXT, 700)[-1] >= 4


def test_more_drafts_are_hoped_for_where_all_that_were_made_come_true() -> None:
    clock = ManualClock()
    budget = make_model_budget(clock)
    asked = live_with_model(budget, clock, [*TEXT[:1], *WRONG[1:]], 200)
    assert 1 <= asked[20:].count(2) <= 10 and max(asked[20:]) == 2
    assert live_with_model(budget, clock, TEXT, 200)[-1] >= 4


def test_text_and_a_model_are_asked_each_for_what_it_is_worth() -> None:
    clock = ManualClock()
    model = DraftingModel("mtp", 2, CallCost(0.9, 0.0, 0.0))
    budget = AdaptiveBudget(StepCost({1: 1.0, 2: 1.1}), model, clock, matches_text=True)
    request, asked = make_request(), []
    for _ in range(60):
        ask = budget.ask([request])[0]
        asked.append(ask)
        clock.now += 0.001 + 0.9 * ask.num_steps
        if ask.num_drafts:
            request.set_draft(make_draft(TEXT[: ask.num_drafts]))  # a match, which the model's calls add nothing to
            budget.proposed([request], [ask])
        budget.choose([request], 0)
        request.append(TEXT)
        budget.observe([request], [TEXT])
        clock.now += 1.0
    assert asked == [Ask(5, 0)] * 60


def test_a_step_without_drafts_is_taken_now_and_then_to_judge_those_with_drafts_by() -> None:
    clock = ManualClock()
    budget, request, plain = AdaptiveBudget(FixedCost({1: 1.0, 2: 1.4}), clock=clock), make_request(), []
    for _ in range(1500):
        if cap := ask(budget, request):
            request.set_draft(make_draft(TEXT[:1]))
            budget.proposed([request], [Ask(cap, 0)])
        budget.choose([request], 0)
        plain.append(request.draft is NO_DRAFT)
        plan = decoding_step(request)
        clock.now += 1.0
        request.append(TEXT[: len(plan.num_scheduled) + plan.num_drafts[0]])
        budget.end_step(plan)
    found = [i for i, is_plain in enumerate(plain) if is_plain]
    assert 950 < found[0] < 980  # each is expected to give up 0.7 - 0.4, all eight a four-hundredth of the time
    assert found == list(range(found[0], found[0] + CONTROL_STEPS))


def test_calls_that_a_match_took_the_place_of_are_not_paid_for() -> None:
    clock, cost, request = ManualClock(), CallCost(0.1, 0.0, 0.0), make_request()
    model = DraftingModel("mtp", 2, cost)
    budget, learned = AdaptiveBudget(FixedCost({1: 1.0, 64: 1.0}), model, clock, matches_text=True), []
    for draft in make_draft(TEXT), Draft(TEXT[:2], "mtp"):
        assert budget.ask([request]) == [Ask(5, 2)]
        request.set_draft(draft)
        clock.now += 0.5
        budget.proposed([request], [Ask(5, 2)])
        learned.append(cost.own_s)
    assert learned[0] == 0.0 < learned[1]


def test_a_model_keeps_the_calls_that_bring_more_than_the_matches_do() -> None:
    clock = ManualClock()
    model = DraftingModel("mtp", 2, CallCost(0.1, 0.0, 0.0))
    budget = AdaptiveBudget(FixedCost({1: 1.0, 64: 1.0}), model, clock, matches_text=True)
    matched, unmatched = make_request("a"), make_request("b")
    for request in (matched, unmatched):
        request.set_draft(NO_DRAFT)
    live_through(budget, matched, TEXT, 30, match_len=9)  # such matches come true
    steps = [ask.num_steps for ask in budget.ask([matched, unmatched])]
    assert steps == [2, 2]
    match, nothing = make_draft(TEXT, match_len=9), NO_DRAFT
    assert budget.weigh([matched, unmatched], [match, nothing], steps) == [0, 2]
    assert budget.weigh([matched, unmatched], [match, match], steps) == [0, 0]
    assert budget.weigh([matched, unmatched], [nothing, nothing], steps) == [2, 2]


def test_beside_matches_that_were_worth_more_the_model_is_left_out_until_one_fails() -> None:
    clock = ManualClock()
    model = DraftingModel("mtp", 2, CallCost(0.1, 0.0, 0.0))
    budget = AdaptiveBudget(FixedCost({1: 1.0, 64: 1.0}), model, clock, matches_text=True)
    request, steps = make_request(), []
    for draft in [TEXT] * 60 + [WRONG] + [TEXT] * 3:
        ask = budget.ask([request])[0]
        steps.append(ask.num_steps)
        match = make_draft(draft, match_len=9)
        if any(budget.weigh([request], [match], [ask.num_steps])):
            match = NO_DRAFT  # the model's drafts, none of which come true
        request.set_draft(match)
        budget.proposed([request], [ask])
        budget.choose([request], 0)
        request.append(TEXT)
        budget.observe([request], [TEXT])
    assert steps[40:61].count(0) >= 16 and steps[61] == 2


def test_while_resting_nobody_looks_where_nothing_was_learned_or_saved_until_a_prompt_is_read() -> None:
    clock = ManualClock()
    budget, request = make_budget(0.1, clock), make_request()
    for _ in range(400):  # nothing is ever found
        if cap := ask(budget, request):
            clock.now += 0.3
            budget.proposed([request], [Ask(cap, 0)])
        budget.choose([request], 0)
        clock.now += 1.0
        budget.end_step(decoding_step(request))
    looks = []
    for _ in range(2 * LONG_REST):
        budget.choose([request], 0)
        clock.now += 1.0
        budget.end_step(decoding_step(request))
        looks.append(budget.wants_drafts(1))
        if looks[-1]:
            budget.ask([request])
    prompt = decoding_step(request, make_request("b"))
    budget.choose([request], 0, has_waiting=True)
    clock.now += 1.0
    budget.end_step(prompt)
    assert sum(looks) <= 4  # two long rests, a try of 0.3 each hundred steps
    assert budget.wants_drafts(1)


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
