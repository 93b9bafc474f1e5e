# SPDX-License-Identifier: Apache-2.0
"""What a step is believed to cost: timed first, then as the steps that are computed say."""

from __future__ import annotations

import pytest

from fastdeploy.spec_decode.adaptive.step_cost import MIN_LINE, CallCost, StepCost


def test_timed_row_counts_are_joined_by_a_line_that_goes_straight_on() -> None:
    cost = StepCost({1: 1.0, 3: 2.0, 5: 3.0})
    assert [cost.seconds(rows, 1) for rows in (1, 2, 3, 5, 7)] == pytest.approx([1.0, 1.5, 2.0, 3.0, 4.0])


def test_more_rows_never_cost_less_than_fewer_were_timed_at() -> None:
    cost = StepCost({1: 1.0, 2: 3.0, 3: 2.0})
    assert cost.seconds(3, 1) == pytest.approx(3.0)


def test_requests_cost_beside_their_rows() -> None:
    cost = StepCost({1: 1.0, 4: 4.0}, request_s=0.5)
    assert cost.seconds(4, 1) == pytest.approx(4.5)
    assert cost.seconds(4, 4) == pytest.approx(6.0)


def test_requests_cost_by_their_length() -> None:
    cost = StepCost({1: 1.0, 4: 4.0}, request_s=0.5, request_tokens=512)
    assert [cost.weight(4, tokens) for tokens in (0, 512, 2048)] == [0, 1, 4]
    assert StepCost({1: 1.0}).weight(4, 2048) == 4
    assert cost.line(4, 0, cost.weight(4, 2048))[0] == pytest.approx(6.0)


def test_a_slower_machine_makes_every_row_count_dearer_alike() -> None:
    cost = StepCost({1: 1.0, 2: 1.5, 8: 4.0})
    for _ in range(600):
        cost.learn_plain(1, 1, 3.0)
    line = cost.line(1, 7, 1)
    assert [line[0], line[1], line[7]] == pytest.approx([3.0, 4.5, 12.0], rel=0.01)


def test_steps_without_drafts_are_a_level_of_their_own() -> None:
    cost = StepCost({1: 1.0, 2: 1.0, 16: 2.4})
    for rows in (9, 14, 16) * 100:
        cost.learn_drafted(1, rows - 1, 1, 1.3 * (1.0 + 0.1 * (rows - 2)))  # more than timed, and more a row
        cost.learn_plain(1, 1, 0.9)
    line = cost.line(1, 15, 1)
    assert line[0] == pytest.approx(0.9, rel=0.02)
    assert [line[8], line[13], line[15]] == pytest.approx([2.21, 2.86, 3.12], rel=0.05)


def test_row_counts_that_are_never_computed_learn_from_those_that_are() -> None:
    cost = StepCost({1: 1.0, 16: 16.0})
    for _ in range(300):
        cost.learn_drafted(1, 1, 1, 1.41)  # timed at 2
        cost.learn_drafted(1, 3, 1, 2.0)  # timed at 4
    line = cost.line(1, 15, 1)
    assert [line[1], line[3]] == pytest.approx([1.41, 2.0], rel=0.02)
    assert line[15] == pytest.approx(2.0 + 12 * (2.0 - 1.41) / 2, rel=0.1)  # straight on, timed at 16


def test_what_was_believed_of_dear_rows_is_forgotten_while_they_are_not_computed() -> None:
    cost = StepCost({1: 1.0, 4: 1.2})
    for _ in range(100):
        cost.learn_plain(1, 1, 1.0)
        cost.learn_drafted(1, 3, 1, 2.2)
    believed = cost.line(1, 3, 1)[3]
    for _ in range(1500):
        cost.learn_plain(1, 1, 1.0)
    assert believed > 2.0
    assert cost.line(1, 3, 1)[3] == pytest.approx(1.2, rel=0.01)


def test_dear_drafts_are_remembered_between_steps_without() -> None:
    cost = StepCost({1: 1.0, 4: 1.2})
    for _ in range(1000):
        cost.learn_plain(1, 1, 1.0)
        cost.learn_drafted(1, 3, 1, 2.2)
    assert cost.line(1, 3, 1)[3] == pytest.approx(2.2, rel=0.02)


def test_one_slow_step_is_not_believed() -> None:
    cost = StepCost({1: 1.0, 2: 1.5})
    for _ in range(100):
        cost.learn_plain(1, 1, 1.0)
        cost.learn_drafted(1, 1, 1, 1.5)
    cost.learn_plain(1, 1, 100.0)
    cost.learn_drafted(1, 1, 1, 100.0)
    assert cost.seconds(1, 1) < 1.02 and cost.line(1, 1, 1)[1] < 1.53


