# SPDX-License-Identifier: Apache-2.0
"""`--max-model-len`: sizes with units, its default, and the model's limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.args import engine_config_from_kwargs, parse_serve_args
from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.model_config import ContextLength, ModelConfig, parse_model_config
from fastdeploy.core.errors import ConfigError
from fastdeploy.engine.description import context_notes
from fastdeploy.engine.engine_factory import make_engine

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


@pytest.mark.parametrize(("limit", "expected"), [(4096, 2048), (2048, 2048), (96, 96)])
def test_default_is_2048_or_the_models_limit(limit: int, expected: int) -> None:
    assert parse_serve_args(["demo"]).engine.max_model_len is None
    assert model(limit).choose_max_model_len(None) == expected


@pytest.mark.parametrize(
    ("keys", "limit"),
    [
        ({}, 1024),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 2048),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 4096),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}, 4096),
    ],
)
def test_limit_includes_the_scaling_of_positions(keys: dict[str, Any], limit: int) -> None:
    config = model(1024, **keys)
    assert config.choose_max_model_len(limit) == limit
    assert config.choose_max_model_len("auto") == limit
    with pytest.raises(
        ConfigError, match=rf"^max_model_len: {limit + 1} is more than the model's limit of {limit} tok"
    ):
        config.choose_max_model_len(limit + 1)


def test_auto_and_the_default_stay_within_a_sliding_window() -> None:
    sliding = {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 1, "max_window_layers": 0}
    config = model(4096, sliding_window=512, use_sliding_window=True, **sliding)
    assert [config.choose_max_model_len(requested) for requested in ("auto", None)] == [512, 512]
    with pytest.raises(ConfigError, match=r"^sliding_window: .* with --max-model-len 512 or less, got 513$"):
        config.choose_max_model_len(513)


@pytest.mark.parametrize(
    ("requested", "num_cache_tokens", "note"),
    [
        (4096, 4096, ""),
        (None, 4096, ""),
        (
            4096,
            4095,
            "the KV cache is smaller than the context of 4096 tokens: requests are limited to 4095 tokens "
            "(--kv-cache-memory)",
        ),
        ("auto", 4096, "max_model_len auto is 4096 tokens, the model's limit"),
        ("auto", 640, "max_model_len auto is 640 tokens, what the KV cache holds; the model's limit is 4096"),
    ],
)
def test_a_start_says_what_auto_is_and_that_the_cache_is_smaller(
    requested: ContextLength, num_cache_tokens: int, note: str
) -> None:
    assert context_notes(requested, 4096, num_cache_tokens) == ([note] if note else [])


def test_engine_takes_what_the_cache_holds_and_describes_it() -> None:
    scheduler, cache = SchedulerConfig(max_num_seqs=2), CacheConfig(num_blocks=3)
    engine = make_engine(EngineConfig("demo", max_model_len="auto", scheduler=scheduler, cache=cache))
    assert (engine.max_model_len, engine.describe()["max_model_len"]) == (192, 192)
    assert engine.describe()["notes"] == [
        "max_model_len auto is 192 tokens, what the KV cache holds; the model's limit is 2048"
    ]


def test_a_step_must_hold_the_whole_default_context_without_chunked_prefill() -> None:
    scheduler = SchedulerConfig(max_num_batched_tokens=1024, enable_chunked_prefill=False)
    with pytest.raises(ConfigError, match=r"^max_num_batched_tokens: expected at least max_model_len 2048 without"):
        make_engine(EngineConfig("demo", scheduler=scheduler))
