# SPDX-License-Identifier: Apache-2.0
"""Which drafts pay: small numbers that can be checked by hand, and what is learned from what became of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from fastdeploy.core.request import NO_DRAFT, Draft, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.step import StepPlan
from fastdeploy.spec_decode.adaptive.draft_account import MOST_SAVED, MOST_SAVED_ALONE, SAVED_SHARE, START, START_ALONE
from fastdeploy.spec_decode.adaptive.draft_budget import (
    CONTROL_SHARE,
    CONTROL_STEPS,
    FIRST_LOOKS,
    AdaptiveBudget,
    Ask,
    DraftBudget,
    DraftingModel,
)
from fastdeploy.spec_decode.adaptive.step_cost import CallCost, StepCost
from fastdeploy.spec_decode.proposers.naive import NaiveProposer
from tests.doubles import FixedCost, ManualClock, OracleProposer, make_engine, plain_text, run

TEXT = [3, 1, 4, 1, 5]
WRONG = [9, 9, 9, 9, 9]
K = 5
MOST_AT_START = START + START_ALONE  # steps of one request
READ = 40  # tokens that a model has to catch up with


def make_budget(slope: float, clock: ManualClock | None = None) -> AdaptiveBudget:
    """Price a step at one second, and every row above the first at `slope` seconds."""
    return AdaptiveBudget(FixedCost({1: 1.0, 2: 1.0 + slope}), clock=clock or ManualClock())


def make_model_budget(
    clock: ManualClock, slope: float = 0.1, call_s: float = 0.1, matches_text: bool = False
) -> AdaptiveBudget:
    """Let a model draft, `call_s` a draft."""
    model = DraftingModel("mtp", K, CallCost(call_s, 0.0, 0.0))
    return AdaptiveBudget(FixedCost({1: 1.0, 2: 1.0 + slope}), model, clock, matches_text)


def decoding_step(*requests: Request) -> StepPlan:
    """Return the plan of a step in which each request verifies its draft."""
    rows = [1 + len(request.draft) for request in requests]
    computed = [request.num_tokens - 1 for request in requests]
    return StepPlan(list(requests), rows, computed, [n - 1 for n in rows], rows, [0] * len(rows))


def make_draft(tokens: Iterable[int], match_len: int = 0) -> Draft:
    return Draft(list(tokens), "ngram", match_len=match_len)


def make_request(name: str = "a", draft: Iterable[int] = ()) -> Request:
    request = Request(GenerationRequest(name, [1, 2], SamplingParams()), 0, 0, max_total_tokens=50_000, max_drafts=K)
    if draft:
        request.set_draft(make_draft(draft))
    return request


@dataclass
class Decoding:
    """Requests that decode by a clock, whose text is 1, 1, 1, ...

    Attributes:
        num_right: drafts of each that come true.
        row_s, match_s, call_s: seconds that a draft's row, matching a request and a call of the model really take.
        fill_s: that the model's first draft of a request takes more.
        slowness: of the machine, that all of these, and a step's one second, are multiplied by.
        finds: text is found to match.
        asked: of every step so far, what was asked for the first request.
    """

    budget: AdaptiveBudget
    clock: ManualClock
    requests: list[Request] = field(default_factory=lambda: [make_request()])
    num_right: int = K
    row_s: float = 0.1
    match_s: float = 0.01
    call_s: float = 0.1
    fill_s: float = 0.0
    slowness: float = 1.0
    finds: bool = True
    num_prompt_rows: int = 0
    asked: list[Ask] = field(default_factory=list)

    def run(self, num_steps: int) -> float:
        """Take steps; return how many seconds less they took than the same tokens would have without drafts."""
        gained_s = 0.0
        for _ in range(num_steps):
            began_s = self.clock.now
            gained_s += self._step() - (self.clock.now - began_s)
        return gained_s

    def _step(self) -> float:
        self._propose()
        self.budget.choose(self.requests, self.num_prompt_rows)
        plan, emitted = decoding_step(*self.requests), []
        for request in self.requests:
            right = [1] * min(self.num_right, len(request.draft))
            emitted.append([*right, 1])
            request.append(emitted[-1])
        num_drafts = sum(plan.num_drafts)
        self.clock.now += self.slowness * (1.0 + self.row_s * num_drafts + 0.02 * self.num_prompt_rows)
        self.budget.observe(self.requests, emitted)
        if self.num_prompt_rows:
            self._add_prompt(plan)
        self.budget.end_step(plan)
        return self.slowness * (sum(map(len, emitted)) / len(self.requests) + 0.02 * self.num_prompt_rows)

    def _add_prompt(self, plan: StepPlan) -> None:
        plan.requests.append(make_request("prompt"))
        for values, value in (
            (plan.num_scheduled, self.num_prompt_rows),
            (plan.num_computed, 0),
            (plan.num_drafts, 0),
            (plan.num_verify_rows, 0),
            (plan.num_prompt_rows, 0),
        ):
            values.append(value)

    def _propose(self) -> None:
        asks = self.budget.ask(self.requests) if self.budget.wants_drafts(len(self.requests)) else []
        self.asked.append(asks[0] if asks else Ask(0, 0))
        asked = [(request, ask) for request, ask in zip(self.requests, asks) if ask.num_drafts]
        for request, ask in asked:
            is_match = self.finds and ask.num_drafts > ask.num_steps
            count = ask.num_drafts if is_match else ask.num_steps
            if ask.num_drafts > ask.num_steps:
                self.clock.now += self.slowness * self.match_s
            if not is_match and count:
                self.clock.now += self.slowness * (self.call_s * count + self.fill_s * (request.num_tokens == READ))
            if count:
                tokens = [1] * min(self.num_right, count) + [9] * (count - self.num_right)
                request.set_draft(Draft(tokens, "ngram" if is_match else "mtp", match_len=4 if is_match else 0))
        if asked:
            self.budget.proposed([request for request, _ in asked], [ask for _, ask in asked])


def decode_matches(num_right: int, row_s: float) -> Decoding:
    """Let the drafts of a request be matches."""
    clock = ManualClock()
    return Decoding(make_budget(row_s, clock), clock, num_right=num_right, row_s=row_s)


def decode_with_model(num_right: int, call_s: float = 0.1, fill_s: float = 0.0) -> Decoding:
    """Let the drafts of a request be a model's."""
    clock, request = ManualClock(), make_request()
    request.append([1] * (READ - request.num_tokens))
    budget = make_model_budget(clock, call_s=call_s)
    return Decoding(budget, clock, [request], num_right, call_s=call_s, fill_s=fill_s)


