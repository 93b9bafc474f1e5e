# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with latent attention in many forms, with weights from a seed, for tests and make_golden_latent.py.

They are made with NumPy only, so that the tests and the reference environment make the same folders.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from tests.models.seeded_folders import Array, write_file

TOKENS = [5, 17, 3, 41, 8, 29, 29, 12, 0, 33, 7, 20, 61, 2, 50, 9]
ROWS = (0, 7, 15)
SEED = 7  # with which no row is near a tie
VOCAB, HIDDEN, WIDTH, EXPERT_WIDTH = 64, 32, 40, 24
_BASE: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": WIDTH, "moe_intermediate_size": EXPERT_WIDTH},
    **{"num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 4},
    **{"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "routed_scaling_factor": 1.5},
    **{"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5, "rope_theta": 100.0, "max_position_embeddings": 64},
    **{"hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "bfloat16"},
}
_SIGMOID = {"topk_method": "noaux_tc", "norm_topk_prob": True}
_FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {"model_type": "deepseek_v2", "topk_method": "greedy", "norm_topk_prob": False},
    "DeepseekV3ForCausalLM": {"model_type": "deepseek_v3", "scoring_func": "sigmoid", **_SIGMOID},
    "Glm4MoeLiteForCausalLM": {"model_type": "glm4_moe_lite", **_SIGMOID},
}
V2, V3, GLM = _FAMILIES


def _heads(count: int) -> dict[str, int]:
    return {"num_attention_heads": count, "num_key_value_heads": count}


def _sizes(q_lora: int | None, kv_lora: int, nope: int, rotary: int, value: int) -> dict[str, int | None]:
    return {
        **{"q_lora_rank": q_lora, "kv_lora_rank": kv_lora, "v_head_dim": value},
        **{"qk_nope_head_dim": nope, "qk_rope_head_dim": rotary},
    }


def _groups(experts: int, chosen: int, count: int, kept: int) -> dict[str, int]:
    return {"n_routed_experts": experts, "num_experts_per_tok": chosen, "n_group": count, "topk_group": kept}


def _yarn(factor: float, original: int, **mscales: float) -> dict[str, Any]:
    scaling = {"type": "yarn", "factor": factor, "original_max_position_embeddings": original, **mscales}
    return {
        "rope_scaling": {**scaling, "beta_fast": 32, "beta_slow": 1},
        "max_position_embeddings": int(factor * original),
    }


FORMS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "smallest sizes, one head": (V3, {**_sizes(8, 8, 8, 8, 8), **_heads(1)}),
    "largest sizes": (V2, {**_sizes(None, 1024, 256, 256, 256), **_heads(2)}),
    "three heads, values wider than keys": (GLM, {**_sizes(40, 56, 24, 16, 72), **_heads(3)}),
    "sixteen heads": (V2, {**_sizes(72, 64, 8, 24, 8), **_heads(16)}),
    "biases without query rank": (GLM, {"q_lora_rank": None, "attention_bias": True}),
    "biases in V2": (V2, {"attention_bias": True}),
    "halves": (V3, {"rope_interleave": False, "qk_rope_head_dim": 24}),
    "halves in GLM": (GLM, {"rope_interleave": False, "attention_bias": True}),
    "yarn of V2": (V2, _yarn(40.0, 16, mscale=0.707, mscale_all_dim=0.707)),
    "yarn of V3": (V3, _yarn(40.0, 16, mscale=1.0, mscale_all_dim=1.0)),
    "yarn without magnitudes": (V3, _yarn(4.0, 16)),
    "yarn without the magnitude of all dimensions": (GLM, _yarn(8.0, 16, mscale=0.8, mscale_all_dim=0.0)),
    "yarn with two magnitudes": (V3, _yarn(8.0, 32, mscale=0.5, mscale_all_dim=1.2)),
    "groups of V2": (
        V2,
        {**_groups(16, 3, 4, 2), "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
    ),
    "groups of V3": (V3, {**_groups(16, 4, 4, 2), "routed_scaling_factor": 2.5}),
    "one group of eight": (V3, _groups(32, 2, 8, 1)),
    "weights that are not normalized": (GLM, {"norm_topk_prob": False}),
    "all layers sparse, three shared experts": (V3, {"first_k_dense_replace": 0, "n_shared_experts": 3}),
    "all experts chosen": (V2, {"n_routed_experts": 3, "num_experts_per_tok": 3}),
}
"""Architecture and changes of its configuration, by the name of the form."""


def config_of(form: str) -> dict[str, Any]:
    architecture, changes = FORMS[form]
    return {**_BASE, **_FAMILIES[architecture], **changes, "architectures": [architecture]}


def write_form(folder: Path, form: str, **changes: Any) -> Path:
    """Write a checkpoint in bfloat16 with weights under which every part counts; `changes` are of its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**config_of(form), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    write_file(
        folder / "model.safetensors",
        {
            name: ("F32" if "e_score" in name else "BF16", _values(name, shape, config))
            for name, shape in _shapes(config)
        },
    )
    return folder


def _values(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> Array:
    noise = np.random.default_rng([SEED, crc32(name.encode())]).standard_normal(shape)
    if "norm" in name:
        noise = (0.3 if name == "model.norm.weight" else 1.0) + 0.1 * noise
    elif len(shape) == 1:
        noise *= 0.3 if "bias" in name else 1.0
    else:
        noise *= (1.5 if ".gate." in name else 0.5 if "o_proj" in name else 1.0) * shape[-1] ** -0.5
    if "_a_proj" in name:  # what a norm follows is small, so that its epsilon counts
        noise[: config["kv_lora_rank"] if "kv_a" in name else None] *= 2.0**-7
    return noise


def _shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    vocab = config["vocab_size"]
    yield from (("model.embed_tokens.weight", (vocab, HIDDEN)), ("lm_head.weight", (vocab, HIDDEN)))
    yield "model.norm.weight", (HIDDEN,)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", (HIDDEN,)
        yield from _attention(f"{prefix}self_attn.", config)
        if layer < config["first_k_dense_replace"]:
            yield from _mlp(f"{prefix}mlp.", WIDTH)
        else:
            yield from _experts(f"{prefix}mlp.", config)


def _attention(prefix: str, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    heads, nope, value = config["num_attention_heads"], config["qk_nope_head_dim"], config["v_head_dim"]
    q_lora, kv_lora, rotary = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    linears = {
        "kv_a_proj_with_mqa": (kv_lora + rotary, HIDDEN),
        "kv_b_proj": (heads * (nope + value), kv_lora),
        "o_proj": (HIDDEN, heads * value),
    }
    norms = {"kv_a_layernorm": kv_lora}
    if q_lora is None:
        linears["q_proj"] = (heads * (nope + rotary), HIDDEN)
    else:
        linears |= {"q_a_proj": (q_lora, HIDDEN), "q_b_proj": (heads * (nope + rotary), q_lora)}
        norms["q_a_layernorm"] = q_lora
    for name, shape in linears.items():
        yield f"{prefix}{name}.weight", shape
        if config["attention_bias"] and name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"):
            yield f"{prefix}{name}.bias", shape[:1]
    for name, size in norms.items():
        yield f"{prefix}{name}.weight", (size,)


def _experts(prefix: str, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    count = config["n_routed_experts"]
    yield f"{prefix}gate.weight", (count, HIDDEN)
    if config["model_type"] != "deepseek_v2":
        yield f"{prefix}gate.e_score_correction_bias", (count,)
    for expert in range(count):
        yield from _mlp(f"{prefix}experts.{expert}.", EXPERT_WIDTH)
    yield from _mlp(f"{prefix}shared_experts.", EXPERT_WIDTH * config["n_shared_experts"])


def _mlp(prefix: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}gate_proj.weight", (width, HIDDEN)
    yield f"{prefix}up_proj.weight", (width, HIDDEN)
    yield f"{prefix}down_proj.weight", (HIDDEN, width)
