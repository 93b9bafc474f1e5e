# SPDX-License-Identifier: Apache-2.0
"""The rows that a draft model computes; if it is the target, every draft is accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastdeploy.core.request import GenerationRequest
from tests.exactness.requests import run_all
from tests.spec_decode.drafting.engines import eight_requests, engine_with, greedy, record_rows


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    return eight_requests()


@pytest.mark.parametrize("num_blocks", [None, 30], ids=["room for all", "preemption"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_the_target_itself_are_always_accepted(
    requests: list[GenerationRequest], temperature: float, num_blocks: int | None
) -> None:
    engine = engine_with("target", chunk=7, prefix_caching=True, num_blocks=num_blocks)
    for _ in range(2):
        run_all(
            engine, [replace(r, params=replace(r.params, temperature=temperature, max_tokens=64)) for r in requests]
        )
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == (num_blocks is not None)
    assert stats.num_prefix_hit_tokens > 0
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 700


def test_every_token_is_computed_once_by_the_first_draft_pass() -> None:
    engine = engine_with("target")
    rows = record_rows(engine)
    run_all(engine, [greedy(list(range(100, 140)), max_tokens=10)])
    assert rows == [41, 1, 1, 4, 1, 1]
