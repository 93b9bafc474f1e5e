# SPDX-License-Identifier: Apache-2.0
"""config.json and generation_config.json of GGUF files: those of transformers, or one line that names the key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy.config.model_config import ModelConfig, parse_model_config
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.ggml_types import GGML_TYPES
from fastdeploy.gguf.families import FAMILIES
from fastdeploy.gguf.file import GGUFFile
from fastdeploy.gguf.header import GGUFTensor
from fastdeploy.gguf.metadata import metadata_notes, shortest
from fastdeploy.gguf.model_config import make_config_json, make_generation_config
from fastdeploy.layers.rotary import inverse_frequencies
from tests.gguf.gguf_files import NAMES, WITH_REFERENCE, gguf_path, reference

WHERE = "folder/model.gguf"


def config_json(name: str, **changes: Any) -> dict[str, Any]:
    """Return config.json of a file with other metadata, of which None removes a key."""
    file = GGUFFile.open(gguf_path(name))
    return make_config_json(changed(file, changes), file.tensors, WHERE)


def changed(file: GGUFFile, changes: dict[str, Any]) -> dict[str, Any]:
    """Return metadata with changes; a key without a namespace is the architecture's."""
    architecture = file.metadata["general.architecture"]
    metadata = dict(file.metadata)
    for key, value in changes.items():
        metadata[key if key.startswith(("general.", "tokenizer.")) else f"{architecture}.{key}"] = value
    return {key: value for key, value in metadata.items() if value is not None}


