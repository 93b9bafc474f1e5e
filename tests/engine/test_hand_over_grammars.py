# SPDX-License-Identifier: Apache-2.0
"""Texts with grammars, tool calls and budgets of reasoning go on on another engine as if nothing had happened."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.detokenize.tokenizer import Tokenizer
from tests.engine.hand_over import Pair, make_pair, run_moving
from tests.exactness.engines import Texts, build
from tests.exactness.requests import run_alone
from tests.exactness.test_grammars import make_grammar_requests, thinking
from tests.thinking_model import save_thinking_model

PAIRS = [("naive", "ngram"), ("mtp", "with_suffix"), ("suffix", "mtp"), ("with_ngram", "oracle")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_thinking_model(tmp_path_factory.mktemp("thinking"))


@pytest.fixture(scope="module")
def requests(folder: Path) -> list[GenerationRequest]:
    return make_grammar_requests(Tokenizer.from_pretrained(folder))


@pytest.fixture(scope="module")
def plain(folder: Path, requests: list[GenerationRequest]) -> Texts:
    return run_alone(build(thinking(folder)), requests)


def thinking_pair(folder: Path, plain: Texts, prefill: str, decode: str, chunk: int = 7) -> Pair:
    def change(cfg: EngineConfig) -> EngineConfig:
        return replace(cfg, model=str(folder), reasoning_parser="qwen3")

    return make_pair(plain, prefill, decode, chunk, change=change)


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_a_prompt_computed_elsewhere_gives_the_same_constrained_text(
    folder: Path, requests: list[GenerationRequest], plain: Texts, prefill: str, decode: str
) -> None:
    pair = thinking_pair(folder, plain, prefill, decode)
    for request in requests:
        pair.add(request)
    assert pair.texts() == plain
    assert len(pair.handovers) == len(requests)
    assert pair.importing.num_imported_blocks > 0


@pytest.mark.parametrize("seed", range(2))
def test_a_constrained_text_is_handed_over_at_any_step(
    folder: Path, requests: list[GenerationRequest], plain: Texts, seed: int
) -> None:
    pair = thinking_pair(folder, plain, *PAIRS[seed % len(PAIRS)], chunk=64)
    assert run_moving(pair, requests, random.Random(seed)) == plain
    assert len(pair.handovers) > 3
    assert pair.importing.num_imported_blocks > 0


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2, 40))
def test_constrained_texts_are_handed_over_at_any_step(
    folder: Path, requests: list[GenerationRequest], plain: Texts, seed: int
) -> None:
    test_a_constrained_text_is_handed_over_at_any_step(folder, requests, plain, seed)
