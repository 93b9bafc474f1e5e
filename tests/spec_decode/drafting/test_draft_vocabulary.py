# SPDX-License-Identifier: Apache-2.0
"""Drafts are sampled from the first ids that cover recent tokens; the output does not depend on their number."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.speculative_config import MTPConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.engine import Engine
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.linear import first_outputs, linear, pack_linear
from fastdeploy.ops.quantized_form import FORMS
from fastdeploy.spec_decode.drafting import draft_vocabulary
from fastdeploy.spec_decode.drafting.draft_vocabulary import DraftVocabulary, draft_vocab_sizes
from fastdeploy.spec_decode.drafting.drafter import Drafter
from fastdeploy.worker.model_runner import ModelRunner
from tests.doubles import run


@pytest.mark.parametrize(
    ("vocab_size", "sizes"),
    [(4096, [4096]), (10000, [4992, 10000]), (151936, [18944, 37952, 75968, 151936])],
)
def test_only_large_vocabularies_are_sampled_in_part(vocab_size: int, sizes: list[int]) -> None:
    assert draft_vocab_sizes(vocab_size) == sizes


def test_smallest_size_that_covers_recent_tokens_is_best() -> None:
    vocabulary = DraftVocabulary([10, 20, 40])
    assert vocabulary.best_index([]) == 2  # nothing was observed yet
    vocabulary.observe(np.full(2000, 9))
    assert vocabulary.best_index([]) == 0
    vocabulary.observe(np.full(100, 19))
    assert vocabulary.best_index([]) == 1
    vocabulary.observe(np.full(100, 39))
    assert vocabulary.best_index([]) == 2
    vocabulary.observe(np.full(2000, 10))
    assert vocabulary.best_index([]) == 1


@pytest.mark.parametrize("quantization", ["none", *FORMS])
def test_first_outputs_of_a_layer_are_bit_identical(quantization: str) -> None:
    weight = pack_linear(random_rows(300, 64, "bfloat16", 1), None, quantization)
    rows = random_rows(3, 64, "bfloat16", 2)
    whole, few = paddle.zeros([3, 300], "float32"), paddle.zeros([3, 128], "float32")
    linear(rows, weight, whole, 3)
    linear(rows, first_outputs(weight, 128), few, 3)
    assert bool((whole[:, :128] == few).all())


def drafting_engine() -> Engine:
    speculative = MTPConfig(num_speculative_tokens=3, adaptive=False)
    return Engine.from_config(EngineConfig(model="demo", max_model_len=256, speculative=speculative))


def drafter_of(engine: Engine) -> Drafter:
    assert isinstance(engine.runner, ModelRunner) and isinstance(engine.runner.observer, Drafter)
    return engine.runner.observer


def test_fewer_ids_change_drafts_but_not_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)
    requests = [GenerationRequest(str(i), [5 + i, 6, 7, 8], params) for i in range(3)]
    whole = drafting_engine()
    texts = run(whole, requests)
    monkeypatch.setattr(draft_vocabulary, "MIN_VOCAB_SIZE", 512)
    few = drafting_engine()
    assert len(drafter_of(few).loop.vocab_sizes) == 4
    monkeypatch.setattr(DraftVocabulary, "best_index", lambda self, requests: 0)
    assert run(few, requests) == texts
    monkeypatch.setattr(DraftVocabulary, "best_index", lambda self, requests: 3)
    all_ids = drafting_engine()
    assert run(all_ids, requests) == texts
    assert all_ids.stats().num_accepted_tokens == whole.stats().num_accepted_tokens > 0
    assert 0 < few.stats().num_accepted_tokens < whole.stats().num_accepted_tokens


def test_drafts_are_sampled_from_the_first_ids_if_recent_tokens_were_among_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draft_vocabulary, "MIN_VOCAB_SIZE", 512)
    engine = drafting_engine()
    loop, drafts = drafter_of(engine).loop, list[int]()
    native = loop.draft

    def spy(num_seqs: int) -> None:
        native(num_seqs)
        drafts.extend(loop.drafts.array[:num_seqs].ravel().tolist())

    monkeypatch.setattr(loop, "draft", spy)
    drafter_of(engine)._vocabulary.observe(np.zeros(100_000, np.int32))
    params = SamplingParams(temperature=2.0, seed=3, max_tokens=8, ignore_eos=True)
    run(engine, [GenerationRequest("a", [5, 6, 7, 8], params)])
    assert drafts and max(drafts[:3]) < loop.vocab_sizes[0]  # later tokens are not among the first ids
