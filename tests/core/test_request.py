# SPDX-License-Identifier: Apache-2.0
"""The choices of a request share the prompt in memory until each writes its own first token."""

from __future__ import annotations

import numpy as np

from fastdeploy.core.request import Draft, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.engine import Engine
from fastdeploy.spec_decode.proposers.naive import NaiveProposer
from tests.doubles import make_engine


def waiting_choices(engine: Engine, n: int) -> list[Request]:
    engine.add_request(GenerationRequest("r", [1, 2, 3, 4, 5, 6], SamplingParams(n=n, ignore_eos=True)))
    return engine.scheduler.waiting


def test_waiting_choices_need_no_memory_for_their_tokens() -> None:
    choices = waiting_choices(make_engine(NaiveProposer()), 64)
    assert all(np.shares_memory(choice.token_ids, choices[0].token_ids) for choice in choices)
    assert [choice.token_ids.tolist() for choice in choices[:2]] == [[1, 2, 3, 4, 5, 6]] * 2


def test_a_choice_writes_into_memory_of_its_own() -> None:
    first, second, third = waiting_choices(make_engine(NaiveProposer()), 3)
    first.append([7, 8])
    second.set_draft(Draft([9]))
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert second.tokens_with_draft(second.draft).tolist() == [1, 2, 3, 4, 5, 6, 9]
    assert third.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert not np.shares_memory(first.token_ids, third.token_ids)
    assert first.output_token_ids.tolist() == [7, 8] and list(first.tokens_since(5)) == [6, 7, 8]


def test_only_running_choices_have_buffers() -> None:
    engine = make_engine(NaiveProposer())
    choices = waiting_choices(engine, 100)
    for _ in range(3):
        engine.step()
    num_owners = sum(not np.shares_memory(choice.token_ids, choices[-1].token_ids) for choice in choices)
    assert num_owners == len(engine.scheduler.running) < 100
