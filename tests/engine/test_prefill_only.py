# SPDX-License-Identifier: Apache-2.0
"""A request with max_tokens 0 computes its prompt and ends with `length`, without a token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastdeploy.config.engine_config import SchedulerConfig
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.outputs import TokenDelta, TokenLogprobs
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.step import StepPlan
from fastdeploy.engine.engine import Engine
from fastdeploy.spec_decode.proposers.naive import NaiveProposer
from fastdeploy.spec_decode.proposers.ngram import NgramProposer
from tests.doubles import VOCAB, make_engine, plain_text


def prefill_only(name: str, prompt: list[int], prompt_logprobs: int | None = None) -> GenerationRequest:
    return GenerationRequest(name, prompt, SamplingParams(max_tokens=0, prompt_logprobs=prompt_logprobs, seed=1))


def run(engine: Engine) -> list[TokenDelta]:
    deltas: list[TokenDelta] = []
    while engine.has_unfinished():
        deltas += engine.step()
        engine.check_integrity()
    return deltas


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("prompt", [[1], [1, 2, 3, 4], list(range(7)) * 3])
def test_one_delta_without_tokens_has_the_prompt_s_log_probabilities(
    prefix_caching: bool, budget: int, prompt: list[int]
) -> None:
    scheduler = SchedulerConfig(max_num_batched_tokens=budget)
    engine = make_engine(NaiveProposer(), prefix_caching=prefix_caching, scheduler=scheduler)
    engine.add_request(prefill_only("r", prompt, 0))
    [delta] = run(engine)
    assert (delta.token_ids, delta.finish_reason, delta.stop_reason, delta.error) == ([], "length", None, None)
    assert delta.prompt_logprobs == [None, *(TokenLogprobs(t, -float(i), 1) for i, t in enumerate(prompt[1:]))]
    assert delta.metrics is not None and delta.metrics.first_token_s is None
    assert delta.metrics.queue_s is not None
    stats = engine.stats()
    assert (stats.num_prompt_tokens, stats.num_generated_tokens, stats.num_finished) == (len(prompt), 0, {"length": 1})
    assert stats.num_free_blocks == stats.num_blocks


def test_the_prompt_is_in_the_prefix_cache_afterwards() -> None:
    engine, prompt = make_engine(NaiveProposer()), list(range(7)) * 3
    engine.add_request(prefill_only("r", prompt))
    run(engine)
    assert engine.stats().num_prefix_hit_tokens == 0
    engine.add_request(GenerationRequest("s", prompt, SamplingParams(max_tokens=2, seed=1)))
    assert [token for delta in run(engine) for token in delta.token_ids] == plain_text(
        prompt, 1, SamplingParams(max_tokens=2)
    )
    assert engine.stats().num_prefix_hit_tokens == 20


def test_a_row_that_cannot_be_sampled_is_no_error_where_no_token_is_wanted() -> None:
    engine = make_engine(NaiveProposer())
    run_step = engine.runner.run

    def without_token(plan: StepPlan) -> list:  # type: ignore[type-arg]
        results = list(run_step(plan))
        for result in results:
            result.token_ids, result.error, result.error_type = [], "no token survives", "no_token"
        return results

    engine.runner.run = without_token  # type: ignore[method-assign]
    engine.add_request(prefill_only("r", [1, 2, 3]))
    [delta] = run(engine)
    assert (delta.finish_reason, delta.error) == ("length", None)


def test_it_cannot_be_resumed_behind_tokens() -> None:
    engine = make_engine(NaiveProposer())
    with pytest.raises(InvalidRequestError, match="resumed: expected at most 0 tokens, got 1"):
        engine.add_request(replace(prefill_only("r", [1, 2, 3]), resumed=[[4]]))
    engine.add_request(replace(prefill_only("r", [1, 2, 3]), resumed=[[]]))
    assert [(delta.token_ids, delta.finish_reason) for delta in run(engine)] == [([], "length")]


def check_random_mix(seed: int) -> None:
    """Run requests with and without output together in a small cache."""
    random = np.random.default_rng(seed)
    scheduler = SchedulerConfig(
        max_num_seqs=int(random.integers(1, 7)),
        max_num_batched_tokens=int(random.choice([5, 9, 40])),
        long_prefill_token_threshold=int(random.choice([0, 3])),
    )
    engine = make_engine(
        NgramProposer(4, 1) if random.random() < 0.5 else NaiveProposer(),
        num_blocks=int(random.choice([10, 14, 40])),
        max_model_len=40,
        prefix_caching=bool(random.random() < 0.7),
        scheduler=scheduler,
    )
    requests = []
    for i in range(random.integers(2, 9)):
        prompt = [1, 2, 3, 4, 5, 6, 1, 2][: random.integers(0, 9)] + random.integers(
            0, VOCAB, random.integers(1, 20)
        ).tolist()
        params = SamplingParams(max_tokens=int(random.choice([0, 0, 1, 9])), seed=i, ignore_eos=True)
        requests.append(GenerationRequest(f"r{i}", prompt, params))
    deltas: list[TokenDelta] = []
    for request in requests:
        engine.add_request(request)
        if random.random() < 0.5:
            deltas += engine.step()
    deltas += run(engine)
    for request in requests:
        own = [delta for delta in deltas if delta.request_id == request.request_id]
        emitted = [token for delta in own for token in delta.token_ids]
        assert emitted == plain_text(request.prompt_token_ids, request.params.seed or 0, request.params, 40), seed
        assert [delta.finish_reason for delta in own if delta.finish_reason] == ["length"], seed
        assert emitted or len(own) == 1, seed


def test_random_mixes_with_and_without_output() -> None:
    for seed in range(200):
        check_random_mix(seed)
