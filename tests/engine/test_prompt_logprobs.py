# SPDX-License-Identifier: Apache-2.0
"""The log-probabilities of a prompt are computed once for all choices, whatever happens to the choices meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastdeploy.config.engine_config import SchedulerConfig
from fastdeploy.core.outputs import TokenDelta, TokenLogprobs
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.engine import Engine
from fastdeploy.spec_decode.proposers.naive import NaiveProposer
from tests.doubles import VOCAB, SlotModelRunner, make_engine


def request(name: str, prompt: list[int], n: int = 1, max_tokens: int = 3) -> GenerationRequest:
    params = SamplingParams(n=n, max_tokens=max_tokens, prompt_logprobs=0, ignore_eos=True, seed=1)
    return GenerationRequest(name, prompt, params)


def expected(prompt: list[int]) -> list[TokenLogprobs | None]:
    return [None, *(TokenLogprobs(token, -float(i), 1) for i, token in enumerate(prompt[1:]))]


def run(engine: Engine) -> list[TokenDelta]:
    deltas: list[TokenDelta] = []
    while engine.has_unfinished():
        deltas += engine.step()
        engine.check_integrity()
    return deltas


def reports(deltas: list[TokenDelta]) -> list[tuple[str, int, Any]]:
    return [(d.request_id, d.index, d.prompt_logprobs) for d in deltas if d.prompt_logprobs is not None]


def num_rows(engine: Engine) -> int:
    assert isinstance(engine.runner, SlotModelRunner)
    return engine.runner.prompt_logprob_rows


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("prompt", [[1], [1, 2, 3], list(range(7)) * 3])
def test_all_choices_of_a_prompt_compute_its_logprobs_once(
    prefix_caching: bool, budget: int, prompt: list[int]
) -> None:
    config = SchedulerConfig(max_num_batched_tokens=budget)
    engine = make_engine(NaiveProposer(), prefix_caching=prefix_caching, scheduler=config)
    engine.add_request(request("r", prompt, n=8))
    deltas = run(engine)
    assert num_rows(engine) == len(prompt) - 1
    assert reports(deltas) == [("r", 0, expected(prompt))], "once, with the first choice"
    assert sum(len(delta.token_ids) for delta in deltas) == 24


def test_a_second_choice_finds_the_prompt_in_the_prefix_cache() -> None:
    engine = make_engine(NaiveProposer())
    engine.add_request(request("r", list(range(7)) * 3, n=2))
    run(engine)
    assert engine.stats().num_prefix_hit_tokens == 20


def test_another_request_with_the_same_prompt_computes_its_own() -> None:
    engine = make_engine(NaiveProposer())
    prompt = list(range(7)) * 3
    for name in "ab":
        engine.add_request(request(name, prompt))
    assert reports(run(engine)) == [("a", 0, expected(prompt)), ("b", 0, expected(prompt))]
    assert num_rows(engine) == 40


def test_the_same_request_can_be_served_again() -> None:
    engine, prompt = make_engine(NaiveProposer()), list(range(7)) * 3
    again = request("r", prompt, n=2)
    for num_served in (1, 2):
        engine.add_request(again)
        assert reports(run(engine)) == [("r", 0, expected(prompt))]
        assert num_rows(engine) == 20 * num_served


def test_a_preempted_choice_continues_where_it_was() -> None:
    engine = make_engine(NaiveProposer(), scheduler=SchedulerConfig(max_num_batched_tokens=5), prefix_caching=False)
    prompt = list(range(7)) * 3
    engine.add_request(request("r", prompt, n=2))
    deltas = [delta for _ in range(2) for delta in engine.step()]
    (running,) = engine.scheduler.running
    engine.scheduler._preempt(running)
    assert reports(deltas + run(engine)) == [("r", 0, expected(prompt))]
    assert num_rows(engine) == 20


def test_the_next_choice_continues_if_the_first_one_fails() -> None:
    engine = make_engine(NaiveProposer(), scheduler=SchedulerConfig(max_num_batched_tokens=5))
    prompt = list(range(7)) * 3
    engine.add_request(request("r", prompt, n=3))
    engine.step()
    (first,) = engine.scheduler.running
    engine._fail(first, ValueError("a fault"))
    assert reports(run(engine)) == [("r", 1, expected(prompt))]
    assert num_rows(engine) == 20


def check_random_mix(seed: int) -> None:
    """Run random requests with and without prompt log-probabilities in a small cache, and abort some."""
    random = np.random.default_rng(seed)
    engine = make_engine(
        NaiveProposer(),
        num_blocks=int(random.choice([10, 14, 40])),
        max_model_len=40,
        prefix_caching=bool(random.random() < 0.7),
        scheduler=SchedulerConfig(
            max_num_seqs=int(random.integers(1, 7)),
            max_num_batched_tokens=int(random.choice([5, 9, 40])),
            long_prefill_token_threshold=int(random.choice([0, 3])),
        ),
    )
    prompts = {}
    for i in range(random.integers(1, 6)):
        head = [1, 2, 3, 4, 5, 6, 1, 2][: random.integers(0, 9)]
        prompts[f"r{i}"] = head + random.integers(0, VOCAB, random.integers(1, 20)).tolist()
    waiting, aborted, deltas = list(prompts), set(), list[TokenDelta]()
    max_rows = 0
    while waiting or engine.has_unfinished():
        if waiting and random.random() < 0.5:
            name = waiting.pop()
            engine.add_request(request(name, prompts[name], int(random.integers(1, 5)), int(random.integers(1, 9))))
            max_rows += len(prompts[name]) - 1
        if random.random() < 0.05 and (ended := engine.abort(f"r{random.integers(len(prompts))}")):
            aborted.add(ended[0].request_id)
            deltas += ended
        deltas += engine.step()
        engine.check_integrity()
    found = {name: logprobs for name, _, logprobs in reports(deltas)}
    assert len(found) == len(reports(deltas))
    for name, prompt in prompts.items():
        if name not in aborted:
            assert found[name] == expected(prompt), f"seed {seed}, {name}"
    assert num_rows(engine) == max_rows or (aborted and num_rows(engine) <= max_rows)


def test_random_mixes_compute_every_log_probability_once() -> None:
    for seed in range(300):
        check_random_mix(seed)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_thousands_of_random_mixes_compute_every_log_probability_once() -> None:
    for seed in range(5000):
        check_random_mix(seed)