@pytest.mark.parametrize(
    ("slope", "length"),
    [
        (0.0, 5),  # rows for nothing: all of them
        (0.9, 0),  # a row for 0.9 steps, to save 0.7 of one
        (0.5, 1),  # (1 + 0.7) / 1.5 > (1 + 0.7 + 0.49) / 2
    ],
)
def test_untried_matches_are_taken_by_what_rows_cost(slope: float, length: int) -> None:
    request = make_request(draft=TEXT)
    make_budget(slope).choose([request], 0)
    assert len(request.draft) == length


def verify(budget: AdaptiveBudget, request: Request, draft: list[int], match_len: int = 0) -> int:
    """Take a step in which the request is to emit TEXT; return how many drafts it verified."""
    budget.wants_drafts(1)
    budget.ask([request])
    request.set_draft(make_draft(draft, match_len))
    budget.proposed([request], [Ask(K, 0)])
    budget.choose([request], 0)
    length = len(request.draft)
    request.append(TEXT)
    budget.observe([request], [TEXT])
    return length


def test_only_the_request_whose_drafts_survive_gets_rows() -> None:
    budget = make_budget(0.2)
    right, wrong = make_request("right"), make_request("wrong")
    for _ in range(20):
        verify(budget, right, TEXT)
        verify(budget, wrong, WRONG)
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


