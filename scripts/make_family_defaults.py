# SPDX-License-Identifier: Apache-2.0
"""Write tests/golden/family_defaults.json: what `transformers` takes for each optional key of config.json.

Run in an environment with torch and transformers 5 (neither is needed to run the tests):

    python scripts/make_family_defaults.py

Each architecture has a complete config.json. One key at a time is left out, and is null, and a model without memory is
built. The file holds what describes that model, or null if transformers cannot build it.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

FILE = Path(__file__).resolve().parent.parent / "tests" / "golden" / "family_defaults.json"
BASE: dict[str, Any] = {
    "vocab_size": 112,
    "hidden_size": 1024,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 48,
    "max_position_embeddings": 77,
    "rms_norm_eps": 1e-3,
    "hidden_act": "silu",
    "rope_theta": 1234.0,
}
LATENT: dict[str, Any] = {
    **{key: value for key, value in BASE.items() if key != "head_dim"},
    **{"q_lora_rank": 24, "kv_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 48},
    **{"tie_word_embeddings": True, "attention_bias": True, "n_routed_experts": 32, "num_experts_per_tok": 2},
    **{"n_shared_experts": 3, "moe_intermediate_size": 24, "routed_scaling_factor": 3.5},
}
SLIDING = {"use_sliding_window": True, "sliding_window": 5}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        **{**BASE, **TIED, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    },
    "Qwen2ForCausalLM": {
        **{**BASE, **TIED, **SLIDING, "model_type": "qwen2", "max_window_layers": 2},
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "Qwen3ForCausalLM": {
        **{**BASE, **TIED, **SLIDING, "model_type": "qwen3", "max_window_layers": 2, "attention_bias": True},
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "Qwen3MoeForCausalLM": {
        **{**BASE, **TIED, **SLIDING, "model_type": "qwen3_moe", "attention_bias": True},
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
        **{"decoder_sparse_step": 2, "mlp_only_layers": [3]},
    },
    "Ernie4_5ForCausalLM": {**BASE, **UNTIED, "model_type": "ernie4_5", "use_bias": True},
    "Ernie4_5_MoeForCausalLM": {
        **{**BASE, **UNTIED, "model_type": "ernie4_5_moe", "use_bias": False},
        **{"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 1},
        **{"moe_layer_start_index": 2, "moe_layer_end_index": 2, "moe_layer_interval": 3, "moe_norm_min": 1e-3},
    },
    "Glm4MoeForCausalLM": {
        **{**BASE, **TIED, "model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": True},
        **{"partial_rotary_factor": 0.25, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2},
        **{"moe_intermediate_size": 24, "first_k_dense_replace": 2, "norm_topk_prob": False},
        **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    },
    "DeepseekV2ForCausalLM": {
        **{**LATENT, "model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "norm_topk_prob": False},
        **{"n_group": 4, "topk_group": 3, "first_k_dense_replace": 2, "scoring_func": "softmax"},
    },
    "DeepseekV3ForCausalLM": {
        **{**LATENT, "model_type": "deepseek_v3", "norm_topk_prob": False, "rope_interleave": False},
        **{"n_group": 4, "topk_group": 2, "first_k_dense_replace": 2, "scoring_func": "sigmoid"},
    },
    "Glm4MoeLiteForCausalLM": {
        **{**LATENT, "model_type": "glm4_moe_lite", "norm_topk_prob": False, "rope_interleave": False},
        **{"n_group": 4, "topk_group": 2, "mlp_layer_types": ["dense"] + ["sparse"] * 3, "topk_method": "noaux_tc"},
    },
}

SMALL: dict[str, Any] = {
    **{"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16},
}
HEADS = {"head_dim": "absent"}  # of latent attention, whose sizes are those of LATENT
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 2.0}
DEEPSEEK_YARN = {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}
V2, V3, LITE = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"
LLAMA, GLM, ERNIE, QWEN = "LlamaForCausalLM", "Glm4MoeForCausalLM", "Ernie4_5_MoeForCausalLM", "Qwen3MoeForCausalLM"
PAIRS: list[tuple[str, dict[str, Any]]] = [
    (LLAMA, {"rope_parameters": {**YARN, "rope_theta": 77.0}, "rope_scaling": LINEAR}),
    (LLAMA, {"rope_parameters": {**YARN, "rope_theta": 77.0}, "rope_scaling": LINEAR, "rope_theta": "absent"}),
    (LLAMA, {"rope_parameters": {**YARN, "rope_theta": 77.0}, "rope_scaling": {**LINEAR, "rope_theta": 99.0}}),
    (LLAMA, {"rope_parameters": {**YARN, "rope_theta": 77.0}, "rope_scaling": None}),
    (LLAMA, {"rope_parameters": {**YARN, "rope_theta": 77.0}, "rope_scaling": {}}),
    (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}),
    (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "rope_theta": "absent"}),
    (LLAMA, {"rope_parameters": {"rope_theta": 77.0}, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    (LLAMA, {"rope_parameters": None, "rope_scaling": LINEAR}),
    (LLAMA, {"rope_scaling": {**LINEAR, "type": "yarn"}}),
    (LLAMA, {"rope_scaling": {**LINEAR, "rope_theta": 99.0}}),
    (LLAMA, {"rope_scaling": YARN, "original_max_position_embeddings": 16}),
    (LLAMA, {"rope_scaling": {**YARN, "factor": None}}),
    (LLAMA, {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 32}}),
    (LLAMA, {"rope_scaling": {**YARN, "original_max_position_embeddings": "absent"}}),
    (LLAMA, {"rope_scaling": {**YARN, "truncate": None}}),
    (LLAMA, {"rope_scaling": {**YARN, "beta_fast": 0, "beta_slow": None}}),
    (LLAMA, {"rope_scaling": {**YARN, "attention_factor": 1.5, "mscale": 2.0, "mscale_all_dim": 1.0}}),
    (
        LLAMA,
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}, "original_max_position_embeddings": 8},
    ),
    (LLAMA, {"rope_scaling": LLAMA3}),
    (LLAMA, {"rope_scaling": {"rope_type": "linear"}}),
    (LLAMA, {"dtype": "bfloat16", "torch_dtype": "float32"}),
    (LLAMA, {"dtype": None, "torch_dtype": "bfloat16"}),
    (LLAMA, {"hidden_activation": "gelu"}),
    ("Qwen3ForCausalLM", {"layer_types": ["full_attention"] * 4, "max_window_layers": 0}),
    ("Qwen3ForCausalLM", {"layer_types": None, "max_window_layers": 4}),
    ("Qwen3ForCausalLM", {"layer_types": None, "max_window_layers": 3}),
    (GLM, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}}),
    (
        GLM,
        {
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0},
            "rope_scaling": {"type": "default"},
        },
    ),
    (GLM, {"rope_parameters": {"rope_type": "default"}, "partial_rotary_factor": "absent"}),
    (GLM, {"num_local_experts": 16}),
    (GLM, {"num_local_experts": 16, "n_routed_experts": "absent"}),
    (QWEN, {"num_local_experts": 4}),
    (QWEN, {"num_local_experts": 4, "num_experts": "absent"}),
    *((name, {**HEADS, "rope_scaling": DEEPSEEK_YARN}) for name in (V2, V3, LITE)),
    *((name, {**HEADS, "head_dim": 8, "rope_parameters": {**DEEPSEEK_YARN, "mscale": 1.0}}) for name in (V2, V3, LITE)),
    *((name, {**HEADS, "num_key_value_heads": 2}) for name in (V2, V3, LITE)),
    *((name, {**HEADS, "rope_scaling": {**DEEPSEEK_YARN, "mscale_all_dim": 0}}) for name in (V2, V3, LITE)),
    *((name, {**HEADS, "rope_scaling": {**DEEPSEEK_YARN, "mscale_all_dim": None}}) for name in (V2, V3, LITE)),
    *((name, {**HEADS, "rope_scaling": {**DEEPSEEK_YARN, "attention_factor": 1.5}}) for name in (V2, V3, LITE)),
    *((name, {**HEADS, "rope_scaling": {**DEEPSEEK_YARN, "factor": 1.0}}) for name in (V2, V3, LITE)),
    *((name, {**HEADS, "rope_scaling": {**LINEAR, "mscale_all_dim": 0.707}}) for name in (V2, V3, LITE)),
    *((name, {**HEADS, "rope_scaling": {"type": "default", "mscale_all_dim": 2.0}}) for name in (V2, V3, LITE)),
    (V2, {**HEADS, "q_lora_rank": None, "topk_method": "greedy", "rope_interleave": False}),
    (V2, {**HEADS, "num_experts": 16}),
    (V2, {**HEADS, "num_experts": 16, "n_routed_experts": "absent"}),
    (V3, {**HEADS, "num_local_experts": 16}),
    (V3, {**HEADS, "num_local_experts": 16, "n_routed_experts": "absent"}),
    (LITE, {**HEADS, "num_local_experts": 16}),
    (LITE, {**HEADS, "num_local_experts": 16, "n_routed_experts": "absent", "first_k_dense_replace": 1}),
    (ERNIE, {"num_experts": 4, "num_experts_per_tok": 2}),
    (ERNIE, {"num_experts": 4, "num_experts_per_tok": 2, "moe_num_experts": "absent", "moe_k": "absent"}),
]
"""Architecture, and keys beside those of CONFIGS and SMALL; values of "absent" leave a key out."""


def describe(model: PreTrainedModel) -> dict[str, Any]:
    """Return what distinguishes models of one family."""
    config, decoder = model.config, model.model
    shapes = {name: list(weight.shape) for name, weight in model.state_dict().items()}
    attention, rope = decoder.layers[0].self_attn, config.rope_parameters
    kinds = getattr(config, "layer_types", ["sliding_attention"])
    window = getattr(config, "sliding_window", None) if "sliding_attention" in kinds else None
    return {
        **(describe_latent(model) if hasattr(attention, "kv_lora_rank") else describe_heads(model)),
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": decoder.norm.variance_epsilon,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_theta": rope["rope_theta"],
        "rotary_dim": 2 * decoder.rotary_emb.inv_freq.shape[0],
        "dtype": str(config.dtype or torch.float32).removeprefix("torch."),
        "biases": [
            name.split(".", 3)[3] for name in sorted(shapes) if re.fullmatch(r"model\.layers\.0\..*\.bias", name)
        ],
        "qk_norm": "model.layers.0.self_attn.q_norm.weight" in shapes,
        "sliding_window": window,
        "experts": describe_experts(model),
    }


def describe_heads(model: PreTrainedModel) -> dict[str, Any]:
    """Return the sizes of grouped-query attention."""
    attention = model.model.layers[0].self_attn
    return {
        "head_dim": attention.head_dim,
        "num_kv_heads": attention.k_proj.weight.shape[0] // attention.head_dim,
    }


def describe_latent(model: PreTrainedModel) -> dict[str, Any]:
    """Return the sizes of latent attention."""
    attention, config = model.model.layers[0].self_attn, model.config
    return {
        "q_lora_rank": None if attention.q_proj is not None else attention.q_b_proj.weight.shape[1],
        "kv_lora_rank": attention.kv_b_proj.weight.shape[1],
        "qk_nope_head_dim": attention.qk_nope_head_dim,
        "qk_rope_head_dim": attention.kv_a_proj_with_mqa.weight.shape[0] - attention.kv_b_proj.weight.shape[1],
        "v_head_dim": attention.o_proj.weight.shape[1] // config.num_attention_heads,
        "latent_norm_eps": attention.kv_a_layernorm.variance_epsilon,
        "scale": float(f"{attention.scaling:.12g}"),
        "is_interleaved": config.model_type == "deepseek_v2" or bool(config.rope_interleave),
    }


def describe_experts(model: PreTrainedModel) -> dict[str, Any] | None:
    """Return the sizes and the rule of the experts; None for dense models."""
    config, blocks = model.config, [layer.mlp for layer in model.model.layers]
    sparse = [block for block in blocks if hasattr(block, "experts")]
    if not sparse:
        return None
    block = sparse[0]
    router = getattr(block, "gate", None) or block.router
    num_experts, width = block.experts.gate_up_proj.shape[0], block.experts.gate_up_proj.shape[1] // 2
    shared, has_groups = getattr(block, "shared_experts", None), getattr(router, "topk_method", "") != "greedy"
    keys = ("topk_method", "n_group", "topk_group") if has_groups else ()
    if any(getattr(config, key, "") is None for key in keys):
        raise ValueError("the router of this model fails when it is called")
    return {
        "num_experts": num_experts,
        "num_chosen": int(router.top_k),
        "width": width,
        "shared_width": 0 if shared is None else shared.gate_proj.weight.shape[0],
        "sparse_layers": [hasattr(block, "experts") for block in blocks],
        "is_normalised": bool(getattr(config, "norm_topk_prob", True)),
        "norm_min": float(config.moe_norm_min) if hasattr(config, "moe_norm_min") else None,
        "scale": getattr(config, "routed_scaling_factor", 1.0),
        "num_groups": getattr(config, "n_group", 1) if has_groups else 1,
        "num_kept_groups": getattr(config, "topk_group", 1) if has_groups else 1,
    }


def build(config: dict[str, Any], device: str = "meta") -> dict[str, Any] | None:
    """Return what describes the model of a config.json, or None if there is none.

    Args:
        device: only on `cpu` do frequencies have values.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Exception):
        (Path(folder) / "config.json").write_text(json.dumps(config))
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        found = describe(model)
        if device == "cpu":
            rotary = model.model.rotary_emb
            found |= {"inv_freq": rotary.inv_freq.tolist(), "attention_factor": float(rotary.attention_scaling)}
        return found
    return None


