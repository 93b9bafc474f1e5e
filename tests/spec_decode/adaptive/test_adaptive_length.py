# SPDX-License-Identifier: Apache-2.0
"""Adaptive length with various texts and machines, in virtual time, with the real scheduler and proposers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from tests.spec_decode.adaptive.virtual_time import Machine, Passes, SimulatedModel, VirtualEngine, make_virtual_engine

MACHINE = Machine(
    {1: 0.95, 4: 1.4, 9: 1.7, 16: 2.1, 64: 6.6, 144: 14.0, 1088: 105.0},
    request_s=0.05,
    match_s=0.01,
    match_request_s=0.002,
    passes={"mtp": Passes(0.17, 0.01, 0.006), "draft_model": Passes(0.2, 0.02, 0.008)},
)
NUM_DRAFTS = 8
METHODS = ["ngram", "suffix", "mtp", "mtp+ngram", "mtp+suffix", "draft_model"]
TEXT_METHODS = ["ngram", "suffix", "mtp+ngram", "mtp+suffix"]


def mapping(method: str, **keys: Any) -> dict[str, Any]:
    name, _, extension = method.partition("+")
    drafts = {} if name == "naive" else {"num_speculative_tokens": NUM_DRAFTS}
    layer = {"num_model_steps": 2} if name == "mtp" else {"model": "simulated"} if name == "draft_model" else {}
    return {"method": name, **drafts, **layer, **({"mtp_strategy": f"with_{extension}"} if extension else {}), **keys}


def make(method: str, machine: Machine = MACHINE, batch: int = 1, **keys: Any) -> VirtualEngine:
    predicted = keys.pop("predicted", None)
    config = parse_speculative_config(mapping(method, **keys))
    return make_virtual_engine(config, machine, batch, 4000, predicted)


class Session:
    """Runs batches of requests through one engine, one batch after the other."""

    def __init__(self, virtual: VirtualEngine) -> None:
        self.virtual, self.engine = virtual, virtual.engine
        self._count = 0

    def seconds(
        self, answer: Sequence[int], reliability: Sequence[float] = (0.0,), batch: int = 1, prompt: int = 4
    ) -> float:
        """Run requests that emit `answer`; return the virtual seconds of all steps.

        Args:
            answer: the tokens that the target emits.
            reliability: share of a drafting model's tokens that equal the answer, in turn for each 48 tokens.
            batch: number of requests.
            prompt: number of random prompt tokens.
        """
        begin_s = self.virtual.busy_s()
        for _ in range(batch):
            name = str(self._count)
            self._count += 1
            self.virtual.runner.answers[name] = list(answer)
            if isinstance(self.virtual.drafting, SimulatedModel):
                self.virtual.drafting.reliabilities[name] = reliability
            params = SamplingParams(temperature=0.0, max_tokens=len(answer), ignore_eos=True)
            self.engine.add_request(GenerationRequest(name, random_tokens(prompt, seed=name), params, cache_salt=name))
        while self.engine.has_unfinished():
            self.engine.step()
        self.engine.check_integrity()
        return self.virtual.busy_s() - begin_s

    def drafted_share(self, answer: Sequence[int], **how: Any) -> float:
        """Run requests that emit `answer`; return the number of drafted tokens per emitted token."""
        before = self.engine.stats()
        self.seconds(answer, **how)
        after = self.engine.stats()
        num_tokens = after.num_generated_tokens - before.num_generated_tokens
        return (after.num_draft_tokens - before.num_draft_tokens) / num_tokens


def random_tokens(count: int, seed: object = 0) -> list[int]:
    """Return random tokens without repetitions."""
    return random.Random(str(seed)).sample(range(100_000), count)


def lines(count: int, length: int = 40, seed: object = "line") -> list[int]:
    """Return the same random line `count` times."""
    return random_tokens(length, seed) * count


def speedup(method: str, answer: Sequence[int], repeats: int = 3, **how: Any) -> float:
    """Return the speed-up of a method over plain decoding, of new engines."""
    naive, adaptive = Session(make("naive", batch=16)), Session(make(method, batch=16))
    plain_s = sum(naive.seconds(answer, **how) for _ in range(repeats))
    return plain_s / sum(adaptive.seconds(answer, **how) for _ in range(repeats))


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("method", METHODS)
def test_drafts_that_are_always_rejected_cost_at_most_three_percent(method: str, batch: int) -> None:
    assert speedup(method, random_tokens(400), batch=batch) > 0.97


@pytest.mark.parametrize("method", METHODS)
def test_rejected_drafts_cost_at_most_five_percent_of_a_first_output_of_128_tokens(method: str) -> None:
    assert speedup(method, random_tokens(128), repeats=1) > 0.95


@pytest.mark.parametrize("method", METHODS)
def test_good_drafts_are_as_fast_as_with_fixed_length(method: str) -> None:
    how = {"reliability": (0.95,), "repeats": 3}
    fixed = Session(make(method, adaptive=False))
    fixed_s = sum(fixed.seconds(lines(10), reliability=(0.95,)) for _ in range(3))
    naive = Session(make("naive"))
    naive_s = sum(naive.seconds(lines(10)) for _ in range(3))
    assert speedup(method, lines(10), **how) > 0.95 * naive_s / fixed_s > 1.3


@pytest.mark.parametrize("method", ["mtp", "draft_model"])
def test_drafting_is_paused_when_drafts_become_bad_and_resumes_when_they_become_good(method: str) -> None:
    session, naive = Session(make(method)), Session(make("naive"))
    for reliability, least in (((0.95,), 1.3), ((0.0,), 0.93), ((0.95,), 1.2)):
        speed = naive.seconds(random_tokens(1000)) / session.seconds(random_tokens(1000), reliability=reliability)
        assert speed > least, (reliability, speed)


@pytest.mark.parametrize("method", METHODS)
def test_a_text_in_phases_is_faster_than_plain_decoding(method: str) -> None:
    text = [*lines(6, seed="a"), *random_tokens(300), *lines(6, seed="b"), *random_tokens(300, seed="c")]
    assert speedup(method, text, reliability=(0.9,) * 5 + (0.0,) * 6) > 1.0


@pytest.mark.parametrize("max_ngram_size", [2, 5])
@pytest.mark.parametrize("method", TEXT_METHODS)
def test_a_repeated_line_is_drafted_during_a_pause_within_20_tokens_of_its_repetition(
    method: str, max_ngram_size: int
) -> None:
    keys = {"max_ngram_size": max_ngram_size} if method.endswith("ngram") else {}
    virtual = make(method, replace(MACHINE, match_s=0.3), **keys)  # matching is so slow that drafting is paused soon
    session = Session(virtual)
    session.seconds(random_tokens(400))
    assert virtual.engine.stats().draft_length.is_paused
    line = lines(14)
    drafts = []  # number of tokens emitted before a step, and number of its drafts
    run = virtual.runner.run

    def record(plan: Any) -> Any:
        drafts.extend((s.request.num_output_tokens, len(s.draft)) for s in plan.requests)
        return run(plan)

    virtual.runner.run = record  # type: ignore[method-assign]
    virtual.engine.runner = virtual.runner
    session.seconds(line)
    first = min(position for position, num_drafts in drafts if num_drafts and position > 40)
    assert first <= 40 + 20
    assert len(drafts) < len(line) / 3


@pytest.mark.parametrize("slower", [0.4, 3.0])
@pytest.mark.parametrize("method", METHODS)
def test_good_drafts_are_verified_after_the_machine_has_changed_its_speed(method: str, slower: float) -> None:
    session = Session(make(method))
    before = session.drafted_share(lines(20), reliability=(0.9,))
    session.virtual.clock.slowdown = slower
    session.seconds(lines(5), reliability=(0.9,))
    assert session.drafted_share(lines(20), reliability=(0.9,)) > 0.9 * before


@pytest.mark.parametrize("slower", [0.4, 3.0])
@pytest.mark.parametrize("method", ["mtp", "draft_model"])
def test_bad_drafts_stay_paused_after_the_machine_has_changed_its_speed(method: str, slower: float) -> None:
    session, naive = Session(make(method)), Session(make("naive"))
    for each in (session, naive):
        each.seconds(random_tokens(400))
        each.virtual.clock.slowdown = slower
    assert naive.seconds(random_tokens(1000)) / session.seconds(random_tokens(1000)) > 0.96


@pytest.mark.parametrize("error", [0.5, 2.0])
def test_wrong_predictions_of_step_times_are_corrected(error: float) -> None:
    predicted = replace(MACHINE, rows_s={rows: error * seconds for rows, seconds in MACHINE.rows_s.items()})
    good, bad, naive = (
        Session(make(method, predicted=predicted)) for method in ("draft_model", "draft_model", "naive")
    )
    plain_s = naive.seconds(random_tokens(1000))
    assert plain_s / good.seconds(random_tokens(1000), reliability=(0.95,)) > 1.25
    assert plain_s / bad.seconds(random_tokens(1000)) > 0.95


def test_the_first_drafts_are_compared_with_measured_plain_steps() -> None:
    predicted = replace(MACHINE, rows_s={rows: 0.5 * seconds for rows, seconds in MACHINE.rows_s.items()})
    adaptive, naive = Session(make("draft_model", predicted=predicted)), Session(make("naive"))
    answer = random_tokens(128)
    assert naive.seconds(answer) / adaptive.seconds(answer, reliability=(0.8,)) > 1.05


def run_arrivals(method: str, machine: Machine, reliability: float) -> VirtualEngine:
    """Run 100 steps; before each of them, a request with a prompt of 200 tokens arrives that emits 8 tokens."""
    virtual = make(method, machine, batch=16)
    for i in range(100):
        name = str(i)
        virtual.runner.answers[name] = random_tokens(8)
        assert isinstance(virtual.drafting, SimulatedModel)
        virtual.drafting.reliabilities[name] = (reliability,)
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        virtual.engine.add_request(GenerationRequest(name, random_tokens(200, seed=name), params))
        virtual.engine.step()
    return virtual


def test_bad_drafts_are_paused_even_if_every_step_has_prefill_rows() -> None:
    virtual = run_arrivals("draft_model", MACHINE, reliability=0.0)
    stats = virtual.engine.stats()
    assert stats.draft_length.is_paused and stats.draft_length.num_requests > 0
    assert stats.num_draft_tokens < 0.05 * stats.num_generated_tokens


def test_the_time_of_prefill_rows_is_no_loss_of_the_drafts_in_the_same_step() -> None:
    machine = replace(MACHINE, passes={"mtp": Passes(0.17, 0.01, 0.0)})  # prompts take the layer no time
    virtual = run_arrivals("mtp", machine, reliability=0.8)
    stats = virtual.engine.stats()
    assert not stats.draft_length.is_paused
    assert stats.num_draft_tokens > 300


def test_batch_sizes_have_separate_loss_budgets() -> None:
    machine = replace(MACHINE, rows_s={1: 1.0, 9: 1.1, 16: 2.0, 160: 60.0}, request_s=0.0)
    predicted = replace(machine, rows_s={1: 1.0, 9: 1.1, 16: 2.0, 160: 3.0})  # drafts of 16 requests look cheap
    session, naive = (
        Session(make("draft_model", machine, batch=16, predicted=predicted)),
        Session(make("naive", machine, batch=16)),
    )
    for _ in range(2):
        answer = random_tokens(300)
        large = naive.seconds(answer, batch=16) / session.seconds(answer, reliability=(0.6,), batch=16)
        small = naive.seconds(answer) / session.seconds(answer, reliability=(0.9,))
    assert large > 0.97 and small > 1.9


def test_good_drafts_are_soon_verified_again_after_many_bad_ones() -> None:
    session, naive = Session(make("draft_model")), Session(make("naive"))
    session.seconds(random_tokens(2000))
    plain_s = sum(naive.seconds(random_tokens(300)) for _ in range(5))
    assert plain_s / sum(session.seconds(random_tokens(300), reliability=(0.9,)) for _ in range(5)) > 1.6


def test_gains_of_long_matches_end_a_pause_early() -> None:
    session = Session(make("ngram", replace(MACHINE, match_s=0.3)))
    session.seconds(random_tokens(60))
    assert session.engine.stats().draft_length.is_paused  # for at least 200 steps
    session.seconds(lines(14))
    assert not session.engine.stats().draft_length.is_paused


def test_drafts_that_gain_only_over_predicted_plain_steps_are_paused() -> None:
    machine = replace(MACHINE, passes={"draft_model": Passes(0.6, 0.02, 0.008)})
    predicted = replace(machine, rows_s={rows: 2 * seconds for rows, seconds in MACHINE.rows_s.items()})
    session, naive = Session(make("draft_model", machine, predicted=predicted)), Session(make("naive"))
    assert naive.seconds(random_tokens(1000)) / session.seconds(random_tokens(1000), reliability=(0.5,)) > 0.95


def test_a_drafting_model_that_computes_more_missed_tokens_than_it_gains_is_paused() -> None:
    session, num_pauses = Session(make("draft_model")), 0
    for _ in range(60):
        session.seconds(random_tokens(8), reliability=(0.95,), prompt=1500)
        num_pauses += session.engine.stats().draft_length.is_paused
    assert num_pauses > 40


def test_one_request_with_bad_drafts_does_not_take_rows_from_the_others() -> None:
    virtual = make("draft_model", batch=2)
    for name, reliability in (("good", 0.95), ("bad", 0.0)):
        virtual.runner.answers[name] = random_tokens(600, seed=name)
        assert isinstance(virtual.drafting, SimulatedModel)
        virtual.drafting.reliabilities[name] = (reliability,)
        params = SamplingParams(temperature=0.0, max_tokens=600, ignore_eos=True)
        virtual.engine.add_request(GenerationRequest(name, random_tokens(4, seed=name), params))
    num_drafts = {"good": 0, "bad": 0}
    for _ in range(120):
        plan_drafts = {r.request_id: r for r in virtual.engine.scheduler.running}
        virtual.engine.step()
        for name, request in plan_drafts.items():
            num_drafts[name] = sum(n * count for n, count in enumerate(request.speculation.drafted))
    assert num_drafts["good"] > 4 * num_drafts["bad"]


def test_the_time_of_filling_a_drafting_models_cache_is_spread_over_later_steps() -> None:
    session, naive = Session(make("draft_model")), Session(make("naive"))
    plain_s, drafted_s = (
        each.seconds(random_tokens(600), reliability=(0.95,), prompt=1500) for each in (naive, session)
    )
    assert plain_s / drafted_s > 1.2


def test_a_hybrid_with_a_bad_layer_is_fast_where_text_repeats() -> None:
    assert speedup("mtp+ngram", lines(12), reliability=(0.0,)) > 2.0


def test_a_hybrid_with_a_good_layer_is_fast_where_nothing_matches() -> None:
    assert speedup("mtp+ngram", random_tokens(600), reliability=(0.95,)) > 1.4


def test_a_hybrid_prefers_long_matches_to_the_drafts_of_the_layer() -> None:
    session = Session(make("mtp+suffix"))
    session.seconds(lines(20), reliability=(0.5,))
    sources = session.engine.stats().accepted_per_source
    assert sources["suffix"] > 10 * sources.get("mtp", 0)


def test_a_pause_and_its_length_are_reported() -> None:
    session = Session(make("draft_model"))
    assert not session.engine.stats().draft_length.is_paused
    session.seconds(random_tokens(100))
    stats = session.engine.stats().draft_length
    assert stats.is_paused and stats.paused_s > 0.0
    session.seconds(random_tokens(1000), reliability=(1.0,))
    assert not session.engine.stats().draft_length.is_paused and session.engine.stats().draft_length.paused_s == 0.0


def test_fixed_length_drafts_as_many_tokens_as_fit() -> None:
    session = Session(make("draft_model", adaptive=False))
    assert session.drafted_share(random_tokens(50)) > NUM_DRAFTS - 1
