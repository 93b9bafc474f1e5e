# SPDX-License-Identifier: Apache-2.0
"""The law of exactness holds for the trained model with experts, on one engine and on two."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.hub.model_path import resolve_model_path
from tests.engine.hand_over import make_pair, run_moving
from tests.exactness.engines import CHUNKS, NUM_DRAFTS, WAYS, Texts, build, check_speculation, config, exists
from tests.exactness.requests import make_requests, run_alone
from tests.pairwise import pairwise

METHODS = ("ngram", "suffix", "oracle", "mtp", "with_ngram", "with_suffix", "draft_model")
CASES = pairwise(list(WAYS), METHODS, CHUNKS, NUM_DRAFTS, allowed=exists)


def with_experts(cfg: EngineConfig) -> EngineConfig:
    return replace(cfg, model="demo/moe")


def in_four_bits(cfg: EngineConfig) -> EngineConfig:
    return replace(with_experts(cfg), quantization=QuantizationConfig.from_value("wint4"))


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("demo/moe"))
    return make_requests(tokenizer, build(with_experts(config())))


@pytest.fixture(scope="module")
def plain(requests: list[GenerationRequest]) -> Texts:
    return run_alone(build(with_experts(config())), requests)


@pytest.mark.parametrize(("way", "method", "chunk", "num_drafts"), CASES)
def test_speculation(
    requests: list[GenerationRequest], plain: Texts, way: str, method: str, chunk: int, num_drafts: int
) -> None:
    check_speculation(way, requests, plain, method, chunk, num_drafts, with_experts)


@pytest.mark.parametrize("method", ["with_ngram", "mtp"])
def test_speculation_in_four_bits(requests: list[GenerationRequest], method: str) -> None:
    plain = run_alone(build(in_four_bits(config())), requests)
    check_speculation("together", requests, plain, method, 2048, 3, in_four_bits)


@pytest.mark.parametrize("method", ["naive", "mtp", "suffix"])
def test_a_prompt_computed_on_another_engine(requests: list[GenerationRequest], plain: Texts, method: str) -> None:
    pair = make_pair(plain, method, method, change=with_experts)
    for request in requests:
        pair.add(request)
    assert pair.texts() == plain
    assert pair.importing.num_imported_blocks > 0
    stats = pair.second.stats()
    assert method == "naive" or stats.num_draft_tokens > stats.num_accepted_tokens > 0


@pytest.mark.parametrize("method", ["mtp", "ngram"])
def test_a_request_that_goes_on_on_another_engine(requests: list[GenerationRequest], plain: Texts, method: str) -> None:
    pair = make_pair(plain, method, method, change=with_experts)
    assert run_moving(pair, requests, random.Random(method)) == plain
    assert pair.handovers
