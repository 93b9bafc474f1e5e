# SPDX-License-Identifier: Apache-2.0
"""The law of exactness holds with trained heads, and their drafts do not depend on how a request was computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
from msgspec import structs

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.config.speculative_config import ModelBasedConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.guided_decoding import GuidedDecodingParams
from fastdeploy.core.sampling_params import SamplingParams, SpeculativeParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.gguf.folder import gguf_folder
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.models.packing import pack_checkpoint
from tests.drafting_models import HEADS
from tests.exactness.engines import CHUNKS, WAYS, Texts, build, check_speculation, config, use_adaptive_length
from tests.exactness.golden_models import make_requests as requests_for_tiny_models
from tests.exactness.requests import VARIANTS, make_requests, run_all, run_alone
from tests.gguf.gguf_files import gguf_path
from tests.pairwise import pairwise
from tests.spec_decode.drafting import head_folders

NUMERICS = ("bfloat16", "float32", "wint8", "w4a8", "int8-cache")
NUM_DRAFTS = (1, 2, 3, 4, 8)
LIMITS = {"mlp_speculator": 3, "medusa": 4}  # drafts that these heads make


def exists(*case: object) -> bool:
    """Return False for more drafts than a head makes, which the files of it cut."""
    _, method, _, _, num_drafts = case
    return int(str(num_drafts)) <= LIMITS.get(str(method), 8)


CASES = pairwise(list(WAYS), list(HEADS), CHUNKS, NUMERICS, NUM_DRAFTS, allowed=exists)


def with_numerics(cfg: EngineConfig, numerics: str) -> EngineConfig:
    """Return a configuration with a dtype, a weight format, or eight bits in the cache."""
    if numerics == "int8-cache":
        return replace(cfg, cache=replace(cfg.cache, dtype="int8"))
    if numerics in ("bfloat16", "float32"):
        return replace(cfg, dtype=numerics)
    return replace(cfg, quantization=QuantizationConfig.from_value(numerics))


@cache
def requests() -> list[GenerationRequest]:
    return make_requests(
        Tokenizer.from_pretrained(resolve_model_path("demo")), make_engine(config()), variants=VARIANTS
    )


@cache
def plain_texts(numerics: str) -> Texts:
    """Return plain decoding, one request at a time."""
    return run_alone(build(with_numerics(config(), numerics)), requests())


@pytest.mark.parametrize(("way", "method", "chunk", "numerics", "num_drafts"), CASES)
def test_speculation(way: str, method: str, chunk: int, numerics: str, num_drafts: int) -> None:
    change: Callable[[EngineConfig], EngineConfig] = partial(with_numerics, numerics=numerics)
    check_speculation(way, requests(), plain_texts(numerics), method, chunk, num_drafts, change)


@pytest.mark.parametrize("method", HEADS)
def test_adaptive_length(method: str) -> None:
    num_drafts = LIMITS.get(method, 5)
    engine = build(config(method, num_drafts, prefix_caching=True))
    use_adaptive_length(engine, method, 0.05)
    assert run_all(engine, requests()) == plain_texts("bfloat16")
    engine.check_integrity()
    stats = engine.stats()
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 0


@pytest.mark.parametrize("strategy", ["with_ngram", "with_suffix"])
@pytest.mark.parametrize("method", ["eagle3", "mlp_speculator"])
def test_matches_extend_the_drafts_of_a_head(method: str, strategy: str) -> None:
    given = {"method": method, "model": HEADS[method], "mtp_strategy": strategy, "num_speculative_tokens": 8}
    speculative = parse_speculative_config({**given, "num_model_steps": 2, "adaptive": False})
    engine = build(replace(config(), speculative=speculative))
    assert run_all(engine, requests()) == plain_texts("bfloat16")
    assert set(engine.stats().drafted_per_source) >= {method, strategy.removeprefix("with_")}


@pytest.mark.parametrize("method", HEADS)
def test_forms_of_output_have_the_plain_text(method: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    forms = (GuidedDecodingParams(json=schema), GuidedDecodingParams(regex=r"[a-z ]{1,60}"))
    asked = [
        replace(r, params=SamplingParams(temperature=float(i % 2), seed=i, max_tokens=40, guided_decoding=form))
        for i, (r, form) in enumerate(zip(requests()[:6], forms * 3))
    ]
    engine = build(config(method, 3))
    assert run_all(engine, asked) == run_alone(build(config()), asked)
    assert engine.stats().num_draft_tokens > 0


def test_a_request_may_draft_by_matching_only() -> None:
    given = {"method": "eagle3", "model": HEADS["eagle3"], "mtp_strategy": "with_ngram", "num_speculative_tokens": 8}
    engine = build(replace(config(), speculative=parse_speculative_config({**given, "adaptive": False})))
    only = SpeculativeParams("match")
    asked = [replace(r, params=replace(r.params, speculative=only)) for r in requests()]
    assert run_all(engine, asked) == plain_texts("bfloat16")
    assert set(engine.stats().drafted_per_source) == {"ngram"}


@pytest.mark.parametrize("method", HEADS)
def test_a_model_with_experts_has_the_plain_text_with_any_head(method: str, tmp_path: Path) -> None:
    write: Callable[..., Path] = getattr(head_folders, method)
    cfg = replace(config(method, 3), model="demo/moe")
    speculative = cfg.speculative
    assert isinstance(speculative, ModelBasedConfig)
    drafting = replace(cfg, speculative=structs.replace(speculative, model=str(write(tmp_path / "head", hidden=192))))
    asked = requests()[:6]
    expected = run_alone(build(replace(config(), model="demo/moe")), asked)
    engine = build(drafting)
    assert run_all(engine, asked) == expected
    assert engine.stats().num_draft_tokens > 0


def test_a_packed_model_and_codes_of_a_gguf_file_have_their_plain_text_with_a_head(tmp_path: Path) -> None:
    demo = ModelConfig.from_pretrained(resolve_model_path("demo"))
    pack_checkpoint(demo, tmp_path / "packed", QuantizationConfig.from_value("wint8"))
    engine = build(replace(config("eagle3", 3), model=str(tmp_path / "packed")))
    assert run_all(engine, requests()) == plain_texts("wint8")
    assert engine.stats().num_accepted_tokens > 0
    folder = str(gguf_folder(gguf_path("qwen2_q8_0")))
    gguf = ModelConfig.from_pretrained(folder)
    head = head_folders.eagle(tmp_path / "head", hidden=gguf.hidden_size, vocab=gguf.vocab_size)
    plain = replace(config(), model=folder, max_model_len=64)
    speculative = parse_speculative_config({"model": str(head), "num_speculative_tokens": 3, "adaptive": False})
    asked = requests_for_tiny_models()[:6]
    engine = build(replace(plain, speculative=speculative))
    assert run_all(engine, asked) == run_alone(build(plain), asked)
    assert engine.stats().num_draft_tokens > 0


def accepted(engine: Engine, asked: Sequence[GenerationRequest]) -> tuple[int, int]:
    """Return how many drafts were accepted and made while requests ran together."""
    before = engine.stats().num_accepted_tokens, engine.stats().num_draft_tokens
    run_all(engine, asked)
    after = engine.stats()
    return after.num_accepted_tokens - before[0], after.num_draft_tokens - before[1]


@pytest.mark.parametrize("method", HEADS)
def test_as_many_drafts_are_accepted_after_chunks_prefix_hits_and_preemptions(method: str) -> None:
    greedy = [
        replace(r, params=SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)) for r in requests()[:8]
    ]
    plain = accepted(build(config(method, 2, dtype="float32")), greedy)
    assert plain[0] > 0
    chunked = build(config(method, 2, chunk=7, prefix_caching=True, dtype="float32"))
    assert accepted(chunked, greedy) == plain
    assert chunked.stats().num_prefix_hit_tokens == 0
    assert accepted(chunked, greedy) == plain
    assert chunked.stats().num_prefix_hit_tokens > 0
    preempted = build(config(method, 2, num_blocks=24, dtype="float32"))
    again = accepted(preempted, greedy)
    assert preempted.stats().num_preemptions > 0
    assert abs(again[0] - plain[0]) <= 0.1 * plain[0]  # steps of a preempted request begin at other tokens
