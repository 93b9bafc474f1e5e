# SPDX-License-Identifier: Apache-2.0
"""Rows whose logits are wanted are cut, in order, into goes that fit; verification rows stay whole."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy.core.request import Draft, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.step import ScheduledRequest, StepPlan
from fastdeploy.worker.model_runner import _goes


def plan(num_scheduled: list[int], num_prompt: list[int], num_verify: list[int]) -> StepPlan:
    request = Request(GenerationRequest("a", [1] * 101, SamplingParams()), 0, 0, 200, 16)
    rows = zip(num_scheduled, num_prompt, num_verify)
    return StepPlan([ScheduledRequest(request, n, 100, Draft([2] * max(0, v - 1)), v, p) for n, p, v in rows])


def test_decoding_requests_share_one_go() -> None:
    (go,) = _goes(plan([3, 1, 5], [0, 0, 0], [3, 1, 5]), 16)
    assert [(s.plan_row, s.count) for s in go] == [(0, 3), (1, 1), (2, 5)]


def test_unfinished_prompt_has_no_rows() -> None:
    (go,) = _goes(plan([7, 1], [0, 0], [0, 1]), 16)
    assert [(s.plan_row, s.count) for s in go] == [(1, 1)]


def test_a_step_that_wants_no_row_has_an_empty_go() -> None:
    assert list(_goes(plan([7], [0], [0]), 16)) == [[]]


def test_verification_rows_are_never_split() -> None:
    goes = list(_goes(plan([3, 3, 3], [0, 0, 0], [3, 3, 3]), 7))
    assert [[s.plan_row for s in go] for go in goes] == [[0, 1], [2]]


def test_prompt_rows_precede_verification_rows_and_are_split() -> None:
    goes = list(_goes(plan([10, 2], [9, 0], [1, 2]), 5))
    assert [[(s.plan_row, s.is_prompt, s.count) for s in go] for go in goes] == [
        [(0, True, 5)],
        [(0, True, 4), (0, False, 1)],
        [(1, False, 2)],
    ]
    positions = [s.position for go in goes for s in go if s.is_prompt]
    assert positions == [100, 105]


@pytest.mark.parametrize("capacity", [4, 5, 17, 64])
def test_all_rows_of_every_request_are_in_some_go(capacity: int) -> None:
    random = np.random.default_rng(capacity)
    verify = random.integers(0, 5, 20)
    prompt = np.where(verify == 0, random.integers(1, 30, 20), 0)
    rows = np.zeros((2, 20), int)
    for go in _goes(plan((prompt + verify).tolist(), prompt.tolist(), verify.tolist()), capacity):
        assert sum(s.count for s in go) <= capacity
        for segment in go:
            rows[int(segment.is_prompt), segment.plan_row] += segment.count
    assert rows.tolist() == [verify.tolist(), prompt.tolist()]
