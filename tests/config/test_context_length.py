# SPDX-License-Identifier: Apache-2.0
"""`--max-model-len`: sizes with units, its default, and the model's limit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy.config.args import engine_config_from_kwargs, parse_serve_args
from fastdeploy.config.context_limit import ContextLength, ContextLimit
from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.model_config import ModelConfig, parse_model_config
from fastdeploy.core.errors import ConfigError
from fastdeploy.engine import memory_plan
from fastdeploy.engine.description import context_notes
from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.layers.rotary import rotary_table

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 512,
}


def model(max_position_embeddings: int, **keys: Any) -> ModelConfig:
    return parse_model_config({**LLAMA, "max_position_embeddings": max_position_embeddings, **keys}, {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("8k", 8000),
        ("8K", 8192),
        ("25.6k", 25600),
        ("1m", 1_000_000),
        ("1M", 2**20),
        ("auto", "auto"),
        ("-1", "auto"),
    ],
)
def test_small_letters_are_thousands_and_capital_ones_powers_of_two(
    text: str, expected: int | str, tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"max_model_len: {text}\n")
    assert parse_serve_args(["demo", "--max-model-len", text]).engine.max_model_len == expected
    assert parse_serve_args(["demo", "--config", str(file)]).engine.max_model_len == expected
    assert engine_config_from_kwargs({"model": "demo", "max_model_len": text})[0].max_model_len == expected


def test_steps_take_the_same_units() -> None:
    args = parse_serve_args(["demo", "--max-num-batched-tokens", "4K"])
    assert args.engine.scheduler.max_num_batched_tokens == 4096


@pytest.mark.parametrize("text", ["8kb", "1.0001k", "1.5", "k", "-2k", "Auto", "8 k"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--max-model-len: expected auto, or a number of tokens such as 4096, 8k"):
        parse_serve_args(["demo", f"--max-model-len={text}"])


@pytest.mark.parametrize("limit", [131072, 32768, 2048, 96])
def test_the_default_is_the_models_context(limit: int) -> None:
    engine = parse_serve_args(["demo"]).engine
    assert engine.max_model_len == "auto"
    assert engine.choose_context(model(limit)) == ContextLimit(limit)


def test_the_context_of_the_demonstration_model_is_2048() -> None:
    config = ModelConfig.from_pretrained(resolve_model_path("demo"))
    assert EngineConfig("demo").choose_context(config).num_tokens == 2048


@pytest.mark.parametrize(
    ("keys", "limit", "default"),
    [
        ({}, 1024, 1024),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 2048, 2048),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 4096, 1024),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}, 4096, 4096),
    ],
)
def test_limit_includes_the_scaling_of_positions(keys: dict[str, Any], limit: int, default: int) -> None:
    config = model(1024, **keys)
    assert config.choose_max_model_len(limit) == limit
    assert config.choose_max_model_len("auto") == default
    with pytest.raises(
        ConfigError, match=rf"^max_model_len: {limit + 1} is more than the model's limit of {limit} tok"
    ):
        config.choose_max_model_len(limit + 1)


@pytest.mark.parametrize("keys", [{}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}])
def test_positions_of_the_default_context_are_those_of_any_shorter_one(keys: dict[str, Any]) -> None:
    rope = model(1024, **keys).rope
    assert np.array_equal(rotary_table(rope, rope.max_context_len)[:64], rotary_table(rope, 64))


def test_dynamic_positions_differ_beyond_the_default_context_only() -> None:
    config = model(1024, rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    default = config.default_context
    assert default == (1024, "with more, RoPE type dynamic computes short texts in another way")
    short = rotary_table(config.rope, 64)
    assert np.array_equal(rotary_table(config.rope, default.num_tokens)[:64], short)
    assert not np.array_equal(rotary_table(config.rope, default.num_tokens + 1)[:64], short)


def test_the_default_stays_within_a_sliding_window() -> None:
    sliding = {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 1, "max_window_layers": 0}
    config = model(4096, sliding_window=512, use_sliding_window=True, **sliding)
    assert config.default_context == ContextLimit(512, "the sliding window")
    assert EngineConfig("m").choose_context(config) == config.default_context
    with pytest.raises(ConfigError, match=r"^sliding_window: .* with --max-model-len 512 or less, got 513$"):
        config.choose_max_model_len(513)


@pytest.mark.parametrize(
    ("requested", "context", "num_cache_tokens", "note"),
    [
        (4096, ContextLimit(4096, "--max-model-len"), 4096, ""),
        (4096, ContextLimit(4096, "--max-model-len"), 10**6, ""),
        (
            4096,
            ContextLimit(4096, "--max-model-len"),
            4095,
            "the KV cache is smaller than the context of 4096 tokens: requests are limited to 4095 tokens "
            "(--kv-cache-memory)",
        ),
        ("auto", ContextLimit(8192), 8192, ""),
        ("auto", ContextLimit(8192), 640, "context 640 of the model's 8192: what the KV cache holds"),
        ("auto", ContextLimit(512, "the draft model"), 640, "context 512 of the model's 8192: the draft model"),
        ("auto", ContextLimit(768, "the draft model"), 640, "context 640 of the model's 8192: what the KV cache holds"),
    ],
)
def test_a_start_says_what_makes_the_context_shorter_and_that_the_cache_is_smaller(
    requested: ContextLength, context: ContextLimit, num_cache_tokens: int, note: str
) -> None:
    assert context_notes(requested, context, 8192, num_cache_tokens) == ([note] if note else [])


def test_engine_takes_what_the_cache_holds_and_describes_it() -> None:
    scheduler, cache = SchedulerConfig(max_num_seqs=2), CacheConfig(num_blocks=3)
    engine = make_engine(EngineConfig("demo", max_model_len="auto", scheduler=scheduler, cache=cache))
    assert (engine.max_model_len, engine.describe()["max_model_len"]) == (192, 192)
    assert engine.describe()["model_context"] == 2048
    assert engine.describe()["notes"] == ["context 192 of the model's 2048: what the KV cache holds"]


def test_without_chunked_prefill_the_default_context_is_what_a_step_holds() -> None:
    scheduler = SchedulerConfig(max_num_batched_tokens=1024, enable_chunked_prefill=False)
    engine = make_engine(EngineConfig("demo", scheduler=scheduler))
    assert engine.max_model_len == 1024
    assert engine.describe()["notes"] == [
        "context 1024 of the model's 2048: --max-num-batched-tokens, without chunked prefill"
    ]
    with pytest.raises(ConfigError, match=r"^max_num_batched_tokens: expected at least max_model_len 1025 without"):
        EngineConfig("demo", max_model_len=1025, scheduler=scheduler)


def with_draft_model(tmp_path: Path, max_model_len: ContextLength, **keys: Any) -> EngineConfig:
    """Return a configuration with the demonstration's draft model, whose config.json has other values for some keys."""
    draft = tmp_path / "draft"
    shutil.copytree(resolve_model_path("demo/draft"), draft)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, **keys}))
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    arguments = {"model": "demo", "max_model_len": max_model_len, "speculative_config": speculation}
    return engine_config_from_kwargs({**arguments, "num_gpu_blocks_override": 16})[0]


