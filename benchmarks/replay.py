# SPDX-License-Identifier: Apache-2.0
"""How fast is a real shape on real text? A model of random weights emits recorded answers.

Every row is computed and sampled as usual; then the recorded token replaces the sampled one. So proposers and
verification see the recorded text, and speed and acceptance can be measured without trained weights of that shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from benchmarks.workloads import Session, Turn
from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.request import NO_DRAFT, Draft, DraftQuota, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.step import RequestResult, StepPlan
from fastdeploy.engine.engine import Engine
from fastdeploy.models.weight_source import DummySource
from fastdeploy.worker.logits_batches import LogitsRange
from fastdeploy.worker.model_runner import ModelRunner

Answers = Mapping[str, Sequence[int]]


def replay_answers(engine: Engine, answers: Answers) -> None:
    """Let the engine emit answers[request_id], which may be added later; other requests are not changed."""
    runner: Any = engine.runner
    assert isinstance(runner, ModelRunner)
    read = runner._read_tokens
    runner.sample_all_rows()  # also those behind drafts that the model's own tokens reject

    def substitute_and_read(plan: StepPlan, verified: list[LogitsRange], results: list[RequestResult]) -> None:
        for rows in verified:
            request = plan.requests[rows.request_index].request
            if request.request_id in answers:
                answer = answers[request.request_id][request.num_output_tokens :][: rows.num_rows]
                runner.sampling.token_ids.array[rows.first_row : rows.first_row + rows.num_rows] = answer
        runner.verify_drafts(len(verified))
        read(plan, verified, results)

    runner._read_tokens = substitute_and_read  # type: ignore[method-assign]


def make_tokens_alike(source: DummySource, embedding: str, share: float) -> None:
    """Give this share of all tokens the same embedding, so that rows with such tokens choose nearly the same experts.

    Args:
        source: the random weights of the model.
        embedding: name of its embedding table.
    """
    read = source.read

    def read_alike(name: str) -> paddle.Tensor:
        tensor = read(name)
        if name != embedding:
            return tensor
        table = tensor.numpy()
        table[np.random.default_rng(0).random(len(table)) < share] = table[0]
        return paddle.to_tensor(table)

    source.read = read_alike  # type: ignore[method-assign]


def record_answers(work: Sequence[Session], max_model_len: int) -> list[Session]:
    """Return the sessions with the demonstration model's own greedy answers to their prompts."""
    engine = Engine.from_config(EngineConfig(model="demo", max_model_len=max_model_len))

    def answer(turn: Turn) -> Turn:
        params = SamplingParams(temperature=0.0, max_tokens=len(turn.answer), ignore_eos=True)
        engine.add_request(GenerationRequest("record", turn.prompt, params))
        tokens: list[int] = []
        while engine.has_unfinished():
            tokens += [token for delta in engine.step() for token in delta.token_ids]
        return Turn(turn.prompt, tokens)

    return [[answer(turn) for turn in session] for session in work]


class DraftRecord:
    """The drafts that one of the demonstration model's drafting models makes of recorded answers."""

    def __init__(self, drafting: Mapping[str, Any], num_steps: int, max_model_len: int) -> None:
        """Load the model that `drafting` describes, as in a speculative configuration."""
        speculative = parse_speculative_config({**drafting, "num_speculative_tokens": num_steps, "adaptive": False})
        self._engine = Engine.from_config(
            EngineConfig(model="demo", max_model_len=max_model_len, speculative=speculative)
        )
        self._answers: dict[str, Sequence[int]] = {}
        self._drafts: dict[tuple[int, ...], list[list[int]]] = {}
        self._current: list[list[int]] = []  # of the answer that is being recorded
        self._propose = self._engine.proposer.propose
        replay_answers(self._engine, self._answers)
        self._engine.proposer.propose = self._record  # type: ignore[method-assign]

    def drafts_of(self, prompt: list[int], answer: Sequence[int]) -> list[list[int]]:
        """Return the draft after each number of tokens of the answer; none after 0."""
        key = (len(prompt), *prompt, *answer)
        if key not in self._drafts:
            self._drafts[key] = self._current = [NO_DRAFT.token_ids] * len(answer)
            params = SamplingParams(temperature=0.0, max_tokens=len(answer), ignore_eos=True)
            self._answers["record"] = answer
            self._engine.add_request(GenerationRequest("record", prompt, params))
            while self._engine.has_unfinished():
                self._engine.step()
        return self._drafts[key]

    def _record(self, requests: Sequence[Request], quotas: Sequence[DraftQuota]) -> list[Draft]:
        """Record the drafts and propose none, so that one step computes each token and is followed by a draft."""
        for request, draft in zip(requests, self._propose(requests, quotas)):
            self._current[request.num_output_tokens] = draft.token_ids
        return [NO_DRAFT] * len(requests)


def replay_drafts(engine: Engine, drafts: Mapping[str, Sequence[list[int]]]) -> None:
    """Let the engine compute its drafts, then replace them by drafts[request_id][num_output_tokens]."""
    runner: Any = engine.runner
    draft = runner.observer.draft

    def draft_and_substitute(requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        computed = draft(requests, counts)
        return [drafts[r.request_id][r.num_output_tokens][: len(tokens)] for r, tokens in zip(requests, computed)]

    runner.observer.draft = draft_and_substitute
