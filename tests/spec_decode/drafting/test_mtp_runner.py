# SPDX-License-Identifier: Apache-2.0
"""Acceptance, memory and checkpoints of layers for multi-token prediction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastdeploy.config.engine_config import CacheConfig, EngineConfig
from fastdeploy.config.speculative_config import MTPConfig, NaiveConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.request import GenerationRequest
from fastdeploy.engine import engine_factory
from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.entrypoints.openai.startup_summary import summary_lines
from tests.exactness.requests import run_all
from tests.spec_decode.drafting.engines import eight_requests, engine_with, record_drafts


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    return eight_requests()


def test_acceptance_does_not_decay_over_a_long_output(requests: list[GenerationRequest]) -> None:
    engine = engine_with("mtp", max_num_seqs=4)
    long = [replace(r, params=replace(r.params, max_tokens=400)) for r in requests if r.params.is_greedy]
    drafts = record_drafts(engine)
    texts = run_all(engine, long)
    shares = []
    for low, high in ((100, 250), (250, 400)):
        right = total = 0
        for request in long:
            whole = (*request.prompt_token_ids, *texts[request.request_id, 0].token_ids)
            for (context, _), draft in drafts.items():
                if context == whole[: len(context)] and low <= len(context) < high and draft:
                    total += 1
                    right += draft[0] == whole[len(context)]
        shares.append(right / total)
    assert min(shares) > 0.85


def test_memory_plan_includes_the_layer_and_the_fingerprint_does_not() -> None:
    plain, drafted = (engine_with(method, cache_memory=1 << 22).describe() for method in ("naive", "mtp"))
    assert plain["fingerprint"] == drafted["fingerprint"]
    layer_block = 2 * 2 * 64 * 2 * 16
    assert plain["kv_cache"]["num_blocks"] == (1 << 22) // (14 * layer_block)
    assert drafted["kv_cache"]["num_blocks"] == ((1 << 22) - 8 * layer_block) // (15 * layer_block + 16 * 256 * 2)
    assert drafted["kv_cache"]["bytes"] <= 1 << 22


@pytest.mark.parametrize(
    ("quantization", "head", "heads_bytes", "shown"),
    [
        (None, "w4a8", 606_208, "head w4a8 592 KiB"),
        ({"head": "none"}, "none", 0, "the model's head"),
        ({"mlp": "wint4", "head": "wint8"}, "wint8", 1_064_960, "head wint8 1 MiB"),
    ],
    ids=str,
)
def test_drafts_are_sampled_with_a_head_of_four_bits_by_default(
    requests: list[GenerationRequest], quantization: dict[str, str] | None, head: str, heads_bytes: int, shown: str
) -> None:
    given = {"method": "mtp", "num_speculative_tokens": 3, "quantization": quantization, "adaptive": False}
    config = EngineConfig(
        model="demo",
        max_model_len=256,
        speculative=parse_speculative_config(given),
        cache=CacheConfig(num_blocks=64),
    )
    engine = make_engine(config)
    layers = engine.describe()["speculation"]["mtp"]
    assert (layers["head"], layers["heads_bytes"], layers["num_layers"]) == (head, heads_bytes, 1)
    assert any(f", {shown})" in line for line in summary_lines(engine.describe(), ()))
    greedy = [r for r in requests if r.params.is_greedy]
    plain = make_engine(replace(config, speculative=NaiveConfig()))
    assert run_all(engine, greedy) == run_all(plain, greedy)
    stats = engine.stats()
    assert stats.num_accepted_tokens > 0.7 * stats.num_draft_tokens > 100


def test_layers_are_loaded_before_memory_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def record(name: str) -> None:
        function = getattr(engine_factory, name)

        def recorded(*args: Any) -> Any:
            order.append(name)
            return function(*args)

        monkeypatch.setattr(engine_factory, name, recorded)

    for name in ("plan_memory", "load_drafting_model"):
        record(name)
    engine_with("mtp")
    assert order == ["load_drafting_model", "plan_memory"]


def test_checkpoint_without_the_layer_is_refused() -> None:
    config = engine_config_of("tests/golden/ernie4_5")
    with pytest.raises(ConfigError, match="contains no layer for multi-token prediction"):
        make_engine(config)


def engine_config_of(model: str) -> EngineConfig:
    speculative = MTPConfig(adaptive=False)
    return EngineConfig(model=model, max_model_len=32, speculative=speculative)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"suffix_decoding_max_tree_depth": 64}, "mtp with suffix ("),
        ({"mtp_strategy": "with_ngram", "num_model_steps": 2}, "mtp with ngram ("),
        ({}, "mtp ("),
    ],
    ids=str,
)
def test_summary_names_the_method_that_extends_the_layers_drafts(given: dict[str, Any], shown: str) -> None:
    speculative = parse_speculative_config({"method": "mtp", "num_speculative_tokens": 4, **given})
    engine = make_engine(EngineConfig(model="demo", max_model_len=32, speculative=speculative))
    [line] = [line for line in summary_lines(engine.describe(), ()) if "speculation" in line]
    of_layer = f", {given.get('num_model_steps', 1)} of them by the MTP layer" if given else ""
    assert shown in line
    assert f"up to 4 drafts{of_layer}, verify topp" in line


def test_suffix_decoding_drafts_alone_if_the_checkpoint_has_no_layer(caplog: pytest.LogCaptureFixture) -> None:
    given = {"method": "mtp", "num_speculative_tokens": 4, "suffix_decoding_max_tree_depth": 64}
    config = EngineConfig(model="tests/golden/ernie4_5", max_model_len=32, speculative=parse_speculative_config(given))
    with caplog.at_level("WARNING"):
        assert make_engine(config).describe()["speculation"]["method"] == "suffix"
    assert "has no layer for multi-token prediction; suffix decoding is used alone" in caplog.text