def test_drafts_that_were_never_verified_teach_what_they_were_worth() -> None:
    budget, request = make_budget(0.8), make_request()
    lengths = [verify(budget, request, TEXT) for _ in range(60)]
    assert lengths[0] == 0 and lengths[-1] > 0  # 0.7 is too little, nearly 1 is enough


def test_long_matches_are_told_from_short_ones() -> None:
    budget, request = make_budget(0.3), make_request()
    for _ in range(30):
        verify(budget, request, TEXT, match_len=9)
        verify(budget, request, WRONG, match_len=2)
    assert verify(budget, request, TEXT, match_len=9) == 5
    assert verify(budget, request, WRONG, match_len=2) == 0


def test_drafts_that_pay_are_asked_for_in_every_step_but_the_controls() -> None:
    decoding = decode_matches(K, 0.7)
    gained_s = decoding.run(3000)
    resting = [i for i, ask in enumerate(decoding.asked) if not ask.num_drafts]
    first = CONTROL_STEPS * (5 - 3.5 - 0.01) / CONTROL_SHARE
    assert resting[0] == pytest.approx(first, abs=40)
    assert resting == list(range(resting[0], resting[0] + CONTROL_STEPS))
    assert gained_s == pytest.approx((3000 - CONTROL_STEPS) * (5 - 3.5 - 0.01), rel=0.01)


def test_drafts_that_never_come_true_lose_what_they_may_at_the_start_and_a_share_of_the_time() -> None:
    decoding = decode_with_model(0)
    lost_s = -decoding.run(5000)
    one_look_s = K * (0.1 + 0.1)
    assert MOST_AT_START <= lost_s <= MOST_AT_START + SAVED_SHARE * 5000 + one_look_s
    assert sum(decoding.asked[i].num_drafts > 0 for i in range(1000, 5000)) >= 10  # and are still tried


def test_what_drafts_have_brought_is_soon_spent_when_they_turn_bad() -> None:
    decoding = decode_with_model(K)
    decoding.run(1000)
    decoding.num_right = 0
    lost_s = -decoding.run(100)
    assert lost_s <= MOST_SAVED + MOST_SAVED_ALONE + K * (0.1 + 0.1) + SAVED_SHARE * 100


def test_drafts_that_turn_good_are_found_again() -> None:
    decoding = decode_with_model(0)
    decoding.run(3000)
    decoding.num_right = K
    decoding.run(3000)
    assert [ask.num_steps for ask in decoding.asked[-20:]] == [K] * 20


def test_looking_for_matches_that_are_not_there_is_given_up() -> None:
    decoding = decode_matches(K, 0.1)
    decoding.finds, decoding.match_s = False, 0.05
    lost_s = -decoding.run(5000)
    assert MOST_AT_START - 0.1 <= lost_s <= MOST_AT_START + SAVED_SHARE * 5000 + 0.1


class TickingClock(ManualClock):
    """A clock by which every look at it takes time, as what lies between two looks does."""

    def __call__(self) -> float:
        self.now += 0.02
        return self.now


def test_what_choosing_takes_is_paid_for_too() -> None:
    clock = TickingClock()
    decoding = Decoding(make_budget(0.1, clock), clock, match_s=0.0, finds=False)
    decoding.run(1500)
    num_looks = sum(ask.num_drafts > 0 for ask in decoding.asked)
    assert num_looks * 0.06 <= MOST_AT_START + SAVED_SHARE * 1500 + 1.0  # ask, proposed, and again at its end
    assert not all(ask.num_drafts for ask in decoding.asked[-100:])


