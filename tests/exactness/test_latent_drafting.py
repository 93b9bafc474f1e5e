# SPDX-License-Identifier: Apache-2.0
"""The law of exactness holds where one of target and drafting model has latent attention, or both."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.speculative_config import ModelBasedConfig
from fastdeploy.engine.engine import Engine
from tests.drafting_models import HEADS
from tests.engine.hand_over import make_pair, run_moving
from tests.exactness.engines import CHUNKS, NUM_DRAFTS, WAYS, build, check_speculation, config
from tests.exactness.golden_models import VARIANTS, plain_texts, with_model
from tests.exactness.requests import run_all
from tests.models.model_driver import GOLDEN
from tests.pairwise import pairwise
from tests.spec_decode.drafting import head_folders

TARGETS = ("latent/deepseek_v3", "latent/deepseek_v2_lite", "latent/glm4_moe_lite")
NUMERICS = ("float32", "bfloat16", "w4a8")
LIMITS = {"mlp_speculator": 3, "medusa": 4}  # drafts that these heads make
PAIRS = (  # target and draft model
    ("qwen3", "latent/deepseek_v2"),
    ("qwen3_moe", "latent/glm4_moe_lite"),
    ("latent/deepseek_v3", "qwen2"),
    ("latent/glm4_moe_lite", "latent/deepseek_v2_lite"),
)


def head_of(method: str, target: str, folder: Path) -> Path:
    """Write a random head for a golden model."""
    sizes = json.loads((GOLDEN / target / "config.json").read_text())
    keys: dict[str, Any] = {"hidden": sizes["hidden_size"], "vocab": sizes["vocab_size"]}
    write: Callable[..., Path] = getattr(head_folders, method)
    return write(folder, **keys, **({"reduced": False} if method == "eagle3" else {}))


def with_pair(cfg: EngineConfig, target: str, numerics: str, drafting: str) -> EngineConfig:
    """Return the configuration for a golden model with a drafting model."""
    assert isinstance(cfg.speculative, ModelBasedConfig)
    return replace(with_model(cfg, target, numerics), speculative=structs.replace(cfg.speculative, model=drafting))


def check_drafts(engine: Engine, method: str, num_drafts: int) -> None:
    """Assert that the model made drafts, some of which were wrong: it is random, or another one than the target."""
    stats = engine.stats()
    assert stats.num_draft_tokens > stats.num_accepted_tokens
    assert list(stats.drafted_per_source) == [method]


def exists(*case: object) -> bool:
    """Return False for more drafts than a head makes, which its files say."""
    _, method, *_, num_drafts = case
    return int(str(num_drafts)) <= LIMITS.get(str(method), 16)


@pytest.mark.parametrize(
    ("target", "method", "way", "numerics", "chunk", "num_drafts"),
    pairwise(TARGETS, list(HEADS), list(WAYS), NUMERICS, CHUNKS, NUM_DRAFTS, allowed=exists),
)
def test_heads_of_latent_targets(
    target: str, method: str, way: str, numerics: str, chunk: int, num_drafts: int, tmp_path: Path
) -> None:
    head = str(head_of(method, target, tmp_path / "head"))
    change = partial(with_pair, target=target, numerics=numerics, drafting=head)
    check_speculation(way, *plain_texts(target, numerics), method, chunk, num_drafts, change, check_drafts)


@pytest.mark.parametrize(
    ("pair", "way", "numerics", "chunk", "num_drafts"), pairwise(PAIRS, list(WAYS), NUMERICS, CHUNKS, NUM_DRAFTS)
)
def test_draft_models(pair: tuple[str, str], way: str, numerics: str, chunk: int, num_drafts: int) -> None:
    target, drafting = pair
    change = partial(with_pair, target=target, numerics=numerics, drafting=str(GOLDEN / drafting))
    check_speculation(way, *plain_texts(target, numerics), "draft_model", chunk, num_drafts, change, check_drafts)


@pytest.mark.parametrize("chunk", [2048, 7])
@pytest.mark.parametrize("model", TARGETS)
def test_a_latent_model_drafts_its_own_greedy_text_without_an_error(model: str, chunk: int) -> None:
    requests, plain = plain_texts(model, "float32")
    greedy = [request for request in requests if request.params == replace(VARIANTS[0], max_tokens=30, ignore_eos=True)]
    cfg = config("draft_model", 3, chunk, prefix_caching=True)
    engine = build(with_pair(cfg, model, "float32", str(GOLDEN / model)))
    for _ in range(2):
        assert run_all(engine, greedy) == {key: plain[key] for key in ((request.request_id, 0) for request in greedy)}
    stats = engine.stats()
    assert stats.num_prefix_hit_tokens > 0
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("target", "method", "chunk"),
    [
        *(("latent/glm4_moe_lite", method, 7) for method in HEADS),
        ("latent/deepseek_v3", "draft_model", 16),
        ("qwen3", "draft_model", 1),
    ],
)
def test_texts_move_between_engines_at_any_step(target: str, method: str, chunk: int, tmp_path: Path) -> None:
    pairs = dict(PAIRS)
    drafting = GOLDEN / pairs[target] if method == "draft_model" else head_of(method, target, tmp_path / "head")
    change = partial(with_pair, target=target, numerics="bfloat16", drafting=str(drafting))
    requests, plain = plain_texts(target, "bfloat16")
    pair = make_pair(plain, method, method, chunk, change=change)
    assert run_moving(pair, requests, random.Random(1)) == plain
    assert pair.importing.num_imported_blocks > 0
    assert pair.second.stats().num_draft_tokens > 0
