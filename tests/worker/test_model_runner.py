# SPDX-License-Identifier: Apache-2.0
"""Rows with logits are split, in order, into logits batches that fit; verification rows of a request stay together."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy.core.request import Draft, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.step import ScheduledRequest, StepPlan
from fastdeploy.worker.logits_batches import split_logits_batches


def plan(num_scheduled: list[int], num_prompt: list[int], num_verify: list[int]) -> StepPlan:
    request = Request(GenerationRequest("a", [1] * 101, SamplingParams()), 0, 0, 200, 16)
    rows = zip(num_scheduled, num_prompt, num_verify)
    return StepPlan([ScheduledRequest(request, n, 100, Draft([2] * max(0, v - 1)), v, p) for n, p, v in rows])


def test_decoding_requests_share_a_batch() -> None:
    (batch,) = split_logits_batches(plan([3, 1, 5], [0, 0, 0], [3, 1, 5]), 16)
    assert [(s.request_index, s.num_rows) for s in batch] == [(0, 3), (1, 1), (2, 5)]


def test_unfinished_prompt_has_no_rows_with_logits() -> None:
    (batch,) = split_logits_batches(plan([7, 1], [0, 0], [0, 1]), 16)
    assert [(s.request_index, s.num_rows) for s in batch] == [(1, 1)]


def test_a_step_without_logits_has_an_empty_batch() -> None:
    assert split_logits_batches(plan([7], [0], [0]), 16) == [[]]


def test_verification_rows_are_never_split() -> None:
    batches = split_logits_batches(plan([3, 3, 3], [0, 0, 0], [3, 3, 3]), 7)
    assert [[s.request_index for s in batch] for batch in batches] == [[0, 1], [2]]


def test_prompt_rows_precede_verification_rows_and_are_split() -> None:
    batches = split_logits_batches(plan([10, 2], [9, 0], [1, 2]), 5)
    assert [[(s.request_index, s.is_prompt, s.num_rows) for s in batch] for batch in batches] == [
        [(0, True, 5)],
        [(0, True, 4), (0, False, 1)],
        [(1, False, 2)],
    ]
    positions = [s.position for batch in batches for s in batch if s.is_prompt]
    assert positions == [100, 105]


@pytest.mark.parametrize("capacity", [4, 5, 17, 64])
def test_every_row_with_logits_is_in_a_batch(capacity: int) -> None:
    random = np.random.default_rng(capacity)
    verify = random.integers(0, 5, 20)
    prompt = np.where(verify == 0, random.integers(1, 30, 20), 0)
    num_rows = np.zeros((2, 20), int)
    for batch in split_logits_batches(plan((prompt + verify).tolist(), prompt.tolist(), verify.tolist()), capacity):
        assert sum(s.num_rows for s in batch) <= capacity
        for rows in batch:
            num_rows[int(rows.is_prompt), rows.request_index] += rows.num_rows
    assert num_rows.tolist() == [verify.tolist(), prompt.tolist()]