def test_handling_drafts_is_part_of_what_rows_cost() -> None:
    clock = ManualClock()
    decoding = Decoding(AdaptiveBudget(StepCost({1: 1.0, 8: 1.0}), clock=clock), clock, row_s=0.05)
    decoding.run(300)
    line = decoding.budget._cost.line(1, K, 1.0)
    assert line[K] - line[0] == pytest.approx(K * 0.05, rel=0.05)


def test_a_batch_in_which_drafts_lose_keeps_them_from_no_other() -> None:
    clock = ManualClock()
    budget = make_model_budget(clock)
    crowd = Decoding(budget, clock, [make_request(str(i)) for i in range(4)], num_right=0, row_s=0.5)
    crowd.run(200)
    assert crowd.asked[-1] == Ask(0, 0)
    alone = Decoding(budget, clock)
    alone.run(20)
    assert alone.asked[-1] == Ask(K, K)


def test_a_model_that_loses_rests_while_matches_go_on() -> None:
    clock = ManualClock()
    budget = make_model_budget(clock, call_s=0.9, matches_text=True)
    decoding = Decoding(budget, clock, call_s=0.9)
    for _ in range(100):  # matches come true, the model's drafts do not
        decoding.finds, decoding.num_right = False, 0
        decoding.run(1)
        decoding.finds, decoding.num_right = True, K
        decoding.run(1)
    asked = [ask for ask in decoding.asked[-60:] if ask.num_drafts]
    assert len(asked) >= 60 - CONTROL_STEPS and set(asked) == {Ask(K, 0)}


def test_matches_that_lose_rest_while_the_model_goes_on() -> None:
    clock = ManualClock()
    budget = make_model_budget(clock, matches_text=True)
    decoding = Decoding(budget, clock, match_s=0.4, finds=False)
    decoding.run(100)
    assert [ask for ask in decoding.asked[-20:] if ask.num_drafts][-1] == Ask(K, K)


@pytest.mark.parametrize(("num_right", "depth"), [(1, 1), (2, 2), (K, K)])
def test_a_model_drafts_as_deep_as_its_drafts_come_true(num_right: int, depth: int) -> None:
    decoding = decode_with_model(num_right, call_s=0.2)
    decoding.run(500)
    assert [ask.num_steps for ask in decoding.asked if ask.num_steps][-1] == depth


def test_catching_up_with_a_text_is_paid_for_by_many_drafts() -> None:
    decoding = decode_with_model(K, fill_s=30.0)
    decoding.run(40)
    assert decoding.asked[-1] == Ask(K, K)


def test_catching_up_for_drafts_that_do_not_come_true_is_saved_before_the_next_trial() -> None:
    decoding = decode_with_model(0, fill_s=30.0)
    decoding.run(40)
    tried = sum(ask.num_steps > 0 for ask in decoding.asked)
    decoding.run(int((30.0 - MOST_AT_START) / SAVED_SHARE))
    assert tried > 1 and sum(ask.num_steps > 0 for ask in decoding.asked) == tried


def test_drafts_are_judged_beside_prompts_too() -> None:
    clock = ManualClock()
    decoding = Decoding(make_model_budget(clock), clock, num_right=0, num_prompt_rows=50)
    decoding.run(100)
    assert decoding.asked[0] == Ask(K, K) and decoding.asked[-1] == Ask(0, 0)


@pytest.mark.parametrize(("believed_s", "num_steps"), [(2.0, 60), (3.0, 120)])
def test_steps_without_drafts_are_timed_after_the_first_drafts_and_now_and_then(
    believed_s: float, num_steps: int
) -> None:
    clock, cost = ManualClock(), StepCost({1: believed_s, 2: believed_s + 0.1})  # they take one second
    decoding = Decoding(AdaptiveBudget(cost, clock=clock), clock, num_right=1, row_s=0.5)
    decoding.run(num_steps)
    assert cost.seconds(1, 1.0) == pytest.approx(1.0, rel=0.05)
    assert 8 <= sum(not ask.num_drafts for ask in decoding.asked[:60]) <= 24


