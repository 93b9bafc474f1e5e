# SPDX-License-Identifier: Apache-2.0
"""Drafts of latent layers are those of transformers after chunks, prefix hits and preemptions, and so is acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.step import RequestResult, StepPlan
from fastdeploy.engine.engine import Engine
from tests.exactness.requests import run_all
from tests.models.mtp_training import Counts, replay
from tests.models.test_latent_definition import LATENT, NUM_DRAFTS, PROMPT_LEN, WITH_LAYER
from tests.models.test_latent_models import TEXT_LEN, layer_reference
from tests.models.test_mtp_experts import engine_of, mtp


@dataclass
class Reference:
    """The texts of a golden model, and transformers' drafts after each length of them."""

    texts: list[list[int]]
    drafts: list[list[list[int]]]

    def drafts_after(self, index: int, end: int) -> list[int]:
        return self.drafts[index][end - PROMPT_LEN - 1]


@dataclass
class Verified:
    """The drafts that an engine verifies: index of the text, number of tokens before them, and the drafts."""

    engine: Engine
    drafts: list[tuple[int, int, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._run, self.engine.runner.run = self.engine.runner.run, self.run  # type: ignore[method-assign]

    def run(self, plan: StepPlan) -> Sequence[RequestResult]:
        for scheduled in plan.requests:
            drafts = list(scheduled.draft.token_ids)
            end = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens - len(drafts)
            if drafts:
                self.drafts.append((int(scheduled.request.request_id), end, drafts))
        return self._run(plan)


def reference_of(name: str) -> Reference:
    values = layer_reference(name)
    return Reference(values["texts"].tolist(), values["drafts_of_texts"].tolist())


def write_texts(engine: Engine, texts: list[list[int]], prompt_len: int) -> Counts:
    """Let the engine write the texts from prompts of a length; return the counts of its drafts."""
    before = counts_of(engine)
    params = SamplingParams(temperature=0.0, max_tokens=TEXT_LEN - prompt_len, ignore_eos=True)
    found = run_all(engine, [GenerationRequest(str(i), text[:prompt_len], params) for i, text in enumerate(texts)])
    assert [[*text[:prompt_len], *found[str(i), 0].token_ids] for i, text in enumerate(texts)] == texts
    return counts_of(engine) - before


def counts_of(engine: Engine) -> Counts:
    stats = engine.stats()
    counts = np.zeros((2, NUM_DRAFTS), np.int64)
    for row, found in zip(counts, (stats.drafted_per_position, stats.accepted_per_position), strict=True):
        row[: len(found)] = found
    return counts


@pytest.mark.parametrize("chunk", [256, 7])
@pytest.mark.parametrize("name", WITH_LAYER)
def test_acceptance_after_prefix_hits_is_that_of_transformers(name: str, chunk: int) -> None:
    """Later prompts end in the middle of earlier texts, whose blocks were written from drafted rows, too."""
    reference = reference_of(name)
    engine = engine_of(LATENT / name, mtp(layer=LATENT / f"{name}_mtp"), chunk)
    for prompt_len in (PROMPT_LEN, 33, 50):
        counts = write_texts(engine, reference.texts, prompt_len)
        np.testing.assert_array_equal(counts, replay(reference.texts, prompt_len, NUM_DRAFTS, reference.drafts_after))
        assert counts[1].min() > 0
    assert engine.stats().num_prefix_hit_tokens == len(reference.texts) * (32 + 48)


@pytest.mark.parametrize("chunk", [256, 7])
@pytest.mark.parametrize("name", WITH_LAYER)
def test_preempted_requests_draft_as_transformers_does_wherever_they_go_on(name: str, chunk: int) -> None:
    reference = reference_of(name)
    engine = engine_of(LATENT / name, mtp(layer=LATENT / f"{name}_mtp"), chunk, num_blocks=10)
    verified, counts = Verified(engine), np.zeros((2, NUM_DRAFTS), np.int64)
    found = write_texts(engine, reference.texts, PROMPT_LEN)
    for index, end, drafts in verified.drafts:
        expected, text = reference.drafts_after(index, end), reference.texts[index][end:]
        assert drafts == expected[: len(text) - 1]
        num_accepted = next((i for i, pair in enumerate(zip(drafts, text)) if pair[0] != pair[1]), len(drafts))
        counts[0, : len(drafts)] += 1
        counts[1, :num_accepted] += 1
    np.testing.assert_array_equal(found, counts)
    replayed = replay(reference.texts, PROMPT_LEN, NUM_DRAFTS, reference.drafts_after)
    assert 0 < replayed[0, 0] - found[0, 0] <= engine.stats().num_preemptions  # one step each has no drafts
