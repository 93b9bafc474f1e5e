# SPDX-License-Identifier: Apache-2.0
"""The law of exactness holds for quantized weights: one plain text per format, whatever computes it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.quantization import FORMATS, QuantizationConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.hub.model_path import resolve_model_path
from tests.exactness.engines import (
    CHUNKS,
    METHODS,
    NUM_DRAFTS,
    Texts,
    build,
    check_chosen_lengths,
    check_speculation,
    config,
    configured,
    exists,
    proposer_of,
    use_adaptive_length,
)
from tests.exactness.requests import make_requests, run_all, run_alone
from tests.pairwise import pairwise

QUANTIZED = [name for name in FORMATS if name != "none"]
TOGETHER = ("together", "prefix-hits-together", "preemption")
CASES = pairwise(QUANTIZED, TOGETHER, METHODS, CHUNKS, NUM_DRAFTS, allowed=exists)


def quantized(cfg: EngineConfig, name: str) -> EngineConfig:
    return replace(cfg, quantization=QuantizationConfig.from_value(name))


@cache
def plain_texts(name: str) -> tuple[list[GenerationRequest], Texts]:
    """Return requests whose stops fit the texts of a format, and their plain decoding, one request at a time."""
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("demo"))
    requests = make_requests(tokenizer, build(quantized(config(), name)))
    return requests, run_alone(build(quantized(config(), name)), requests)


@pytest.mark.parametrize("chunk", [7, 2048])
@pytest.mark.parametrize("name", QUANTIZED)
def test_batching_and_chunking(name: str, chunk: int) -> None:
    requests, plain = plain_texts(name)
    assert run_all(build(quantized(config(chunk=chunk), name)), requests) == plain


@pytest.mark.parametrize(("name", "way", "method", "chunk", "num_drafts"), CASES)
def test_speculation(name: str, way: str, method: str, chunk: int, num_drafts: int) -> None:
    check_speculation(way, *plain_texts(name), method, chunk, num_drafts, lambda cfg: quantized(cfg, name))


@pytest.mark.parametrize("method", ["oracle", "with_ngram"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_adaptive_length(name: str, method: str) -> None:
    requests, plain = plain_texts(name)
    engine = build(quantized(config(configured(method), 5), name), proposer_of(method, plain, 5))
    use_adaptive_length(engine, method, slope=0.05)
    assert run_all(engine, requests) == plain
    check_chosen_lengths(engine, method, slope=0.05)


def test_each_format_has_its_own_fingerprint_and_size() -> None:
    engines = [build(quantized(config(), name)) for name in FORMATS]
    fingerprints = [engine.describe()["fingerprint"]["quantization"] for engine in engines]
    assert fingerprints == [
        "none",
        "wint8",
        "attention wint4, mlp wint4, head wint8",
        "attention wint4_min, mlp wint4_min, head wint8",
        "w8a8",
        "attention w4a8, mlp w4a8, head w8a8",
        "attention w4a8_min, mlp w4a8_min, head w8a8",
    ]
    sizes = {name: engine.describe()["weights_bytes"] for name, engine in zip(FORMATS, engines, strict=True)}
    by_size = ["none", "w8a8", "wint8", "w4a8_min", "wint4_min", "w4a8", "wint4"]
    assert sorted(sizes, key=sizes.__getitem__, reverse=True) == by_size and len(set(sizes.values())) == len(sizes)
