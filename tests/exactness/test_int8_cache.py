# SPDX-License-Identifier: Apache-2.0
"""The law of exactness holds for a KV cache of eight bits, which holds nearly twice the tokens in the same memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.entrypoints.openai.startup_summary import summary_lines
from fastdeploy.hub.model_path import resolve_model_path
from tests.exactness.engines import Texts, build, check_speculation, config
from tests.exactness.requests import make_requests, run_all, run_alone

LONG = Path(__file__).parent.joinpath("test_speculation_is_invisible.py").read_text()


def int8(cfg: EngineConfig) -> EngineConfig:
    return replace(cfg, cache=replace(cfg.cache, dtype="int8"))


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    return make_requests(Tokenizer.from_pretrained(resolve_model_path("demo")), build(int8(config())))


@pytest.fixture(scope="module")
def plain(requests: list[GenerationRequest]) -> Texts:
    """Plain decoding with the same cache, one request at a time."""
    return run_alone(build(int8(config())), requests)


def test_the_cache_is_rounded(requests: list[GenerationRequest], plain: Texts) -> None:
    wide = run_alone(build(config()), requests[10:11])["r10", 0].prompt_logprobs or ()
    narrow = plain["r10", 0].prompt_logprobs or ()
    moved = [abs(a[1] - b[1]) for a, b in zip(wide, narrow, strict=True)]
    assert 1e-3 < max(moved) < 0.2


@pytest.mark.parametrize("chunk", [1, 7, 2048])
def test_batching_and_chunking(requests: list[GenerationRequest], plain: Texts, chunk: int) -> None:
    assert run_all(build(int8(config(chunk=chunk))), requests) == plain


@pytest.mark.parametrize(
    ("way", "method", "chunk", "num_drafts"),
    [
        ("prefix-hits-together", "ngram", 64, 5),
        ("preemption", "oracle", 7, 5),
        ("prefix-hits-together", "oracle", 7, 16),
        ("prefix-hits-together", "suffix", 2048, 5),
        ("prefix-hits-together", "mtp", 7, 3),
        ("prefix-hits-together", "draft_model", 64, 3),
    ],
)
def test_speculation(
    requests: list[GenerationRequest], plain: Texts, way: str, method: str, chunk: int, num_drafts: int
) -> None:
    check_speculation(way, requests, plain, method, chunk, num_drafts, int8)


def test_long_contexts_that_share_a_prefix() -> None:
    tokens = Tokenizer.from_pretrained(resolve_model_path("demo")).encode(LONG)[:1400]
    greedy = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    texts = [GenerationRequest(f"r{i}", tokens[: len(tokens) - 90 * i], greedy) for i in range(3)]

    def long(cfg: EngineConfig) -> EngineConfig:
        return int8(replace(cfg, max_model_len=1536))

    alone = run_alone(build(long(config())), texts)
    engine = build(long(config("ngram", 5, chunk=200, prefix_caching=True)))
    assert run_all(engine, texts) == alone  # the second and third share the blocks of the first
    assert run_all(engine, texts) == alone
    stats = engine.stats()
    assert stats.num_prefix_hit_tokens > 2 * 1200
    assert stats.num_accepted_tokens > 0


@pytest.mark.parametrize("method", ["naive", "mtp", "draft_model"])
def test_memory_plan_counts_codes_and_scales(method: str) -> None:
    def describe(dtype: str) -> dict[str, Any]:
        cfg = config(method, 3 if method != "naive" else 0)
        cache = replace(cfg.cache, dtype=dtype, kv_cache_memory=1 << 24)
        return build(replace(cfg, cache=cache)).describe()

    wide, narrow = describe("auto")["kv_cache"], describe("int8")["kv_cache"]
    assert (wide["dtype"], narrow["dtype"]) == ("bfloat16", "int8")
    assert narrow["bytes"] <= 1 << 24
    assert 1.7 < narrow["num_blocks"] / wide["num_blocks"] < 1.9  # an MTP layer keeps hidden states beside its cache
    if method == "naive":
        assert wide["num_blocks"] == (1 << 24) // (16 * 14 * 2 * 2 * 64 * 2)  # tokens, layers, keys and values, heads
        assert narrow["num_blocks"] == (1 << 24) // (16 * 14 * 2 * 2 * (64 + 4))


def test_the_type_of_the_cache_is_in_fingerprint_and_summary() -> None:
    wide, narrow = build(config()).describe(), build(int8(config())).describe()
    assert {key for key in wide["fingerprint"] if wide["fingerprint"][key] != narrow["fingerprint"][key]} == {
        "kv_cache_dtype"
    }
    assert narrow["fingerprint"].keys() - wide["fingerprint"].keys() == {"balanced_keys"}
    assert any(line.startswith("  KV cache") and line.endswith(", int8") for line in summary_lines(narrow, ()))


def test_rows_of_float32_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype: int8 needs dtype bfloat16, got float32"):
        build(int8(config(dtype="float32")))
