# SPDX-License-Identifier: Apache-2.0
"""On a device with memory of its own, inputs are checked before they are sent; here the CPU says that it has some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fastdeploy.config.args import engine_config_from_kwargs
from fastdeploy.core.request import Draft, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.step import ScheduledRequest, StepPlan
from fastdeploy.engine.engine import Engine
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.registry import selected_backend
from fastdeploy.spec_decode.drafting.drafter import Drafter
from fastdeploy.worker.logprob_reader import LogprobQuery
from fastdeploy.worker.model_runner import ModelRunner

NUM_BLOCKS = 8
Change = Callable[[Request], None]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    monkeypatch.setattr(selected_backend(), "shares_memory", False)
    keys: dict[str, Any] = {
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False},
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "max_model_len": 64,
        "num_gpu_blocks_override": NUM_BLOCKS,
    }
    runner = Engine.from_config(engine_config_from_kwargs({"model": "demo", **keys})[0]).runner
    assert isinstance(runner, ModelRunner)
    return runner


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of rows that are sent from now on."""
    ends = list[int]()
    monkeypatch.setattr(HostBuffer, "upload", lambda self, end, begin=0: ends.append(end))
    return ends


def request_of(token_ids: list[int], block_ids: list[int]) -> Request:
    source = GenerationRequest("a", token_ids, SamplingParams(temperature=0.0, logprobs=1))
    request = Request(source, 0, 0, 40, 2)
    request.block_ids = block_ids
    return request


def plan_of(request: Request) -> StepPlan:
    return StepPlan([ScheduledRequest(request, request.num_tokens, 0, Draft([]), 1)])


def drafter_of(runner: ModelRunner) -> Drafter:
    assert isinstance(runner.observer, Drafter)
    return runner.observer


def test_valid_inputs_are_sent_and_give_tokens_and_drafts(runner: ModelRunner, uploads: list[int]) -> None:
    request = request_of([5, 6, 7], [3])
    [result] = runner.run(plan_of(request))
    assert len(result.token_ids) == len(result.logprobs or ()) == 1
    num_sent = len(uploads)
    assert num_sent > 0 and max(uploads) >= 3
    [draft] = drafter_of(runner).draft([request], [2])
    assert len(draft) == 2
    assert len(uploads) > num_sent


@pytest.mark.parametrize(
    ("token_ids", "block_ids", "message"),
    [
        ([5, 10**6, 7], [3], "embedding: token_ids: expected 0.* got 1000000 at row 1"),
        ([5, 6, 7], [99], "append_attention: block_tables: expected a block of the cache, got 99"),
        ([5, 6, 7], [-1], "append_attention: block_tables: expected a block of the cache, got -1"),
        ([5, 6, 7], [], "block_tables: expected blocks for 3 tokens, got 0 for request 0"),
    ],
)
def test_invalid_inputs_are_refused_and_nothing_is_sent(
    token_ids: list[int], block_ids: list[int], message: str, runner: ModelRunner, uploads: list[int]
) -> None:
    request = request_of(token_ids, block_ids)
    with pytest.raises(ValueError, match=message):
        runner.run(plan_of(request))
    assert uploads == []
    valid = request_of([5, 6, 7], [3])
    assert len(runner.run(plan_of(valid))[0].token_ids) == 1, "the next step is not affected"


@pytest.mark.parametrize(
    ("token_ids", "block_ids", "message"),
    [
        ([5, 10**6, 7], [3], "embedding: token_ids: expected 0.* got 1000000 at row 1"),
        ([5, 6, 7], [99], "append_attention: block_tables: expected a block of the cache, got 99"),
    ],
)
def test_invalid_inputs_of_a_draft_are_refused_and_nothing_is_sent(
    token_ids: list[int], block_ids: list[int], message: str, runner: ModelRunner, uploads: list[int]
) -> None:
    loop = drafter_of(runner).loop
    loop.batch.write_inputs([3], [0], [0], [block_ids])
    loop.token_ids.array[:3] = token_ids
    loop.num_drafts.array[0] = 2
    for call in (lambda: loop.draft(1), lambda: loop.fill_stage(0, 1)):
        with pytest.raises(ValueError, match=message):
            call()
    assert uploads == []


def test_log_probabilities_of_an_id_that_does_not_exist_are_refused(runner: ModelRunner, uploads: list[int]) -> None:
    query = LogprobQuery(0, np.array([5], np.int32), 0, [10**6])
    with pytest.raises(ValueError, match=r"logprobs: chosen: expected 0.* got 1000000"):
        runner.logprob_reader.read([query])
    assert uploads == [1, 1], "row and id of the one that exists"