def test_a_rare_step_counts_for_those_that_it_stands_for() -> None:
    cost = StepCost({1: 1.0, 4: 2.0})
    for _ in range(100):
        cost.learn_plain(1, 1, 1.0)
    for _ in range(20):
        for _ in range(30):
            cost.learn_drafted(1, 3, 1, 2.0)
        cost.learn_plain(1, 1, 0.8, num_alike=30)
    assert cost.seconds(1, 1) == pytest.approx(0.8, rel=0.02)
    assert cost.line(1, 3, 1)[3] == pytest.approx(2.0, rel=0.02)


def test_every_doubling_of_requests_and_of_their_tokens_has_a_level() -> None:
    cost = StepCost({1: 1.0, 16: 1.0})
    cost.learn_plain(16, 16, 1.2)
    cost.learn_plain(16, 4, 1.3)
    cost.learn_plain(1, 4, 1.1)
    assert [cost.seconds(16, 16), cost.seconds(16, 4), cost.seconds(1, 4)] == pytest.approx([1.2, 1.3, 1.1])
    assert [cost.seconds(31, 16), cost.seconds(16, 31.75)] == pytest.approx([1.2, 1.2])  # less than twice as many
    assert cost.line(16, 4, 16) == pytest.approx([1.2] * (MIN_LINE + 1))


def test_steps_of_an_unseen_kind_begin_with_the_level_learned_last() -> None:
    cost = StepCost({1: 1.0, 16: 1.0})
    cost.learn_plain(16, 16, 1.2)
    cost.learn_plain(1, 1, 1.1)
    unseen = [cost.seconds(4, 4), cost.seconds(1, 8), cost.line(4, 0, 4)[0]]
    cost.learn_plain(16, 16, 1.2)
    assert unseen == pytest.approx([1.1, 1.1, 1.1])
    assert cost.seconds(4, 4) == pytest.approx(1.2)


def test_steps_without_drafts_are_known_after_eight_of_their_kind() -> None:
    cost = StepCost({1: 1.0, 16: 1.0})
    known = []
    for _ in range(8):
        cost.learn_drafted(1, 3, 1, 1.0)
        cost.learn_plain(1, 1, 1.0, num_alike=30)
        known.append(cost.is_known(1, 1))
    assert known == [False] * 7 + [True]
    assert [cost.is_known(1, 1.75), cost.is_known(1, 2), cost.is_known(2, 1)] == [True, False, False]


def test_handling_drafts_is_added_to_rows_and_no_factor_of_them() -> None:
    cost = StepCost({1: 1.0, 16: 2.5})
    for _ in range(300):
        cost.learn_plain(1, 1, 1.0)
        cost.learn_drafted(1, 1, 1, 1.1 + 0.15)
    line = cost.line(1, 12, 1)
    assert [line[0], line[1], line[12]] == pytest.approx([1.0, 1.1 + 0.15, 2.2 + 0.15], abs=0.001)


def test_prompt_rows_beside_do_not_change_what_drafts_take() -> None:
    cost = StepCost({1: 1.0, 32: 4.1})
    for drafts in (1, 21) * 100:
        cost.learn_plain(1, 1, 1.0)
        cost.learn_drafted(1, drafts, 1, 1.15 + 0.2 * drafts)  # each timed at 0.1
    alone, beside = cost.line(1, 12, 1), cost.line(1, 12, 1, num_prompt_rows=8)
    assert [alone[1], alone[11], beside[0]] == pytest.approx([1.35, 3.35, 1.8], rel=0.02)
    assert [seconds - beside[0] for seconds in beside] == pytest.approx([seconds - alone[0] for seconds in alone])


def test_a_draft_takes_its_calls_its_requests_and_what_their_caches_lack() -> None:
    cost = CallCost(1.0, 0.1, 0.01)
    assert cost.seconds([2, 0, 3], 40) == pytest.approx(3 * 1.0 + 5 * 0.1 + 40 * 0.01)


def test_what_a_request_adds_to_calls_is_believed_and_an_outlier_is_not() -> None:
    steady, disturbed = CallCost(1.0, 0.1, 0.01), CallCost(1.0, 0.1, 0.01)
    for count in (1, 3) * 100:
        steady.learn([count, 0, count], 5, count * 1.2 + 0.05 + 2 * 0.4)
    disturbed.learn([1, 1], 0, 1000.0)
    assert steady.own_s == pytest.approx(0.4, rel=0.02)
    assert steady.seconds([2, 2, 0], 0) == pytest.approx(2.4 + 0.8, rel=0.02)
    assert disturbed.own_s < 0.5
