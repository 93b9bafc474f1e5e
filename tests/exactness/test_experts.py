# SPDX-License-Identifier: Apache-2.0
"""The law of exactness holds for models with experts, whose rows share experts with whatever else is in a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from msgspec import structs

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.speculative_config import MTPConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from tests.exactness.engines import (
    CHUNKS,
    NUM_DRAFTS,
    WAYS,
    build,
    check_drafts,
    check_speculation,
    config,
    exists,
)
from tests.exactness.golden_models import FORMATS, plain_texts, with_model
from tests.exactness.requests import run_all
from tests.models.model_driver import GOLDEN
from tests.pairwise import pairwise

MODELS = ("ernie4_5_moe", "ernie4_5_moe_paddle", "glm4_moe", "glm4_moe_air", "qwen3_moe", "qwen3_moe_plain_weights")
METHODS = ("ngram", "suffix", "oracle")
CASES = [
    *(("ernie4_5_moe", "float32", *case) for case in pairwise(list(WAYS), METHODS, CHUNKS, NUM_DRAFTS)),
    *pairwise(MODELS, FORMATS, list(WAYS), METHODS, CHUNKS, NUM_DRAFTS),
]
LAYER_CASES = pairwise(FORMATS, list(WAYS), ("mtp", "with_ngram", "with_suffix"), CHUNKS, NUM_DRAFTS, allowed=exists)


@pytest.mark.parametrize("numerics", FORMATS)
@pytest.mark.parametrize("model", MODELS)
def test_batching_and_chunking(model: str, numerics: str) -> None:
    requests, plain = plain_texts(model, numerics)
    assert run_all(build(with_model(config(chunk=7), model, numerics)), requests) == plain


@pytest.mark.parametrize(("model", "numerics", "way", "method", "chunk", "num_drafts"), CASES)
def test_speculation(model: str, numerics: str, way: str, method: str, chunk: int, num_drafts: int) -> None:
    change: Callable[[EngineConfig], EngineConfig] = partial(with_model, model=model, numerics=numerics)
    check_speculation(way, *plain_texts(model, numerics), method, chunk, num_drafts, change)


@pytest.mark.parametrize(("numerics", "way", "method", "chunk", "num_drafts"), LAYER_CASES)
def test_speculation_with_a_layer_that_has_experts(
    numerics: str, way: str, method: str, chunk: int, num_drafts: int
) -> None:
    def change(cfg: EngineConfig) -> EngineConfig:
        assert isinstance(cfg.speculative, MTPConfig)
        layer = structs.replace(cfg.speculative, model=str(GOLDEN / "glm4_moe_mtp"))
        return replace(with_model(cfg, "glm4_moe", numerics), speculative=layer)

    check_speculation(way, *plain_texts("glm4_moe", numerics), method, chunk, num_drafts, change)


@pytest.mark.parametrize(
    ("model", "draft", "numerics"),
    [
        ("ernie4_5_moe", "ernie4_5_moe", "float32"),
        ("ernie4_5", "ernie4_5_moe", "bfloat16"),
        ("glm4_moe", "ernie4_5", "wint4"),
        ("qwen3_moe", "qwen3_moe", "w8a8"),
    ],
)
def test_models_with_experts_draft_and_are_drafted_for(model: str, draft: str, numerics: str) -> None:
    requests, plain = plain_texts(model, numerics)
    keys = {"method": "draft_model", "model": str(GOLDEN / draft), "num_speculative_tokens": 3, "adaptive": False}
    engine = build(replace(with_model(config(), model, numerics), speculative=parse_speculative_config(keys)))
    assert run_all(engine, requests) == plain
    check_drafts(engine, "draft_model", 3)


@pytest.mark.parametrize("model", MODELS)
def test_an_engine_continues_as_transformers_does(model: str) -> None:
    with np.load(GOLDEN / model / "reference.npz") as values:
        tokens, length = values["tokens"].tolist(), int(values["prompt_len"])
    params = SamplingParams(temperature=0.0, max_tokens=len(tokens) - length, ignore_eos=True)
    request = GenerationRequest("r", tokens[:length], params)
    texts = run_all(build(with_model(config("ngram", 3), model, "float32")), [request])
    assert list(texts["r", 0].token_ids) == tokens[length:]


def test_families_have_texts_of_their_own_and_layouts_have_not() -> None:
    texts = [tuple(text.token_ids for text in plain_texts(model, "float32")[1].values()) for model in MODELS]
    assert texts[0] == texts[1], "both layouts of one checkpoint"
    assert len(set(texts)) == len(MODELS) - 1
