# SPDX-License-Identifier: Apache-2.0
"""Lets a model of any shape say what was recorded, so that speed and quality of drafts can be measured apart.

Every row is computed and sampled as ever; then the recorded token takes the place of the sampled one. Proposers,
verification and all that follows see a model that says the recorded text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.workloads import Session, Turn
from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.speculative_config import SpeculativeConfig
from fastdeploy.core.request import NO_DRAFT, Draft, DraftQuota, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.step import RequestResult, StepPlan
from fastdeploy.engine.engine import Engine
from fastdeploy.spec_decode.proposers.base import Proposer
from fastdeploy.worker.model_runner import ModelRunner

Answers = Mapping[str, Sequence[int]]


def replay_answers(engine: Engine, answers: Answers) -> None:
    """Let the engine's model emit answers[request_id], which may be filled later; other requests are as ever."""
    runner: Any = engine.runner
    assert isinstance(runner, ModelRunner)
    read = runner._read_tokens
    runner.sample_all_rows()  # what the model itself would say rejects nearly every draft

    def substitute_and_read(plan: StepPlan, judged: list[Any], results: list[RequestResult]) -> None:
        at = 0
        for segment in judged:
            request = plan.requests[segment.plan_row]
            if request.request_id in answers:
                rest = answers[request.request_id][request.num_output_tokens :]
                runner.sampling.token_ids.array[at : at + segment.count] = rest[: segment.count]
            at += segment.count
        runner.judge_drafts(len(judged))
        read(plan, judged, results)

    runner._read_tokens = substitute_and_read  # type: ignore[method-assign]


def record_answers(work: Sequence[Session], max_model_len: int) -> list[Session]:
    """Return the sessions with what the demonstration model answers, greedily, to each turn's prompt."""
    engine = Engine.from_config(EngineConfig(model="demo", max_model_len=max_model_len))

    def answer(turn: Turn) -> Turn:
        params = SamplingParams(temperature=0.0, max_tokens=len(turn.answer), ignore_eos=True)
        engine.add_request(GenerationRequest("record", turn.prompt, params))
        said: list[int] = []
        while engine.has_unfinished():
            said += [token for delta in engine.step() for token in delta.token_ids]
        return Turn(turn.prompt, said)

    return [[answer(turn) for turn in session] for session in work]


class LayerRecord:
    """What the layer of the demonstration model drafts from that model's states on recorded answers."""

    def __init__(self, num_steps: int, max_model_len: int) -> None:
        speculative = SpeculativeConfig(
            method="mtp", num_speculative_tokens=num_steps, num_model_steps=num_steps, adaptive=False
        )
        self._engine = Engine.from_config(
            EngineConfig(model="demo", max_model_len=max_model_len, speculative=speculative)
        )
        self._answers: dict[str, Sequence[int]] = {}
        self._drafts: dict[tuple[int, ...], list[list[int]]] = {}
        self._now: list[list[int]] = []  # of the answer that is recorded
        self._propose = self._engine.proposer.propose
        replay_answers(self._engine, self._answers)
        self._engine.proposer.propose = self._record  # type: ignore[method-assign]

    def drafts_of(self, prompt: list[int], answer: Sequence[int]) -> list[list[int]]:
        """Return what the layer drafts after each number of the answer's tokens, none after 0."""
        key = (len(prompt), *prompt, *answer)
        if key not in self._drafts:
            self._drafts[key] = self._now = [NO_DRAFT.token_ids] * len(answer)
            params = SamplingParams(temperature=0.0, max_tokens=len(answer), ignore_eos=True)
            self._answers["record"] = answer
            self._engine.add_request(GenerationRequest("record", prompt, params))
            while self._engine.has_unfinished():
                self._engine.step()
        return self._drafts[key]

    def _record(self, requests: Sequence[Request], quotas: Sequence[DraftQuota]) -> list[Draft]:
        """Keep a draft instead of handing it on, so that the answer is drafted after every token."""
        for request, draft in zip(requests, self._propose(requests, quotas)):
            self._now[request.num_output_tokens] = draft.token_ids
        return [NO_DRAFT] * len(requests)


def replay_layer(engine: Engine, drafts: Mapping[str, Sequence[list[int]]]) -> None:
    """Let the engine's layer, once it has made its drafts, say drafts[request_id][number of output tokens]."""
    runner: Any = engine.runner
    draft = runner.observer.draft

    def draft_and_substitute(requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        made = draft(requests, counts)
        return [drafts[r.request_id][r.num_output_tokens][: len(tokens)] for r, tokens in zip(requests, made)]

    runner.observer.draft = draft_and_substitute


@dataclass
class Tally:
    """Sums over answers; the prefill's first token is no step."""

    steps: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0


def replay_drafts(
    proposer: Proposer, prompt: list[int], answer: list[int], k: int, salt: str, number: int, tally: Tally
) -> None:
    """Emit an answer as fast as the drafts are right, without a model; `number` tells the requests apart."""
    asked = GenerationRequest(f"replay-{number}", prompt, SamplingParams(), cache_salt=salt)
    request = Request(asked, 0, seed=0, max_total_tokens=len(prompt) + len(answer), max_drafts=k)
    proposer.start(request)
    emitted = answer[:1]
    while request.num_output_tokens + len(emitted) < len(answer):
        request.append(emitted)
        rest = answer[request.num_output_tokens :]
        quota = DraftQuota(request.draft_room, request.draft_room)
        draft = proposer.propose([request], [quota])[0].token_ids if request.draft_room else []
        num_right = (*(drafted == token for drafted, token in zip(draft, rest)), False).index(False)
        emitted = rest[: num_right + 1]
        tally.steps += 1
        tally.emitted += len(emitted)
        tally.drafted += len(draft)
        tally.accepted += num_right
    request.append(emitted)
    proposer.finish(request)
