# SPDX-License-Identifier: Apache-2.0
"""Lets a model of any shape say what was recorded, so that speed and quality of drafts can be measured apart.

Every row is computed and sampled as ever; then the recorded token takes the place of the sampled one. Proposers,
verification and all that follows see a model that says the recorded text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastdeploy.core.request import GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.step import StepPlan
from fastdeploy.engine.engine import Engine
from fastdeploy.spec_decode.base import Proposer
from fastdeploy.worker.model_runner import ModelRunner

Answers = Mapping[str, Sequence[int]]


def replay_answers(engine: Engine, answers: Answers) -> None:
    """Let the engine's model emit answers[request_id], which may be filled later; other requests are as ever."""
    runner: Any = engine.runner
    assert isinstance(runner, ModelRunner)
    sample = runner._sample

    def sample_and_substitute(plan: StepPlan, go: list[Any]) -> None:
        sample(plan, go)
        at = 0
        for segment in go:
            request = plan.requests[segment.plan_row]
            if not segment.is_prompt and request.request_id in answers:
                rest = answers[request.request_id][request.num_output_tokens :]
                runner.sampling.token_ids.array[at : at + segment.count] = rest[: segment.count]
            at += segment.count

    runner._sample = sample_and_substitute  # type: ignore[method-assign]


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
        proposer.observe([request], [emitted])
        rest = np.array(answer[request.num_output_tokens :])
        draft = proposer.propose([request], [request.draft_room])[0].token_ids if request.draft_room else rest[:0]
        num_right = (*(draft == rest[: len(draft)]).tolist(), False).index(False)
        emitted = rest[: num_right + 1].tolist()
        tally.steps += 1
        tally.emitted += len(emitted)
        tally.drafted += len(draft)
        tally.accepted += num_right
    request.append(emitted)
    proposer.finish(request)