def change_one_key(config: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Return for each key what differs if it is left out, and if it is null."""
    return {
        key: {
            "absent": difference(whole, build({name: value for name, value in config.items() if name != key})),
            "null": difference(whole, build({**config, key: None})),
        }
        for key in config
        if key not in ("architectures", "model_type")
    }


def without_absent(value: Any) -> Any:
    """Return a JSON value without the keys whose value is "absent"."""
    if not isinstance(value, dict):
        return value
    return {key: without_absent(item) for key, item in value.items() if item != "absent"}


def difference(whole: dict[str, Any], other: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the values that differ from those of the complete config.json."""
    return None if other is None else {key: value for key, value in other.items() if value != whole[key]}


def main() -> None:
    found: dict[str, Any] = {"families": {}, "pairs": []}
    for architecture, values in CONFIGS.items():
        config = {"architectures": [architecture], **values}
        whole = build(config)
        assert whole is not None, architecture
        keys = change_one_key(config, whole)
        found["families"][architecture] = {"config": config, "whole": whole, "keys": keys}
    for architecture, changes in PAIRS:
        config = without_absent({"architectures": [architecture], **CONFIGS[architecture], **SMALL, **changes})
        found["pairs"].append({"config": config, "expected": build(config, "cpu")})
    FILE.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
