# SPDX-License-Identifier: Apache-2.0
"""Engines of golden checkpoints in every dtype and weight format, and the plain texts of requests to them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from tests.exactness.engines import Texts, build, config
from tests.exactness.requests import run_alone
from tests.models.model_driver import GOLDEN

FORMATS = ("float32", "bfloat16", "wint8", "wint4", "w8a8", "w4a8")
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
