# SPDX-License-Identifier: Apache-2.0
"""An engine refuses in one line what is wrong with a model with latent attention, or with a drafting model like it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.paddle import load_file, save_file

from fastdeploy.config.engine_config import CacheConfig, EngineConfig
from fastdeploy.config.speculative_config import AnySpeculativeConfig, NaiveConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.errors import ConfigError
from fastdeploy.engine.engine_factory import make_engine
from tests.latent_model import save_latent_model
from tests.models.mtp_training import Tensors

UP = "self_attn.kv_b_proj.weight"
INT8 = "kv_cache_dtype: int8 is not supported yet with the latent attention of DeepseekV3ForCausalLM; leave it at auto"
MTP = parse_speculative_config({"method": "mtp", "num_speculative_tokens": 1})


def drop(tensors: Tensors) -> None:
    del tensors[f"model.layers.1.{UP}"]


def drop_from_mtp_layer(tensors: Tensors) -> None:
    del tensors[f"model.layers.2.{UP}"]


def cut(tensors: Tensors) -> None:
    tensors[f"model.layers.0.{UP}"] = tensors[f"model.layers.0.{UP}"][8:].clone()


def add_bias(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.kv_b_proj.bias"] = tensors[f"model.layers.0.{UP}"][:, 0].clone()


def refusal(model: str, speculative: AnySpeculativeConfig, cache_dtype: str = "auto") -> str:
    cache = CacheConfig(dtype=cache_dtype, num_blocks=8)
    with pytest.raises(ConfigError) as caught:
        make_engine(EngineConfig(model=model, max_model_len=64, cache=cache, speculative=speculative))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "speculative", "message"),
    [
        (drop, NaiveConfig(), f"tensors do not match config.json: 1 missing (model.layers.1.{UP})"),
        (cut, NaiveConfig(), f"1 of wrong shape (model.layers.0.{UP} is [120, 32], expected [128, 32])"),
        (add_bias, NaiveConfig(), "1 unexpected (model.layers.0.self_attn.kv_b_proj.bias)"),
        (drop_from_mtp_layer, MTP, f"1 missing (model.layers.2.{UP})"),
    ],
)
def test_tensors_are_named(
    tmp_path: Path, change: Callable[[Tensors], None], speculative: AnySpeculativeConfig, message: str
) -> None:
    file = save_latent_model(tmp_path, has_mtp_layer=True) / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    found = refusal(str(tmp_path), speculative)
    assert found.startswith("model: " if speculative is not MTP else "speculative_config.model: ")
    assert message in found


@pytest.mark.parametrize("has_latent_draft", [False, True])
def test_a_cache_in_eight_bits_is_refused_for_target_and_draft_model(tmp_path: Path, has_latent_draft: bool) -> None:
    latent = str(save_latent_model(tmp_path))
    target, draft = ("demo", latent) if has_latent_draft else (latent, "demo/draft")
    keys = {"method": "draft_model", "model": draft, "num_speculative_tokens": 1}
    found = refusal(target, parse_speculative_config(keys), "int8")
    assert found == (f"speculative_config.model: {INT8}" if has_latent_draft else INT8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 1032}, "kv_lora_rank: {}/config.json: expected a multiple of 8 in [8, 1024], got 1032"),
        ({"index_topk": 8}, "architectures: {}/config.json: 'DeepseekV3ForCausalLM' needs latent attention with an"),
        (
            {"architectures": ["KimiK2ForCausalLM"], "model_type": "kimi_k2"},
            "architectures: {}/config.json: 'KimiK2ForCausalLM' of model_type 'kimi_k2' needs a tokenizer other",
        ),
        (
            {"architectures": ["DeepseekV32ForCausalLM"]},
            "architectures: {}/config.json: 'DeepseekV32ForCausalLM' needs latent attention with an indexer",
        ),
        (
            {"architectures": ["GlmMoeDsaForCausalLM"]},
            "architectures: {}/config.json: 'GlmMoeDsaForCausalLM' needs latent attention with an indexer",
        ),
    ],
)
def test_keys_are_named_with_the_file(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config = save_latent_model(tmp_path) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    assert refusal(str(tmp_path), NaiveConfig()).startswith(message.format(tmp_path))
