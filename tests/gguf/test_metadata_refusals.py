# SPDX-License-Identifier: Apache-2.0
"""Metadata of GGUF files that would change results, contradicts tensors or is not valid is refused with its key."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy.core.errors import ConfigError
from fastdeploy.gguf.file import GGUFFile
from fastdeploy.gguf.model_config import make_config_json, make_generation_config
from fastdeploy.gguf.tensor_names import tensor_names
from tests.gguf.gguf_files import WHERE, config_json, gguf_path, without_attention

READ_OR_NEUTRAL = (
    *("attention.causal", "attention.scale", "attention.sliding_window", "embedding_length_out", "expert_count"),
    *("expert_gating_func", "expert_group_count", "expert_group_used_count", "expert_shared_count"),
    *("expert_weights_norm", "expert_weights_scale", "leading_dense_block_count", "nextn_predict_layers"),
    *("rope.dimension_count", "rope.scale_linear", "rope.scaling.factor", "rope.scaling.type", "vocab_size"),
)


def refusal(name: str, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config_json(name, **changes)
    assert caught.value.field == "model" and caught.value.message.startswith(f"{WHERE}: ")
    return caught.value.message.removeprefix(f"{WHERE}: ")


HARMLESS: dict[str, Any] = {
    **{"attention.causal": True, "logit_scale": 1.0, "final_logit_softcapping": 0.0, "pooling_type": 0},
    **{"rope.dimension_sections": [0, 0, 0, 0], "expert_count": 0, "tensor_data_layout": "Meta AI original pth"},
    **{"general.alignment": 32, "general.quantization_version": 2, "tokenizer.ggml.add_bos_token": True},
}


def test_keys_with_values_that_change_nothing_are_accepted() -> None:
    assert config_json("llama_k", **HARMLESS) == config_json("llama_k")


@pytest.mark.parametrize(
    ("key", "value", "supported"),
    [
        ("attention.causal", False, "True"),
        ("attention.causal", 1, "True"),
        ("attention.clamp_kqv", 8.0, "0"),
        ("attention.max_alibi_bias", 8.0, "0"),
        ("attention.scale", 0.0078125, "0"),
        ("attn_logit_softcapping", 50.0, "0"),
        ("final_logit_softcapping", 30.0, "0"),
        ("embedding_scale", 12.0, "0 or 1"),
        ("residual_scale", 0.22, "0 or 1"),
        ("logit_scale", 0.0625, "0 or 1"),
        ("expert_group_count", 2, "0 or 1"),
        ("leading_dense_block_count", 1, "0"),
        ("nextn_predict_layers", 1, "0"),
        ("pooling_type", 3, "0"),
        ("rope.scaling.alpha", 1000.0, "0"),
        ("rope.scaling.attn_factor", 1.19, "1"),
        ("rope.scaling.yarn_log_multiplier", 0.1, "0"),
        ("rope.scaling.yarn_ext_factor", 1.0, "-1 or 0"),
        ("tensor_data_layout", "jploski", "Meta AI original pth"),
        ("use_parallel_residual", True, "False"),
        ("hidden_activation", "gelu", "silu or swish"),
    ],
)
def test_keys_that_change_results_are_refused_by_name(key: str, value: Any, supported: str) -> None:
    assert refusal("llama_k", **{key: value}) == f"metadata llama.{key}: only {supported} is supported, got {value!r}"


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        (
            "llama_k",
            {"ssm.conv_kernel": 4},
            "metadata llama.ssm.conv_kernel: is not known and may change results, got 4",
        ),
        (
            "llama_k",
            {"attention.sliding_window": 64},
            "attention.sliding_window: LlamaForCausalLM has no sliding windows",
        ),
        ("llama_k", {"expert_count": 8}, "metadata llama.expert_count: Llama with experts (Mixtral) is not supported"),
        ("llama_k", {"rope.dimension_count": 8}, "expected the size of a head, 16, got 8"),
        ("glm4moe_k", {"rope.dimension_count": 32}, "expected the size of a head, 16, got 32"),
        ("glm4moe_k", {"rope.dimension_count": 3}, "partial_rotary_factor"),
        ("llama_k", {"rope.scaling.type": "longrope"}, "'longrope' is not supported (supported: none, linear, yarn)"),
        ("llama_k", {"rope.scaling.type": 3}, "3 is not supported (supported: none, linear, yarn)"),
        ("llama_k", {"rope.scaling.factor": 2.0}, "rope_freqs.weight beside rope.scaling.type linear"),
        ("qwen2_k", {"rope.scaling.factor": 0.5}, "rope_scaling.factor"),
        ("qwen2_k", {"rope.scaling.factor": float("nan")}, "rope_scaling.factor"),
        ("qwen2_k", {"rope.scaling.factor": "4"}, "rope.scaling.factor: expected a number, got '4'"),
        (
            "qwen2_k",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_ext_factor": 0.5},
            "yarn_ext_factor: only 1 is supported",
        ),
        ("qwen2_k", {"rope.dimension_sections": [4, 2, 2, 0]}, "rope.dimension_sections: a list of different values"),
        ("qwen2_k", {"attention.head_count_kv": [2, 4]}, "attention.head_count_kv: a list of different values"),
        ("qwen2_k", {"attention.head_count": 0}, "attention.head_count: expected an integer in [1, 2147483647], got 0"),
        ("qwen2_k", {"attention.head_count": True}, "attention.head_count: expected an integer in [1, 2147483647]"),
        ("qwen2_k", {"attention.head_count": 8}, "head_count: blk.0.attn_q.weight has 256 rows, expected 128"),
        ("qwen2_k", {"attention.head_count_kv": 3}, "head_count_kv: blk.0.attn_k.weight has 32 rows, expected 48"),
        ("qwen2_k", {"feed_forward_length": 64}, "feed_forward_length: blk.0.ffn_gate.weight has 32 rows, expected 64"),
        ("qwen2_k", {"attention.value_length": 32}, "value_length: is 32, but the size of keys says 16"),
        ("qwen2_k", {"embedding_length": None}, "embedding_length: expected an integer in [1, 2147483647], got None"),
        ("qwen2_k", {"embedding_length": 2**30}, "embedding_length: is 1073741824, but token_embd.weight says 256"),
        (
            "qwen2_k",
            {"context_length": 2**31},
            "context_length: expected an integer in [1, 2147483647], got 2147483648",
        ),
        ("qwen2_k", {"embedding_length_out": 8}, "embedding_length_out: is 8, but embedding_length says 256"),
        ("qwen2_k", {"block_count": 2**31 - 1}, "block_count: expected an integer in [1, 4096], got 2147483647"),
        ("qwen2_k", {"context_length": "long"}, "context_length: expected an integer in [1, 2147483647], got 'long'"),
        ("qwen2_k", {"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon: expected a number, got None"),
        (
            "qwen2_k",
            {"attention.layer_norm_rms_epsilon": 2.0},
            "rms_norm_eps: expected a number in [1e-12, 1.0], got 2.0",
        ),
        ("qwen2_k", {"vocab_size": 263}, "qwen2.vocab_size: is 263, but token_embd.weight says 264"),
        ("qwen2_k", {"tokenizer.ggml.tokens": ["x"] * 265}, "at most the 264 of token_embd.weight, got 265 tokens"),
        ("qwen2_k", {"tokenizer.ggml.tokens": "x"}, "at most the 264 of token_embd.weight, got 'x'"),
        ("qwen2_k", {"tokenizer.ggml.eos_token_id": -1}, "tokenizer.ggml.eos_token_id: expected a token id, got -1"),
        ("qwen2_k", {"tokenizer.ggml.bos_token_id": 1.0}, "tokenizer.ggml.bos_token_id: expected a token id, got 1.0"),
        ("qwen3moe_k", {"expert_count": 4}, "expert_count: is 4, but blk.0.ffn_gate_exps.weight says 3"),
        ("qwen3moe_k", {"expert_used_count": 4}, "num_experts_per_tok: expected at most 3 experts, got 4"),
        ("qwen3moe_k", {"expert_feed_forward_length": 64}, "is 64, but blk.0.ffn_gate_exps.weight says 32"),
        ("qwen3moe_k", {"expert_gating_func": 2}, "expert_gating_func: only 1 is supported, got 2"),
        ("qwen3moe_k", {"expert_weights_norm": 1}, "expert_weights_norm: expected true or false, got 1"),
        ("qwen3moe_k", {"expert_weights_scale": 2.5}, "expert_weights_scale: only 0 or 1 is supported, got 2.5"),
        ("ernie4_5_moe_k", {"expert_weights_norm": False}, "expert_weights_norm: only True is supported"),
        ("ernie4_5_moe_k", {"expert_shared_count": 2}, "2 of 32 neurons, but blk.1.ffn_gate_shexp.weight has 32 rows"),
        ("ernie4_5_moe_k", {"expert_shared_feed_forward_length": 96}, "is 96, but blk.1.ffn_gate_shexp.weight says 32"),
        ("glm4moe_k", {"expert_gating_func": 1}, "expert_gating_func: only 2 is supported, got 1"),
        ("glm4moe_k", {"expert_group_count": 2, "expert_group_used_count": 1}, "n_group: 2 does not divide 3 experts"),
        ("glm4moe_k", {"general.type": "adapter"}, "metadata general.type: expected model, got 'adapter'"),
        ("glm4moe_k", {"general.architecture": None}, "general.architecture: expected the name of an architecture"),
    ],
)
def test_metadata_that_is_not_valid_is_refused_with_its_key(name: str, changes: dict[str, Any], problem: str) -> None:
    assert problem in refusal(name, **changes)


@pytest.mark.parametrize("name", ["gemma3", "deepseek2", "qwen2moe", "llama4", "mistral3", "glm4", "ernie4_5_moe", ""])
def test_other_architectures_are_refused_by_name_with_those_that_are_supported(name: str) -> None:
    supported = "llama, qwen2, qwen3, qwen3moe, ernie4_5, ernie4_5-moe, glm4moe"
    expected = f"metadata general.architecture: '{name}' is not supported (supported: {supported})"
    assert refusal("llama_k", **{"general.architecture": name}) == expected


def test_names_of_the_file_do_not_break_the_line() -> None:
    assert refusal("llama_k", **{"a\nb": 1}) == r"metadata 'llama.a\nb': is not known and may change results, got 1"
    assert refusal("llama_k", **{"general.architecture": "a\nb"}).startswith(
        r"metadata general.architecture: 'a\nb' is not supported"
    )
    assert len(refusal("llama_k", **{"x" * 9999: "y" * 9999})) < 300


def test_heads_that_the_kernels_do_not_take_are_refused() -> None:
    for size, problem in ((7, "head_dim: expected an even number up to 256, got 7"), (512, "got 512")):
        with pytest.raises(ConfigError, match=problem):
            without_attention("qwen2_k", **{"attention.key_length": size, "attention.value_length": size})
    with pytest.raises(ConfigError, match="num_key_value_heads: 3 does not divide num_attention_heads 16"):
        without_attention("qwen2_k", **{"attention.head_count_kv": 3})


def test_files_without_an_embedding_or_experts_are_refused() -> None:
    for name, missing in (
        ("llama_k", "token_embd.weight"),
        ("qwen3moe_k", "blk.0.ffn_gate_inp.weight"),
        ("qwen3moe_k", "blk.0.ffn_gate_exps.weight"),
    ):
        file = GGUFFile.open(gguf_path(name))
        tensors = {key: tensor for key, tensor in file.tensors.items() if key != missing}
        with pytest.raises(ConfigError, match=missing.replace("blk.0", r"blk.(0|\*)")):
            make_config_json(file.metadata, tensors, WHERE)


ODD_VALUES = (
    True,
    -1,
    0,
    3,
    2**63,
    1.5,
    -0.0,
    1e300,
    float("nan"),
    float("inf"),
    "x",
    "",
    [],
    [1],
    [1, 2],
    ["x"],
    [True],
)


@pytest.mark.parametrize("name", ["llama_k", "qwen3_k", "ernie4_5_moe_k", "glm4moe_mtp"])
def test_odd_values_of_every_key_are_read_or_refused_in_one_line(name: str) -> None:
    file = GGUFFile.open(gguf_path(name))
    architecture = file.metadata["general.architecture"]
    keys = {*file.metadata, *(f"{architecture}.{key}" for key in READ_OR_NEUTRAL)}
    num_refused = 0
    for key in sorted(keys):
        for value in ODD_VALUES:
            metadata = {**file.metadata, key: value}
            try:
                tensor_names(make_config_json(metadata, file.tensors, WHERE), file.tensors, WHERE)
                make_generation_config(metadata, WHERE)
            except ConfigError as error:
                num_refused += 1
                assert str(error).startswith("model: folder/model.gguf: ") and "\n" not in str(error)
                assert len(str(error)) < 3000
    assert num_refused > 100