def test_drafts_are_not_blamed_for_steps_that_were_timed_too_fast() -> None:
    clock, cost = ManualClock(), StepCost({1: 0.5, 2: 0.52})  # they take one second
    decoding = Decoding(AdaptiveBudget(cost, clock=clock), clock, num_right=1, row_s=0.05)
    decoding.run(200)
    rests = [number for number, ask in enumerate(decoding.asked) if not ask.num_drafts]
    assert rests[0] >= FIRST_LOOKS and len(rests) <= 40


def test_steps_without_drafts_are_timed_again_where_those_without_a_match_are_faster() -> None:
    clock, cost = ManualClock(), StepCost({1: 1.0, 2: 1.1})
    for _ in range(8):
        cost.learn_plain(1, 1.0, 1.4)  # they take one second now
    decoding = Decoding(AdaptiveBudget(cost, clock=clock), clock, match_s=0.1, finds=False)
    decoding.run(200)
    assert cost.seconds(1, 1.0) == pytest.approx(1.0, rel=0.1)
    assert sum(ask.num_drafts > 0 for ask in decoding.asked) <= 100


def test_a_machine_that_slows_down_shuts_no_account_of_drafts_that_pay() -> None:
    clock = ManualClock()
    budget = AdaptiveBudget(StepCost({1: 1.0, 2: 1.1}), DraftingModel("mtp", 1, CallCost(0.1, 0.0, 0.0)), clock)
    decoding = Decoding(budget, clock, num_right=1)
    decoding.run(40)  # steps without drafts were timed lately
    decoding.slowness = 2.0  # steps of one second would still be what theirs are held against
    gained_s = decoding.run(200)
    assert gained_s >= 0.8 * 200 * 2.0 * (1 - 0.1 - 0.1)


def test_calls_that_a_match_took_the_place_of_are_not_paid_for() -> None:
    clock, cost, request = ManualClock(), CallCost(0.1, 0.0, 0.0), make_request()
    model = DraftingModel("mtp", 2, cost)
    budget, learned = AdaptiveBudget(FixedCost({1: 1.0, 64: 1.0}), model, clock, matches_text=True), []
    for draft, asking_s in (make_draft(TEXT), 0.1), (Draft(TEXT[:2], "mtp"), 0.9):
        budget.wants_drafts(1)
        assert budget.ask([request]) == [Ask(5, 2)]
        request.set_draft(draft)
        clock.now += asking_s
        budget.proposed([request], [Ask(5, 2)])
        budget.choose([request], 0)
        learned.append(cost.own_s)
        clock.now += 0.5
    assert learned[0] == 0.0 < learned[1]
    assert budget._match.seconds == 0.1


def test_a_model_keeps_the_calls_that_bring_more_than_the_matches_do() -> None:
    clock = ManualClock()
    model = DraftingModel("mtp", 2, CallCost(0.1, 0.0, 0.0))
    budget = AdaptiveBudget(FixedCost({1: 1.0, 64: 1.0}), model, clock, matches_text=True)
    matched, unmatched = make_request("a"), make_request("b")
    for _ in range(30):
        verify(budget, matched, TEXT, match_len=9)  # such matches come true
    budget.wants_drafts(2)
    steps = [ask.num_steps for ask in budget.ask([matched, unmatched])]
    assert steps == [2, 2]
    match, nothing = make_draft(TEXT, match_len=9), NO_DRAFT
    assert budget.weigh([matched, unmatched], [match, nothing], steps) == [0, 2]
    assert budget.weigh([matched, unmatched], [match, match], steps) == [0, 0]
    assert budget.weigh([matched, unmatched], [nothing, nothing], steps) == [2, 2]


def test_state_of_a_request_that_ended_is_dropped() -> None:
    budget, request = make_budget(0.3), make_request()
    verify(budget, request, TEXT)
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