@pytest.mark.parametrize(
    ("keys", "context"),
    [
        ({"max_position_embeddings": 300}, 300),
        ({"max_position_embeddings": 256, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 256),
        ({"max_position_embeddings": 256, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 512),
    ],
)
def test_a_draft_model_shortens_the_default_context_and_refuses_a_longer_one(
    keys: dict[str, Any], context: int, tmp_path: Path
) -> None:
    engine = make_engine(with_draft_model(tmp_path, "auto", **keys))
    assert engine.max_model_len == context
    assert engine.describe()["notes"] == [f"context {context} of the model's 2048: the draft model"]
    shutil.rmtree(tmp_path / "draft")
    with pytest.raises(ConfigError, match=r"^speculative_config.model: .* has a context of .* lower --max-model-len"):
        make_engine(with_draft_model(tmp_path, 1024, **keys))


@pytest.mark.parametrize(
    ("requested", "cache", "message"),
    [
        ("auto", {}, ""),
        (1024, {}, ""),
        (1024, {"num_blocks": 4}, ""),  # the same on every node with these flags
        ("auto", {"num_blocks": 4}, "set it to 256 or less on each of them (what the KV cache holds; without this"),
    ],
)
def test_the_context_of_a_node_among_others_is_the_models_or_what_a_flag_says(
    requested: ContextLength, cache: dict[str, int], message: str
) -> None:
    config = EngineConfig("demo", max_model_len=requested, cache=CacheConfig(**cache), is_clustered=True)
    if not message:
        make_engine(config)
        return
    with pytest.raises(ConfigError, match=r"^max_model_len: nodes of a cluster need a common context: ") as caught:
        make_engine(config)
    assert message in str(caught.value)


def test_the_free_memory_of_a_node_among_others_does_not_decide_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "free_memory_bytes", lambda *_: 20 * 458752)
    with pytest.raises(ConfigError, match=r"set it to 640 or less on each of them .*it is 1024\)$"):
        make_engine(EngineConfig("demo", max_model_len=1024, is_clustered=True))
    assert make_engine(EngineConfig("demo", max_model_len=1024)).max_model_len == 640


def test_a_draft_model_of_a_node_among_others_does_not_shorten_its_context(tmp_path: Path) -> None:
    config = with_draft_model(tmp_path, "auto", max_position_embeddings=300)
    with pytest.raises(ConfigError, match=r"^max_model_len: .* set it to 300 or less .*\(the draft model; .* 2048\)$"):
        make_engine(replace(config, is_clustered=True))