def refusal(name: str, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config_json(name, **changes)
    assert caught.value.field == "model" and caught.value.message.startswith(f"{WHERE}: ")
    return caught.value.message.removeprefix(f"{WHERE}: ")


def test_files_cover_every_family_and_every_type() -> None:
    files = [GGUFFile.open(gguf_path(name)) for name in NAMES]
    assert {file.metadata["general.architecture"] for file in files} == set(FAMILIES)
    kinds = {tensor.kind.name for file in files for tensor in file.tensors.values()}
    assert kinds == set(GGML_TYPES) - {"F64"}, "llama.cpp stores no weights as F64"


@pytest.mark.parametrize("name", WITH_REFERENCE)
def test_the_model_is_that_of_the_config_json_of_transformers(name: str) -> None:
    expected = parse_model_config(reference(name)["config"], {}, dtype="float32")
    found = parse_model_config(config_json(name), {}, dtype="float32")
    of_file = GGUFFile.open(gguf_path(name)).metadata["tokenizer.ggml.eos_token_id"]
    assert found.eos_token_ids == (of_file,)
    if expected.rope.kind == "llama3":
        assert found.rope.kind == "freq_factors"
        frequencies = [inverse_frequencies(config.rope, 64) for config in (expected, found)]
        np.testing.assert_allclose(*frequencies, rtol=1e-6)
        found = replace(found, rope=expected.rope)
    assert found == replace(expected, eos_token_ids=(of_file,))


@pytest.mark.parametrize("name", WITH_REFERENCE)
def test_the_type_of_the_model_is_that_of_transformers(name: str) -> None:
    theirs, ours = reference(name)["config"], config_json(name)
    assert (ours["model_type"], ours["architectures"]) == (theirs["model_type"], theirs["architectures"])
    assert ours["torch_dtype"] == "bfloat16"


def test_blocks_for_multi_token_prediction_are_not_layers_of_the_decoder() -> None:
    config = config_json("glm4moe_mtp")
    assert GGUFFile.open(gguf_path("glm4moe_mtp")).metadata["glm4moe.block_count"] == 4
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (3, 1)
    assert config_json("glm4moe_groups")["num_nextn_predict_layers"] == 0
    without = config_json("glm4moe_groups", block_count=3, nextn_predict_layers=1)
    assert (without["num_hidden_layers"], without["num_nextn_predict_layers"]) == (2, 0), "the file lacks their tensors"
    assert "3 of 3 blocks" in refusal("glm4moe_groups", block_count=3, nextn_predict_layers=3)


def test_numbers_are_the_shortest_decimals_of_their_fp32_numbers() -> None:
    assert shortest(9.999999747378752e-06) == 1e-05
    assert shortest(9.999999974752427e-07) == 1e-06
    assert shortest(0.949999988079071) == 0.95
    assert [shortest(value) for value in (0.0, -2.5, 1e6, 500000.0, 1e300, 0.1)] == [0.0, -2.5, 1e6, 5e5, 1e300, 0.1]
    for bits in np.random.default_rng(0).integers(0, 0x7F000000, 1000, dtype=np.uint32):
        number = bits.view(np.float32)
        assert shortest(float(number)) == float(str(number))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope.freq_base": None}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope.scaling.factor": 1.0}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope.scaling.factor": 0.0}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope.scaling.factor": 2.5}, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.scaling.finetuned": True},
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_ext_factor": 1.0},
            {
                **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0},
                "original_max_position_embeddings": 128,
            },
        ),
        (
            {
                **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.freq_base": 1e6},
                **{"rope.scaling.original_context_length": 32, "rope.scaling.yarn_attn_factor": 0.949999988079071},
                **{"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0},
            },
            {
                **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0},
                **{"original_max_position_embeddings": 32, "attention_factor": 0.95},
            },
        ),
    ],
)
def test_rope_is_read_from_the_metadata(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    assert config_json("qwen2_q8_0", **changes)["rope_parameters"] == expected


def test_every_part_of_a_head_that_is_rotated_comes_out_as_it_was() -> None:
    name = "glm4moe_groups"
    for head_dim in (16, 98, 128, 196):
        for rotary_dim in range(2, head_dim + 1, 2):
            lengths = {"attention.key_length": head_dim, "attention.value_length": head_dim}
            config = config_json(name, **lengths, **{"rope.dimension_count": rotary_dim})
            assert parse_model_config(config, {}).rope.rotary_dim == rotary_dim


def test_absent_keys_mean_what_llama_cpp_takes_them_for() -> None:
    optional = ("attention.key_length", "attention.value_length", "attention.head_count_kv", "rope.freq_base")
    config = config_json("qwen2_q8_0", **dict.fromkeys(optional))
    assert (config["head_dim"], config["num_key_value_heads"], config["rope_parameters"]["rope_theta"]) == (8, 4, 1e4)
    glm = config_json("glm4moe_groups", **dict.fromkeys(("expert_weights_norm", "expert_weights_scale")))
    assert (glm["norm_topk_prob"], glm["routed_scaling_factor"]) == (False, 1.0)
    assert config_json("qwen3moe_groups")["norm_topk_prob"] is True
    assert config_json("qwen3moe_groups", expert_weights_norm=False)["norm_topk_prob"] is False


def test_lists_that_repeat_one_value_for_each_layer_are_that_value() -> None:
    config = config_json("qwen3_q5_0", **{"attention.head_count_kv": [2, 2], "feed_forward_length": [64, 64]})
    assert (config["num_key_value_heads"], config["intermediate_size"]) == (2, 64)


def test_a_sliding_window_limits_the_context_of_families_that_have_one() -> None:
    def model(window: int) -> ModelConfig:
        return parse_model_config(config_json("qwen2_q8_0", **{"attention.sliding_window": window}), {})

    assert model(64).sliding_window == 64 and model(64).default_context.num_tokens == 64
    assert model(0).sliding_window is None and model(128).sliding_window is None, "as long as the context"


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
        ("qwen2_k", {"attention.head_count_kv": 3}, "num_key_value_heads: 3 does not divide"),
        ("qwen2_k", {"attention.key_length": 7, "attention.value_length": 7}, "head_dim: expected an even number"),
        ("qwen2_k", {"attention.value_length": 32}, "value_length: is 32, but the size of keys says 16"),
        ("qwen2_k", {"embedding_length": None}, "embedding_length: expected an integer in [1, 2147483647], got None"),
        ("qwen2_k", {"embedding_length": 2**30}, "hidden_size: expected an integer in [1, 1048576], got 1073741824"),
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


def freq_factors(tmp_path: Path, values: list[float], **changes: Any) -> list[float]:
    """Return the factors of a file whose tensor holds these values."""
    np.array(values, "<f4").tofile(tmp_path / "factors")
    file = GGUFFile.open(gguf_path("llama_k"))
    tensor = GGUFTensor("rope_freqs.weight", GGML_TYPES["F32"], (len(values),), tmp_path / "factors", 0)
    config = make_config_json(file.metadata, {**file.tensors, tensor.name: replace(tensor, **changes)}, WHERE)
    found: list[float] = config["rope_parameters"]["freq_factors"]
    return found


def test_factors_of_frequencies_keep_every_bit(tmp_path: Path) -> None:
    values = [1.0, 1.1, 2.0, 3.3, 5.5, 7.7, 8.0, 8.0]
    assert freq_factors(tmp_path, values) == np.float32(values).tolist()


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 1e7])
def test_factors_of_frequencies_that_are_not_valid_are_refused(bad: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rope_freqs.weight: expected numbers in \[1e-06, 1000000.0\], got"):
        freq_factors(tmp_path, [1.0] * 7 + [bad])


def test_factors_of_another_number_or_type_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rope_freqs.weight: expected F32 \[8\], got F32 \[7\]"):
        freq_factors(tmp_path, [1.0] * 7)
    with pytest.raises(ConfigError, match=r"rope_freqs.weight: expected F32 \[8\], got F16 \[8\]"):
        freq_factors(tmp_path, [1.0] * 8, kind=GGML_TYPES["F16"])


def test_sampling_parameters_are_those_of_generation_config_json() -> None:
    metadata = GGUFFile.open(gguf_path("qwen2_q8_0")).metadata
    expected = {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    assert make_generation_config(metadata, WHERE) == expected
    assert make_generation_config({"general.sampling.min_p": 0.05000000074505806}, WHERE) == {"min_p": 0.05}
    assert make_generation_config({"general.architecture": "llama"}, WHERE) == {}


@pytest.mark.parametrize(
    ("key", "value"), [("temp", -1.0), ("top_k", 1.5), ("top_p", 2.0), ("min_p", "x"), ("penalty_repeat", True)]
)
def test_sampling_parameters_that_are_not_valid_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        make_generation_config({f"general.sampling.{key}": value}, WHERE)
    assert caught.value.message.startswith(f"{WHERE}: metadata general.sampling.{key}: ")


def test_keys_without_effect_are_noted() -> None:
    metadata = dict(GGUFFile.open(gguf_path("qwen2_q8_0")).metadata)
    assert list(metadata_notes(metadata)) == []
    metadata |= {"general.sampling.mirostat": 2, "adapter.type": "lora", "quantize.imatrix.file": "x", "split.no": 0}
    assert list(metadata_notes(metadata)) == [
        "metadata general.sampling.mirostat 2 has no effect",
        "metadata adapter.type 'lora' has no effect",
    ]
