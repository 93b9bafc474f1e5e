# SPDX-License-Identifier: Apache-2.0
"""The experts that a step is expected to read, and adaptive length with a target that has experts, in virtual time."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from fastdeploy.spec_decode.adaptive.distinct_experts import INITIAL_EXPONENT, DistinctExperts
from fastdeploy.spec_decode.adaptive.step_times import StepTimes
from tests.spec_decode.adaptive.test_adaptive_length import Session, make
from tests.spec_decode.adaptive.virtual_experts import Experts, Router
from tests.spec_decode.adaptive.virtual_time import Machine, Passes

ROWS_S = {1: 10.0, 256: 30.0}
EXPERTS = Experts(3, 128, 8, 0.65 / (8 * 3), overlap=0.2)  # a plain step of one request takes 1
MACHINE = Machine(
    {1: 0.35, 16: 0.5, 64: 0.95, 1088: 12.0},
    request_s=0.02,
    match_s=0.01,
    match_request_s=0.002,
    passes={"draft_model": Passes(0.1, 0.01, 0.004), "mtp": Passes(0.08, 0.005, 0.003)},
    experts=EXPERTS,
)


def independent(num_experts: int, num_chosen: int, num_rows: float) -> float:
    return float(num_experts * (1 - (1 - num_chosen / num_experts) ** num_rows))


def report(distinct: DistinctExperts, load: np.ndarray, count: float, *step: object) -> None:
    """Let the routers report so many distinct experts in each layer, often enough to be believed."""
    load[:, 0] = round(count)
    for _ in range(50):
        distinct.update(*step)  # type: ignore[arg-type]


def test_requests_are_independent_at_first_and_rows_of_a_draft_are_not_quite() -> None:
    distinct = DistinctExperts(np.zeros((5, 2), np.int32), 64, 6, expert_s=2.0)
    assert distinct.seconds(1) == pytest.approx([2.0 * 5 * 6])
    assert distinct.seconds(16) == pytest.approx([2.0 * 5 * independent(64, 6, 16)])
    expected = [2.0 * 5 * independent(64, 6, 2 + 2 * (1 + n / 2) ** INITIAL_EXPONENT) for n in (0, 1, 8)]
    assert distinct.seconds(4, ["mtp", "mtp"], (0, 1, 8)) == pytest.approx(expected)


def test_each_source_and_the_requests_have_a_curve_of_their_own() -> None:
    load = np.zeros((1000, 2), np.int32)
    distinct = DistinctExperts(load, 64, 6, expert_s=1e-3)
    report(distinct, load, 6, 1, ["ngram"], 4)
    report(distinct, load, 20, 1, ["mtp"], 7)
    report(distinct, load, 12, 4, [], 0)
    assert distinct.seconds(1, ["ngram"], [4]) == pytest.approx([6], rel=0.01)
    assert distinct.seconds(1, ["mtp"], [7]) == pytest.approx([20], rel=0.01)
    assert distinct.seconds(1, ["suffix"], [7]) == pytest.approx([independent(64, 6, 8**INITIAL_EXPONENT)])
    assert distinct.seconds(4) == pytest.approx([12], rel=0.01)
    assert distinct.seconds(1) == pytest.approx([6])


def test_a_step_that_reads_nearly_all_experts_changes_no_curve() -> None:
    load = np.zeros((10, 2), np.int32)
    distinct = DistinctExperts(load, 64, 6, expert_s=1.0)
    report(distinct, load, 64, 16, ["mtp"] * 16, 128)
    assert distinct.seconds(1, ["mtp"], [1]) == pytest.approx([10 * independent(64, 6, 2**INITIAL_EXPONENT)])


def test_sources_are_learned_anew_when_drafts_are_tried_again() -> None:
    load = np.zeros((10, 2), np.int32)
    distinct = DistinctExperts(load, 64, 6, expert_s=1.0)
    report(distinct, load, 20, 1, ["mtp"], 3)
    before = distinct.seconds(1, ["mtp"], [3])
    report(distinct, load, 12, 4, [], 0)
    distinct.limit_evidence()
    assert distinct.seconds(1, ["mtp"], [3])[0] < before[0]
    assert distinct.seconds(4) == pytest.approx([120], rel=0.01)


def test_a_draft_costs_less_where_most_experts_are_read_anyway() -> None:
    times = StepTimes(ROWS_S, experts=DistinctExperts(np.zeros((5, 2), np.int32), 64, 6, expert_s=1.0))
    added = [times.drafts_s(num_requests, 0, ["mtp"], 1) for num_requests in (1, 4, 16, 64)]
    assert added == sorted(added, reverse=True) and added[0] > 4 * added[2] > 4 * added[3]
    with_drafts = times.with_drafts(1, 100, ["mtp"], 3, num_prefill_rows=0)
    assert with_drafts[0] == pytest.approx(10.0 + 5 * 6)
    assert with_drafts[3] - with_drafts[0] == pytest.approx(times.drafts_s(1, 100, ["mtp"], 3))
    beside_prompt = times.with_drafts(1, 100, ["mtp"], 3, num_prefill_rows=64)
    assert beside_prompt[0] == pytest.approx(with_drafts[0]) and beside_prompt[3] < with_drafts[1]


@pytest.mark.parametrize("popularity", [0.0, 0.5])
@pytest.mark.parametrize("overlap", [0.0, 0.6])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(16, 2), (64, 6), (128, 8)])
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_experts_and_times_of_steps_are_predicted_within_15_percent(
    num_experts: int, num_chosen: int, batch: int, overlap: float, popularity: float
) -> None:
    router = Router(Experts(4, num_experts, num_chosen, 1.0, overlap, popularity))
    distinct = DistinctExperts(router.load, num_experts, num_chosen, 1.0)
    times, sources, draw = StepTimes(ROWS_S, experts=distinct), ["mtp"] * batch, random.Random(0)

    def route(rows_each: int, step: int) -> float:
        return router.route((f"{batch}.{i}", 7 * step + 3 * i, rows_each) for i in range(batch))

    for step in range(60):
        rows_each = draw.randint(2, 12) if step % 4 else 1
        route(rows_each, step)
        distinct.update(batch, sources if step % 4 else [], batch * (rows_each - 1))
    for rows_each in (1, 2, 3, 4, 6, 8, 12, 16):
        actual, num_drafts = np.mean([route(rows_each, 60 + i) for i in range(20)]), batch * (rows_each - 1)
        assert distinct.seconds(batch, sources, [num_drafts])[0] == pytest.approx(actual, rel=0.15)
        predicted_s = times.rows_s(batch) + times.requests_s(batch, 0) + times.drafts_s(batch, 0, sources, num_drafts)
        assert predicted_s == pytest.approx(actual + times.rows_s(batch * rows_each), rel=0.15)


def without_experts_term(machine: Machine) -> Machine:
    """Return step times as they would be measured with equal rows, which read the experts of one."""
    experts = machine.experts
    assert experts is not None
    always_s = experts.expert_s * experts.num_chosen * experts.num_layers
    return replace(machine, rows_s={rows: always_s + seconds for rows, seconds in machine.rows_s.items()}, experts=None)


def speedup(method: str, batch: int, reliability: float, predicted: Machine, repeats: int = 1) -> float:
    """Return the speed-up for outputs of 128 tokens in which short sequences occur again by chance."""
    draw = random.Random(0)
    answer = [draw.randrange(12) for _ in range(128)]
    naive = Session(make("naive", MACHINE, batch=batch))
    adaptive = Session(make(method, MACHINE, batch=batch, predicted=predicted, num_speculative_tokens=16))
    plain_s = sum(naive.seconds(answer, batch=batch) for _ in range(repeats))
    return plain_s / sum(adaptive.seconds(answer, (reliability,), batch=batch) for _ in range(repeats))


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("method", ["ngram", "suffix", "mtp+ngram", "draft_model"])
def test_no_output_is_much_slower_than_plain_decoding(method: str, batch: int) -> None:
    assert speedup(method, batch, 0.5, MACHINE) > 0.96


def test_without_the_term_an_output_is_much_slower_than_plain_decoding() -> None:
    assert speedup("ngram", 1, 0.0, without_experts_term(MACHINE)) < 0.95


def test_drafts_of_a_batch_that_reads_most_experts_gain_most() -> None:
    of_one, of_many = (speedup("draft_model", batch, 0.8, MACHINE) for batch in (1, 16))
    assert of_many > 1.15 * of_one
    assert of_many > 1.15 * speedup("draft_model", 16, 0.8, without_experts_term(MACHINE))
