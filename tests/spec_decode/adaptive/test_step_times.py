# SPDX-License-Identifier: Apache-2.0
"""Predicted step times, and the draft lengths that follow from them."""

from __future__ import annotations

import pytest

from fastdeploy.spec_decode.adaptive.step_times import DraftPasses, StepTimes, most_profitable


def test_times_are_interpolated_between_measurements_and_extrapolated_beyond_them() -> None:
    times = StepTimes({1: 1.0, 3: 2.0, 5: 6.0})
    assert [times.rows_s(n) for n in (1, 2, 3, 4, 5, 9)] == pytest.approx([1.0, 1.5, 2.0, 4.0, 6.0, 11.0])


def test_more_rows_never_take_less_time() -> None:
    times = StepTimes({1: 1.0, 2: 3.0, 4: 2.0})
    assert [times.rows_s(n) for n in (2, 3, 4)] == [3.0, 3.0, 3.0]


def test_requests_add_time_in_proportion_to_their_contexts() -> None:
    assert StepTimes({1: 1.0}, 0.5, 100).requests_s(3, 600) == 3.0
    assert StepTimes({1: 1.0}, 0.5).requests_s(3, 600) == 1.5


def test_drafts_cost_what_they_add_to_a_step_with_prefill_rows() -> None:
    times = StepTimes({1: 1.0, 2: 1.0, 10: 9.0})
    assert times.with_drafts(1, 0, ["mtp"], 1, num_prefill_rows=0) == pytest.approx([1.0, 1.0])
    assert times.with_drafts(1, 0, ["mtp"], 1, num_prefill_rows=5) == pytest.approx([1.0, 2.0])
    times = StepTimes({1: 1.0, 2: 1.0, 10: 9.0}, 0.25, 100)
    assert times.with_drafts(1, 100, ["mtp"], 2, num_prefill_rows=100) == pytest.approx(
        [1.25, 2.25 - 1 / 9, 3.25 - 2 / 9]
    )


def test_each_draft_costs_its_context_where_rows_do() -> None:
    times = StepTimes({1: 1.0, 10: 10.0}, 0.5, 100, row_context_s=0.01)
    assert times.requests_s(2, 600) == pytest.approx(3.0 + 6.0)
    assert times.drafts_s(2, 600, ["mtp", "mtp"], 3) == pytest.approx(3 * (1.0 + 3.0))
    assert times.with_drafts(2, 600, ["mtp", "mtp"], 2, num_prefill_rows=0) == pytest.approx([11.0, 15.0, 19.0])


def test_each_draft_pass_costs_the_time_of_its_requests() -> None:
    passes = DraftPasses("mtp", 4, StepTimes({1: 0.11, 16: 0.26}), StepTimes({1: 0.01, 16: 0.16}))
    assert [passes.seconds(5, n) for n in (1, 2, 4)] == pytest.approx([0.15, 0.2, 0.3])


@pytest.mark.parametrize(("row_s", "length"), [(0.0, 4), (0.3, 2), (2.0, 0)])
def test_as_many_drafts_are_verified_as_raise_tokens_per_second(row_s: float, length: int) -> None:
    times = [1.0 + row_s * n for n in range(5)]
    assert most_profitable([[0.7, 0.5, 0.3, 0.2]], 1, times) == [length]


def test_only_the_request_with_good_drafts_gets_rows() -> None:
    assert most_profitable([[0.9, 0.8], [0.1, 0.05]], 2, [1.0 + 0.2 * n for n in range(5)]) == [2, 0]


def test_a_draft_is_verified_in_a_small_batch_and_not_in_a_large_one() -> None:
    times = [1.0 + 0.3 * n for n in range(20)]
    assert most_profitable([[0.6]], 1, times) == [1]
    assert most_profitable([[0.6]], 16, times) == [0]
