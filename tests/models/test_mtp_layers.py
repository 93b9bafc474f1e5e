# SPDX-License-Identifier: Apache-2.0
"""Several layers for multi-token prediction: layer k makes draft k, the last layer all further drafts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import paddle
import pytest
from paddle import Tensor

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.core.request import DraftQuota, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.step import StepPlan
from fastdeploy.detokenize.tokenizer import Tokenizer
from tests.exactness.requests import HEADS, run_all
from tests.models.mtp_training import (
    DEMO,
    FORMS,
    DefinedLayer,
    defined_drafts,
    engine_of,
    states_of,
    texts_of,
    train,
    write_checkpoint,
)
from tests.spec_decode.drafting.engines import Drafts, record_drafts

NUM_DRAFTS = 4  # of two layers: the second one makes the last three drafts


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    tokenizer = Tokenizer.from_pretrained(str(DEMO))
    params = SamplingParams(temperature=0.0, max_tokens=44, ignore_eos=True)
    return [GenerationRequest(str(i), tokenizer.encode(head)[:20], params) for i, head in enumerate(HEADS)]


@pytest.fixture(scope="module")
def texts(requests: list[GenerationRequest]) -> list[list[int]]:
    return texts_of(requests)


@pytest.mark.parametrize("form", FORMS)
def test_drafts_of_two_layers_equal_their_definition(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    requests: list[GenerationRequest],
    texts: list[list[int]],
) -> None:
    config = ModelConfig.from_pretrained(str(DEMO), dtype="float32")
    layers = [DefinedLayer(form, config, seed=2 + index, index=index) for index in range(2)]
    write_checkpoint(tmp_path / "target", {})
    states = states_of(tmp_path / "target", texts, layers[0].hidden_state)
    train(layers, paddle.to_tensor(texts, "int64"), states, num_steps=30)
    write_checkpoint(tmp_path / "model", layers[0].weights | layers[1].weights)
    for num_blocks in (None, 12):
        engine = engine_of(str(tmp_path / "model"), form, NUM_DRAFTS, chunk=7, num_blocks=num_blocks)
        found = record_drafts(engine)
        monkeypatch.setattr(engine.length_policy, "draft_quotas", varying_quotas)
        for _ in range(2):  # the second time with prefix hits
            run_all(engine, requests)
        stats = engine.stats()
        assert stats.num_accepted_tokens > 100
        assert stats.num_prefix_hit_tokens > 0
        assert (stats.num_preemptions > 0) == (num_blocks is not None)
        assert count_equal(layers, found, texts, states) > 100


def varying_quotas(plan: StepPlan, ready: Sequence[Request]) -> list[DraftQuota]:
    return [
        DraftQuota(count, count) for count in (min(r.draft_room, 1 if r.num_tokens % 3 else NUM_DRAFTS) for r in ready)
    ]


def count_equal(layers: list[DefinedLayer], found: Drafts, texts: list[list[int]], states: Tensor) -> int:
    """Return how many drafts were compared with their definition; raise AssertionError where one differs."""
    count = 0
    for text, of_text in zip(texts, states):
        for (context, _), drafts in found.items():
            if context == tuple(text[: len(context)]):
                defined = defined_drafts(layers, list(context), of_text[: len(context) - 1])
                assert drafts == tuple(islice(defined, len(drafts)))
                count += len(drafts)
    return count
