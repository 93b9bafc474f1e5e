# SPDX-License-Identifier: Apache-2.0
"""The architectures of GGUF files that are supported, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """An architecture, as llama.cpp names it, and what transformers calls the same.

    Attributes:
        architecture, model_type: of config.json.
        norm: name of the norm before the feed-forward block.
        has_permuted_heads: rows of q and k, and their biases, lie in the order of interleaved pairs of rotary
            embeddings although transformers has halves. Files of ERNIE are interleaved, and so is transformers' model.
        bias_flag: key of config.json that is true if q has a bias; "" if q, k and v always have one.
        has_output_bias: whether the flag means the output of the attention, too.
        mlp_bias_flag: key of config.json that is true if the feed-forward block has biases; "" if it never has.
        correction_bias: name in config.json's checkpoint of the router's bias for the choice; "" if it has none.
        has_sliding_window: transformers' model has sliding windows.
        has_partial_rotary: part of a head may be rotated.
        has_freq_factors: the file may have a factor for each frequency.
        qk_norm: "always", "never", or the key of config.json that is true if heads are normalized.
        experts: which keys of config.json describe the experts; "" if there are none.
        has_nextn_layers: layers for multi-token prediction may follow.
    """

    architecture: str
    model_type: str
    norm: str = "ffn_norm"
    has_permuted_heads: bool = False
    bias_flag: str = "attention_bias"
    has_output_bias: bool = True
    mlp_bias_flag: str = ""
    correction_bias: str = ""
    has_sliding_window: bool = False
    has_partial_rotary: bool = False
    has_freq_factors: bool = False
    qk_norm: str = "never"
    experts: str = ""
    has_nextn_layers: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM", "llama", has_permuted_heads=True, mlp_bias_flag="mlp_bias", has_freq_factors=True
    ),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", bias_flag="", has_output_bias=False, has_sliding_window=True),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", has_sliding_window=True, qk_norm="always"),
    "qwen3moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", has_sliding_window=True, qk_norm="always", experts="qwen3"),
    "ernie4_5": Family("Ernie4_5ForCausalLM", "ernie4_5", bias_flag="use_bias", mlp_bias_flag="use_bias"),
    "ernie4_5-moe": Family(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        bias_flag="use_bias",
        mlp_bias_flag="use_bias",
        correction_bias="mlp.moe_statics.e_score_correction_bias",
        experts="ernie",
    ),
    "glm4moe": Family(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        norm="post_attention_norm",
        has_output_bias=False,
        correction_bias="mlp.gate.e_score_correction_bias",
        has_partial_rotary=True,
        qk_norm="use_qk_norm",
        experts="glm4",
        has_nextn_layers=True,
    ),
}
"""By `general.architecture`."""
