# SPDX-License-Identifier: Apache-2.0
"""The law of exactness holds for quantized weights: one plain text per format, whatever computes it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.quantization import FORMATS, QuantizationConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.hub.model_path import resolve_model_path
from tests.exactness.requests import make_requests, run_all, run_alone
from tests.exactness.test_speculation_is_invisible import (
    METHODS,
    Texts,
    adapt,
    build,
    check_bite,
    check_choice,
    config,
    configured,
    oracle_of,
    proposer_of,
)

QUANTIZED = [name for name in FORMATS if name != "none"]


def quantized(cfg: EngineConfig, name: str) -> EngineConfig:
    return replace(cfg, quantization=QuantizationConfig.from_value(name))


@pytest.fixture(scope="module", params=QUANTIZED)
def case(request: pytest.FixtureRequest) -> tuple[str, list[GenerationRequest], Texts]:
    """A format, requests whose stops fit what it emits, and its plain decoding, one request at a time."""
    name = str(request.param)
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("demo"))
    requests = make_requests(tokenizer, build(quantized(config(), name)))
    return name, requests, run_alone(build(quantized(config(), name)), requests)


@pytest.mark.parametrize("chunk", [7, 2048])
def test_batching_and_chunking(case: tuple[str, list[GenerationRequest], Texts], chunk: int) -> None:
    name, requests, plain = case
    assert run_all(build(quantized(config(chunk=chunk), name)), requests) == plain


@pytest.mark.parametrize(("method", "num_drafts"), [*((method, 5) for method in METHODS), ("oracle", 16)])
def test_speculation_with_prefix_hits(
    case: tuple[str, list[GenerationRequest], Texts], method: str, num_drafts: int
) -> None:
    name, requests, plain = case
    cfg = quantized(config(configured(method), num_drafts, 64, prefix_caching=True), name)
    engine = build(cfg, proposer_of(method, plain, num_drafts))
    assert run_all(engine, requests) == plain
    assert run_all(engine, requests) == plain
    assert engine.stats().num_prefix_hit_tokens > 0
    check_bite(engine, method, num_drafts)


@pytest.mark.parametrize("method", METHODS)
def test_adaptive_length(case: tuple[str, list[GenerationRequest], Texts], method: str) -> None:
    name, requests, plain = case
    engine = build(quantized(config(configured(method), 5), name), proposer_of(method, plain, 5))
    adapt(engine, method, slope=0.05)
    assert run_all(engine, requests) == plain
    check_choice(engine, method, slope=0.05)


def test_forced_preemption(case: tuple[str, list[GenerationRequest], Texts]) -> None:
    name, requests, plain = case
    engine = build(quantized(config("ngram", 5, 7, num_blocks=24), name), oracle_of(plain, 0.25))
    assert run_all(engine, requests) == plain
    assert engine.stats().num_preemptions > 0


def test_formats_are_told_apart() -> None:
    engines = [build(quantized(config(), name)) for name in FORMATS]
    fingerprints = [engine.describe()["fingerprint"]["quantization"] for engine in engines]
    assert fingerprints == [
        "none",
        "wint8",
        "attention wint4, mlp wint4, head wint8",
        "w8a8",
        "attention w4a8, mlp w4a8, head w8a8",
    ]
    sizes = [engine.describe()["weights_bytes"] for engine in engines]
    assert sizes[0] > sizes[1] > sizes[2] and sizes[1:3] == sizes[3:5]
