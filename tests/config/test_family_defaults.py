# SPDX-License-Identifier: Apache-2.0
"""Keys of config.json that are left out, null or spelled twice mean what transformers takes (tests/golden)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from fastdeploy.config.family_defaults import NULL_VALUES, TRANSFORMERS
from fastdeploy.config.model_config import ModelConfig, parse_model_config
from fastdeploy.core.errors import ConfigError
from fastdeploy.layers.rotary import inverse_frequencies
from fastdeploy.models.registry import find_architecture
from tests.models.model_driver import GOLDEN

REFERENCE = json.loads((GOLDEN / "family_defaults.json").read_text())
FAMILIES, PAIRS = REFERENCE["families"], REFERENCE["pairs"]
SIZES = {
    *("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_num_experts", "moe_k", "n_routed_experts"),
}
"""Keys without a default here: config.json is refused by their name."""

NEEDED = {"DeepseekV2ForCausalLM": {"n_group", "topk_group"}}  # with topk_method group_limited_greedy


def describe(config: ModelConfig) -> dict[str, Any]:
    """Return what scripts/make_family_defaults.py describes."""
    return {**(describe_heads(config) if config.latent is None else describe_latent(config)), **describe_rest(config)}


def describe_rest(config: ModelConfig) -> dict[str, Any]:
    return {
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_theta": config.rope.theta,
        "rotary_dim": config.rope.rotary_dim,
        "dtype": config.dtype,
        "sliding_window": config.sliding_window,
        "experts": describe_experts(config),
    }


def describe_latent(config: ModelConfig) -> dict[str, Any]:
    latent = config.latent
    assert latent is not None
    assert (config.num_kv_heads, config.head_dim) == (1, latent.kv_lora_rank + latent.rope_dim)
    names = ("kv_a_proj_with_mqa", "o_proj", *(("q_a_proj",) if latent.q_lora_rank else ()))
    return {
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "latent_norm_eps": latent.norm_eps,
        "scale": float(f"{latent.scale:.12g}"),
        "is_interleaved": latent.is_interleaved,
        "biases": [f"self_attn.{name}.bias" for name in names] if config.attention_bias else [],
        "qk_norm": False,
    }


def describe_heads(config: ModelConfig) -> dict[str, Any]:
    traits = find_architecture(config).traits(config)
    projections = [*"qkv" * traits.qkv_bias, *"o" * traits.output_bias]
    mlp = ("down", "gate", "up") if traits.mlp_bias else ()
    names = [*(f"mlp.{name}_proj.bias" for name in mlp), *(f"self_attn.{name}_proj.bias" for name in projections)]
    return {
        "head_dim": config.head_dim,
        "num_kv_heads": config.num_kv_heads,
        "biases": sorted(names),
        "qk_norm": traits.qk_norm,
    }


def describe_experts(config: ModelConfig) -> dict[str, Any] | None:
    if config.experts is None:
        return None
    experts, rule = config.experts, config.experts.rule
    return {
        "num_experts": experts.num_experts,
        "num_chosen": rule.num_chosen,
        "width": experts.width,
        "shared_width": experts.shared_width,
        "sparse_layers": list(experts.sparse_layers),
        "is_normalised": rule.normalisation != "none",
        "norm_min": rule.epsilon if rule.normalisation == "clamp" else None,
        "scale": rule.scale,
        "num_groups": rule.num_groups,
        "num_kept_groups": rule.num_kept_groups,
    }


def test_the_reference_covers_every_architecture() -> None:
    assert set(FAMILIES) == set(TRANSFORMERS)
    for name, family in FAMILIES.items():
        config = parse_model_config(family["config"], {})
        assert describe(config) == family["whole"], name


@pytest.mark.parametrize(
    ("architecture", "key"), [(name, key) for name, family in FAMILIES.items() for key in family["keys"]]
)
def test_a_key_that_is_left_out_or_null_means_what_it_means_in_transformers(architecture: str, key: str) -> None:
    family = FAMILIES[architecture]
    absent = {name: value for name, value in family["config"].items() if name != key}
    for way, raw in (("absent", absent), ("null", {**absent, key: None})):
        expected = family["keys"][key][way]
        if expected is None and key in NULL_VALUES:
            continue  # transformers has no such model
        if expected is None:  # the same, and null means here what leaving the key out means
            expected = family["keys"][key]["absent"]
        try:
            found = describe(parse_model_config(raw, {}))
        except ConfigError as error:
            needed = SIZES | NEEDED.get(architecture, set())
            assert (key in needed and error.field == key) or (key, error.field) == ("n_group", "topk_group"), way
        else:
            assert found == {**family["whole"], **(expected or {})}, way


@pytest.mark.parametrize("index", range(len(PAIRS)))
def test_of_two_spellings_of_one_setting_that_of_transformers_counts(index: int) -> None:
    raw, expected = PAIRS[index]["config"], PAIRS[index]["expected"]
    if expected is None:
        with pytest.raises(ConfigError, match="rope_scaling"):
            parse_model_config(raw, {})
        return
    config = parse_model_config(raw, {})
    frequencies = np.array(expected.pop("inv_freq"))
    np.testing.assert_allclose(inverse_frequencies(config.rope, 8), frequencies, rtol=1e-6)
    assert config.rope.attention_factor == pytest.approx(expected.pop("attention_factor"))
    assert describe(config) == expected
