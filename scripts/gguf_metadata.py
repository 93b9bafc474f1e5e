# SPDX-License-Identifier: Apache-2.0
"""Writes the metadata of a GGUF file from a configuration of transformers, as llama.cpp's converter does."""

from __future__ import annotations

from typing import Any

from gguf import ExpertGatingFuncType, GGUFWriter, RopeScalingType, TokenType

TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
MERGES = ("Ġ t", "h e", "i n", "Ġt he", "e r", "a n")


def write_metadata(writer: GGUFWriter, family: str, config: Any, num_blocks: int) -> None:
    """Write the keys of the architecture."""
    writer.add_type("model")
    writer.add_name(family)
    writer.add_block_count(num_blocks)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if (head_dim := getattr(config, "head_dim", None)) is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    _write_rope(writer, config.rope_parameters)
    if family == "llama":
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(config.head_dim)
    if family == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family == "ernie4_5-moe":
        _write_ernie(writer, config)
    if family == "glm4moe":
        _write_glm(writer, config)


def _write_rope(writer: GGUFWriter, params: dict[str, Any]) -> None:
    writer.add_rope_freq_base(params["rope_theta"])
    if params["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(params["factor"])
    if params["rope_type"] == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(params["factor"])
        writer.add_rope_scaling_orig_ctx_len(params["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(params["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(params["beta_slow"])


def _write_ernie(writer: GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.moe_num_experts)
    writer.add_expert_used_count(config.moe_k)
    writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    writer.add_leading_dense_block_count(config.moe_layer_start_index)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.moe_num_shared_experts)
    writer.add_expert_shared_feed_forward_length(config.moe_intermediate_size * config.moe_num_shared_experts)


def _write_glm(writer: GGUFWriter, config: Any) -> None:
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    if num_nextn := getattr(config, "num_nextn_predict_layers", 0):
        writer.add_nextn_predict_layers(num_nextn)


def write_tokenizer(writer: GGUFWriter, name: str, config: Any) -> None:
    """Write a small tokenizer: of SentencePiece's kind for `llama`, else of GPT-2's kind with this splitting rule."""
    if name == "llama":
        _write_pieces(writer, config.vocab_size)
    else:
        _write_bytes(writer, name, config.vocab_size)
    writer.add_chat_template(TEMPLATE)


def _write_bytes(writer: GGUFWriter, pre: str, vocab_size: int) -> None:
    """Write a token per byte, merges, and two control tokens; fewer bytes and one merge in a small vocabulary."""
    merges = MERGES if vocab_size > 256 else MERGES[1:2]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    texts = [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]
    texts = [*texts[: vocab_size - 2 - len(merges)], *(merge.replace(" ", "") for merge in merges)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*texts, "<|begin|>", "<|end|>"])
    writer.add_token_types([TokenType.NORMAL] * len(texts) + [TokenType.CONTROL] * 2)
    writer.add_token_merges(list(merges))
    writer.add_bos_token_id(vocab_size - 2)
    writer.add_eos_token_id(vocab_size - 1)


def _write_pieces(writer: GGUFWriter, vocab_size: int) -> None:
    """Write the usual control tokens, a token per byte, and pieces."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "e", "t", "▁t", "te"]
    assert len(texts) == vocab_size
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores([0.0] * 259 + [-4.0, -5.0, -6.0, -1.0, -2.0])
    kinds = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * 5]
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
