# SPDX-License-Identifier: Apache-2.0
"""The law of exactness holds for models with latent attention."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.speculative_config import EXTENSIONS, MTPConfig
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine
from fastdeploy.spec_decode.proposers.base import Proposer
from tests.engine.hand_over import make_pair
from tests.exactness.engines import (
    CHUNKS,
    NUM_DRAFTS,
    WAYS,
    build,
    check_drafts,
    check_speculation,
    config,
    configured,
    exists,
    proposer_of,
)
from tests.exactness.golden_models import FORMATS, plain_texts, with_model
from tests.exactness.requests import run_all, run_alone
from tests.exactness.test_grammars import make_grammar_requests
from tests.latent_model import save_latent_model
from tests.models.model_driver import GOLDEN
from tests.pairwise import pairwise
from tests.thinking_model import save_thinking_model

MODELS = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3_halves", "glm4_moe_lite", "glm4_moe_lite_bias")
LAYERS = ("glm4_moe_lite", "deepseek_v3")  # models with a layer for multi-token prediction
METHODS = ("ngram", "suffix", "oracle")
CASES = [
    *(("deepseek_v3", *case) for case in pairwise(FORMATS, list(WAYS), METHODS, CHUNKS, NUM_DRAFTS)),
    *pairwise(MODELS, FORMATS, list(WAYS), METHODS, CHUNKS, NUM_DRAFTS),
]
LAYER_CASES = pairwise(
    LAYERS, FORMATS, list(WAYS), ("mtp", "with_ngram", "with_suffix"), CHUNKS, NUM_DRAFTS, allowed=exists
)


def with_layer(cfg: EngineConfig, model: str, numerics: str) -> EngineConfig:
    """Return the configuration for a golden checkpoint and its layer."""
    assert isinstance(cfg.speculative, MTPConfig)
    layer = structs.replace(cfg.speculative, model=str(GOLDEN / "latent" / f"{model}_mtp"))
    return replace(with_model(cfg, f"latent/{model}", numerics), speculative=layer)


def check_sources(engine: Engine, method: str, num_drafts: int) -> None:
    """Assert that drafts were accepted and rejected, and that all sources made some."""
    check_drafts(engine, "mtp", num_drafts)
    found = engine.stats().drafted_per_source
    assert len(found) == 1 + (method in EXTENSIONS) and min(found.values()) > 0


@pytest.mark.parametrize("numerics", FORMATS)
@pytest.mark.parametrize("model", ("deepseek_v3", *MODELS))
def test_batching_and_chunking(model: str, numerics: str) -> None:
    requests, plain = plain_texts(f"latent/{model}", numerics)
    assert run_all(build(with_model(config(chunk=7), f"latent/{model}", numerics)), requests) == plain


@pytest.mark.parametrize(("model", "numerics", "way", "method", "chunk", "num_drafts"), CASES)
def test_speculation(model: str, numerics: str, way: str, method: str, chunk: int, num_drafts: int) -> None:
    change: Callable[[EngineConfig], EngineConfig] = partial(with_model, model=f"latent/{model}", numerics=numerics)
    check_speculation(way, *plain_texts(f"latent/{model}", numerics), method, chunk, num_drafts, change)


@pytest.mark.parametrize(("model", "numerics", "way", "method", "chunk", "num_drafts"), LAYER_CASES)
def test_speculation_with_a_layer(
    model: str, numerics: str, way: str, method: str, chunk: int, num_drafts: int
) -> None:
    change = partial(with_layer, model=model, numerics=numerics)
    plain = plain_texts(f"latent/{model}", numerics)
    check_speculation(way, *plain, method, chunk, num_drafts, change, check_sources)


@pytest.mark.parametrize(
    ("form", "method", "chunk", "num_drafts"),
    [
        ("groups of V3", "ngram", 7, 3),
        ("groups of V3", "oracle", 64, 5),
        ("groups of V3", "suffix", 1, 16),
        ("groups of V2", "oracle", 1, 3),
        ("halves in GLM", "ngram", 64, 5),
    ],
)
def test_grammars_and_reasoning_budgets(form: str, method: str, chunk: int, num_drafts: int, tmp_path: Path) -> None:
    """Models of random weights with the demonstration model's tokenizer, which knows marks of reasoning."""
    folder, demo = save_latent_model(tmp_path / "model", max_context=256, form=form), tmp_path / "demo"
    demo.mkdir()
    shutil.copy(save_thinking_model(demo) / "tokenizer.json", folder)

    def build_for(*args: Any, proposer: Proposer | None = None) -> Engine:
        return build(replace(config(*args), model=str(folder), reasoning_parser="qwen3"), proposer)

    requests = make_grammar_requests(Tokenizer.from_pretrained(folder))
    plain = run_alone(build_for(), requests)
    proposer = proposer_of(method, plain, num_drafts)
    engine = build_for(configured(method), num_drafts, chunk, proposer=proposer)
    assert run_all(engine, requests) == plain
    check_drafts(engine, method, num_drafts)


@pytest.mark.parametrize(
    ("model", "method", "numerics"),
    [
        ("deepseek_v2", "ngram", "bfloat16"),
        ("deepseek_v3", "mtp", "wint8"),
        ("glm4_moe_lite", "mtp", "bfloat16"),
    ],
)
def test_blocks_of_latent_rows_move_between_engines(model: str, method: str, numerics: str) -> None:
    def change(cfg: EngineConfig) -> EngineConfig:
        return with_layer(cfg, model, numerics) if method == "mtp" else with_model(cfg, f"latent/{model}", numerics)

    requests, plain = plain_texts(f"latent/{model}", numerics)
    pair = make_pair(plain, method, method, chunk=16, change=change)
    for request in requests:
        pair.add(request)
    assert pair.texts() == plain
    assert pair.importing.num_imported_blocks > 0
    assert pair.second.stats().num_accepted_tokens > 0
