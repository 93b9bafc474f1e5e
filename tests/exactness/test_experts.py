# SPDX-License-Identifier: Apache-2.0
"""The law of exactness holds for models with experts, whose rows share experts with whatever else is in a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
from msgspec import structs

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.config.speculative_config import MTPConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from tests.exactness.engines import (
    CHUNKS,
    NUM_DRAFTS,
    WAYS,
    Texts,
    build,
    check_drafts,
    check_speculation,
    config,
    exists,
)
from tests.exactness.requests import run_all, run_alone
from tests.models.model_driver import GOLDEN
from tests.pairwise import pairwise

FORMATS = ("float32", "bfloat16", "wint8", "wint4", "w8a8", "w4a8")
MODELS = ("ernie4_5_moe", "ernie4_5_moe_paddle", "glm4_moe", "glm4_moe_air", "qwen3_moe", "qwen3_moe_plain_weights")
METHODS = ("ngram", "suffix", "oracle")
CASES = [
    *(("ernie4_5_moe", "float32", *case) for case in pairwise(list(WAYS), METHODS, CHUNKS, NUM_DRAFTS)),
    *pairwise(MODELS, FORMATS, list(WAYS), METHODS, CHUNKS, NUM_DRAFTS),
]
LAYER_CASES = pairwise(FORMATS, list(WAYS), ("mtp", "with_ngram", "with_suffix"), CHUNKS, NUM_DRAFTS, allowed=exists)
NUM_BLOCKS = 12  # of 16 tokens, where a way needs few: those of three requests
VARIANTS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=0.8, seed=12, top_p=0.9, top_k=40, logprobs=5),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, prompt_logprobs=1),
    SamplingParams(temperature=0.7, seed=14, presence_penalty=0.8, frequency_penalty=0.4),
    SamplingParams(temperature=1.0, seed=16, n=2, min_p=0.05),
    SamplingParams(temperature=0.0, allowed_token_ids=[7, 8, 9]),  # repeats itself, as random models rarely do
)


def with_model(cfg: EngineConfig, model: str, numerics: str) -> EngineConfig:
    """Return the configuration for a golden checkpoint in a dtype or weight format."""
    num_blocks = None if cfg.cache.num_blocks is None else NUM_BLOCKS
    is_dtype = numerics in ("float32", "bfloat16")
    return replace(
        cfg,
        model=str(GOLDEN / model),
        dtype=numerics if is_dtype else "bfloat16",
        quantization=QuantizationConfig.from_value("none" if is_dtype else numerics),
        max_model_len=64,
        cache=replace(cfg.cache, num_blocks=num_blocks),
        scheduler=replace(
            cfg.scheduler, long_prefill_token_threshold=min(cfg.scheduler.long_prefill_token_threshold, 64)
        ),
    )


def make_requests() -> list[GenerationRequest]:
    """Return requests whose prompts repeat a phrase of random tokens."""
    rng = np.random.default_rng(5)
    requests = []
    for index, params in enumerate(VARIANTS * 2):
        phrase = [int(token) for token in rng.integers(6, 112, 6 + index)]
        prompt = (phrase * 4)[: 20 + index]
        requests.append(GenerationRequest(f"r{index}", prompt, replace(params, max_tokens=30, ignore_eos=True)))
    return requests


@cache
def plain_texts(model: str, numerics: str) -> tuple[list[GenerationRequest], Texts]:
    """Return requests and their plain decoding, one request at a time."""
    requests = make_requests()
    return requests, run_alone(build(with_model(config(), model, numerics)), requests)


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
