# SPDX-License-Identifier: Apache-2.0
"""Replay: a model that says what was recorded, drafted for as if it were its own text."""

from __future__ import annotations

import pytest

from benchmarks.bench_speculation import method_mapping
from benchmarks.replay import Tally, replay_answers, replay_drafts
from benchmarks.workloads import WORKLOADS, Session, sessions
from fastdeploy.config.engine_config import EngineConfig, SchedulerConfig
from fastdeploy.config.model_config import resolve_model_path
from fastdeploy.config.speculative_config import SpeculativeConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine
from fastdeploy.spec_decode.proposers.registry import make_proposer

K, NUM_TOKENS = 6, 64


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(resolve_model_path("demo"))


def config(method: str) -> EngineConfig:
    speculative = SpeculativeConfig.from_mapping({**method_mapping(method, K), "adaptive": False})
    return EngineConfig(
        model="demo",
        load_choices="dummy",
        max_model_len=768,
        scheduler=SchedulerConfig(max_num_seqs=4),
        speculative=speculative,
    )


def work(tokenizer: Tokenizer, workload: str) -> list[Session]:
    return sessions(workload, tokenizer, 3, 2, 700, NUM_TOKENS, seed=0)


def host_tally(method: str, work: list[Session]) -> Tally:
    proposer, tally = make_proposer(config(method).speculative), Tally()
    for number, session in enumerate(work):
        for turn in session:
            replay_drafts(proposer, turn.prompt, turn.answer, K, str(number), number, tally)
    return tally


def engine_tally(method: str, work: list[Session]) -> Tally:
    """Replay on random weights, one request at a time; check that each says its recorded answer."""
    engine, answers = Engine.from_config(config(method)), {}
    replay_answers(engine, answers)
    params = SamplingParams(temperature=0.7, max_tokens=NUM_TOKENS, ignore_eos=True)
    for number, session in enumerate(work):
        for at, turn in enumerate(session):
            request_id = f"{number}-{at}"
            answers[request_id] = turn.answer
            engine.add_request(GenerationRequest(request_id, turn.prompt, params, cache_salt=str(number)))
            said: list[int] = []
            while engine.has_unfinished():
                said += [token for delta in engine.step() for token in delta.token_ids]
            assert said == turn.answer
    stats = engine.stats()
    return Tally(stats.num_steps, stats.num_emitted_tokens, stats.num_draft_tokens, stats.num_accepted_tokens)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("workload", ["editing", "loop"])
def test_acceptance_in_replay_is_that_of_the_proposer_alone(method: str, workload: str, tokenizer: Tokenizer) -> None:
    tally = engine_tally(method, work(tokenizer, workload))
    assert tally == host_tally(method, work(tokenizer, workload))
    assert 0 < tally.accepted < tally.drafted


def test_requests_without_a_record_speak_for_themselves_beside_replayed_ones(tokenizer: Tokenizer) -> None:
    turn = work(tokenizer, "plain")[0][0]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)

    def run(answers: dict[str, list[int]]) -> dict[str, list[int]]:
        engine = Engine.from_config(config("ngram"))
        replay_answers(engine, answers)
        for request_id in ("free", "recorded"):
            engine.add_request(GenerationRequest(request_id, turn.prompt, params))
        texts: dict[str, list[int]] = {"free": [], "recorded": []}
        while engine.has_unfinished():
            for delta in engine.step():
                texts[delta.request_id] += delta.token_ids
        return texts

    own = run({})
    assert own["free"] == own["recorded"] != turn.answer[:16]
    assert run({"recorded": turn.answer}) == {"free": own["free"], "recorded": turn.answer[:16]}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_workloads_are_the_same_every_time_and_of_the_size_asked_for(workload: str, tokenizer: Tokenizer) -> None:
    made = work(tokenizer, workload)
    assert made == work(tokenizer, workload)
    assert [len(session) for session in made] == [2 if workload == "loop" else 1] * 3
    assert all(len(turn.prompt) <= 700 and len(turn.answer) == NUM_TOKENS for session in made for turn in session)
    assert len({tuple(session[0].prompt) for session in made}) == 3


def test_more_work_than_the_library_holds_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"editing: the library holds \d+ fitting texts, 100000 are wanted"):
        sessions("editing", tokenizer, 100000, 1, 100, 16, seed=0)
