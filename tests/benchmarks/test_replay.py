# SPDX-License-Identifier: Apache-2.0
"""Replay: a model that emits recorded answers is drafted for as if they were its own text."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from benchmarks.bench_speculation import method_mapping
from benchmarks.replay import replay_answers
from benchmarks.workloads import WORKLOADS, Session, Turn, sessions
from fastdeploy.config.engine_config import EngineConfig, SchedulerConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.request import DraftQuota, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.spec_decode.proposers.base import Proposer
from fastdeploy.spec_decode.proposers.registry import make_proposer

K, NUM_TOKENS = 6, 64


@dataclass
class Tally:
    """Sums over the decoding steps of all answers."""

    steps: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(resolve_model_path("demo"))


def config(method: str) -> EngineConfig:
    speculative = parse_speculative_config({**method_mapping(method, K), "adaptive": False})
    return EngineConfig(
        model="demo",
        load_choices="dummy",
        max_model_len=768,
        scheduler=SchedulerConfig(max_num_seqs=4),
        speculative=speculative,
    )


def work(tokenizer: Tokenizer, workload: str) -> list[Session]:
    return sessions(workload, tokenizer, 3, 2, 700, NUM_TOKENS, seed=0)


def proposer_tally(method: str, work: list[Session]) -> Tally:
    """Decode the answers without an engine: each step emits the drafts that are right and one token more."""
    proposer, tally = make_proposer(config(method).speculative), Tally()
    for number, session in enumerate(work):
        for turn in session:
            decode_answer(proposer, turn, number, tally)
    return tally


def decode_answer(proposer: Proposer, turn: Turn, number: int, tally: Tally) -> None:
    source = GenerationRequest(f"replay-{number}", turn.prompt, SamplingParams(), cache_salt=str(number))
    request = Request(source, 0, seed=0, max_total_tokens=len(turn.prompt) + len(turn.answer), max_drafts=K)
    proposer.start(request)
    emitted = turn.answer[:1]
    while request.num_output_tokens + len(emitted) < len(turn.answer):
        request.append(emitted)
        rest = turn.answer[request.num_output_tokens :]
        quota = DraftQuota(request.draft_room, request.draft_room)
        draft = proposer.propose([request], [quota])[0].token_ids if request.draft_room else []
        num_accepted = (*(drafted == token for drafted, token in zip(draft, rest)), False).index(False)
        emitted = rest[: num_accepted + 1]
        tally.steps += 1
        tally.emitted += len(emitted)
        tally.drafted += len(draft)
        tally.accepted += num_accepted
    request.append(emitted)
    proposer.finish(request)


def engine_tally(method: str, work: list[Session]) -> Tally:
    """Replay on random weights, one request at a time; check that each emits its recorded answer."""
    engine, answers = Engine.from_config(config(method)), {}
    replay_answers(engine, answers)
    params = SamplingParams(temperature=0.7, max_tokens=NUM_TOKENS, ignore_eos=True)
    for number, session in enumerate(work):
        for index, turn in enumerate(session):
            request_id = f"{number}-{index}"
            answers[request_id] = turn.answer
            engine.add_request(GenerationRequest(request_id, turn.prompt, params, cache_salt=str(number)))
            tokens: list[int] = []
            while engine.has_unfinished():
                tokens += [token for delta in engine.step() for token in delta.token_ids]
            assert tokens == turn.answer
    stats = engine.stats()
    return Tally(stats.num_steps, stats.num_emitted_tokens, stats.num_draft_tokens, stats.num_accepted_tokens)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("workload", ["editing", "loop"])
def test_acceptance_in_replay_is_that_of_the_proposer_alone(method: str, workload: str, tokenizer: Tokenizer) -> None:
    tally = engine_tally(method, work(tokenizer, workload))
    assert tally == proposer_tally(method, work(tokenizer, workload))
    assert 0 < tally.accepted < tally.drafted


def test_requests_without_a_recorded_answer_emit_their_own_tokens_beside_replayed_ones(tokenizer: Tokenizer) -> None:
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
def test_workloads_are_the_same_every_time_and_of_the_requested_size(workload: str, tokenizer: Tokenizer) -> None:
    found = work(tokenizer, workload)
    assert found == work(tokenizer, workload)
    assert [len(session) for session in found] == [2 if workload == "loop" else 1] * 3
    assert all(len(turn.prompt) <= 700 and len(turn.answer) == NUM_TOKENS for session in found for turn in session)
    assert len({tuple(session[0].prompt) for session in found}) == 3


def test_more_sessions_than_the_library_has_are_an_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"editing: the library has \d+ texts that fit, 100000 are needed"):
        sessions("editing", tokenizer, 100000, 1, 100, 16, seed=0)
