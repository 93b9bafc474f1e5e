# SPDX-License-Identifier: Apache-2.0
"""Requests that end in an error emit the same tokens, then the same error, with and without drafts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.step import RequestResult, StepPlan
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.hub.model_path import resolve_model_path
from tests.exactness.dead_ends import DEAD_ENDS, make_dead_ends
from tests.exactness.engines import Run, Texts, config, configured, proposer_of
from tests.exactness.requests import run_all, run_alone

METHODS = ("ngram", "suffix", "mtp", "with_suffix", "draft_model", "oracle")


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    return make_dead_ends(Tokenizer.from_pretrained(resolve_model_path("demo")))


@pytest.fixture(scope="module")
def plain(requests: list[GenerationRequest]) -> Texts:
    """Plain decoding, one request at a time."""
    return run_alone(make_engine(config()), requests)


def test_plain_requests_end_in_errors_after_some_text(plain: Texts) -> None:
    failed = {name: text for (name, _), text in plain.items() if text.error is not None}
    assert failed.keys() == DEAD_ENDS.keys() - {"stops", "length"}
    assert {text.error.type for text in failed.values() if text.error} == {"no_token"}
    assert [name for name, text in failed.items() if len(text.token_ids) < 2] == ["at_once"]
    logprobs = plain["logprobs", 0]
    assert logprobs.logprobs is not None and len(logprobs.logprobs) == len(logprobs.token_ids)


def record_partial_results(engine: Engine) -> list[RequestResult]:
    """Return a list to which every result with tokens and an error is added."""
    run, found = engine.runner.run, list[RequestResult]()

    def spy(plan: StepPlan) -> Sequence[RequestResult]:
        results = run(plan)
        found.extend(result for result in results if result.error and result.token_ids)
        return results

    engine.runner.run = spy  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("run", [run_all, run_alone])
@pytest.mark.parametrize("method", METHODS)
def test_drafts_change_nothing_before_an_error(
    requests: list[GenerationRequest], plain: Texts, method: str, run: Run
) -> None:
    engine = make_engine(config(configured(method), 5), proposer=proposer_of(method, plain, 5))
    partial = record_partial_results(engine)
    for _ in range(2):  # suffix decoding drafts from the outputs of the first time
        assert run(engine, requests) == plain
    assert partial
