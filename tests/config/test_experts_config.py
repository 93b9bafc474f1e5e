# SPDX-License-Identifier: Apache-2.0
"""The keys of config.json that describe experts, in each family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastdeploy.config.experts_config import ExpertsConfig, RouterRule
from fastdeploy.config.model_config import ModelConfig, parse_model_config
from fastdeploy.core.errors import ConfigError

ERNIE_21B: dict[str, Any] = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "vocab_size": 103424,
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_intermediate_size": 1536,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_interval": 1,
    "moe_use_aux_free": True,
}
QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 48,
}
GLM_4_5: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "num_hidden_layers": 92,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "vocab_size": 151552,
    "n_routed_experts": 160,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 3,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}
FAMILIES = {"ernie": ERNIE_21B, "qwen3": QWEN3_30B, "glm": GLM_4_5}


def parse(family: str, **changes: Any) -> ModelConfig:
    raw = {**FAMILIES[family], **changes}
    return parse_model_config({key: value for key, value in raw.items() if value != "absent"}, {})


def experts(family: str, **changes: Any) -> ExpertsConfig:
    found = parse(family, **changes).experts
    assert found is not None
    return found


def sparse_layers(family: str, **changes: Any) -> list[int]:
    return [index for index, is_sparse in enumerate(experts(family, **changes).sparse_layers) if is_sparse]


def test_the_published_sizes_of_each_family_are_read() -> None:
    ernie = RouterRule(6, "softmax", normalisation="clamp", epsilon=1e-12)
    assert experts("ernie") == ExpertsConfig(64, 1536, 3072, True, ernie, (False, *(True,) * 27))
    qwen3 = RouterRule(8, "softmax", normalisation="add")
    assert experts("qwen3") == ExpertsConfig(128, 768, 0, False, qwen3, (True,) * 48)
    glm = RouterRule(8, "sigmoid", 1, 1, "two_largest", "add", 1e-20, 2.5)
    assert experts("glm") == ExpertsConfig(160, 1536, 1536, True, glm, (False,) * 3 + (True,) * 89)


def test_dense_architectures_have_no_experts_whatever_keys_there_are() -> None:
    assert parse("qwen3", architectures=["Qwen3ForCausalLM"]).experts is None


def test_heads_and_rotary_dimensions_are_those_of_the_file_or_the_family() -> None:
    ernie, glm = parse("ernie", head_dim=32), parse("glm", partial_rotary_factor="absent")
    assert (ernie.head_dim, ernie.rope.rotary_dim) == (32, 32)
    assert (glm.head_dim, glm.rope.rotary_dim, glm.use_qk_norm) == (128, 64, True)
    assert parse("glm", partial_rotary_factor=None).rope.rotary_dim == 128
    paddle = parse("ernie", hidden_size=1024, paddlenlp_version="3.0.0")
    assert (paddle.head_dim, paddle.rope.rotary_dim) == (128, 128), "the default of PaddleNLP"
    assert parse("glm", partial_rotary_factor=0.25).rope.rotary_dim == 32


@pytest.mark.parametrize(
    ("family", "keys", "layers"),
    [
        ("ernie", {"moe_layer_start_index": 3, "moe_layer_end_index": 6, "num_hidden_layers": 9}, [3, 4, 5, 6]),
        ("ernie", {"moe_layer_end_index": -1, "moe_layer_interval": 3, "num_hidden_layers": 9}, [2, 5, 8]),
        ("ernie", {"moe_layer_start_index": "absent", "num_hidden_layers": 3}, [1, 2]),
        ("qwen3", {"decoder_sparse_step": 2, "num_hidden_layers": 6}, [1, 3, 5]),
        ("qwen3", {"mlp_only_layers": [0, 2], "num_hidden_layers": 4}, [1, 3]),
        ("glm", {"first_k_dense_replace": 2, "num_hidden_layers": 4}, [2, 3]),
        ("glm", {"first_k_dense_replace": "absent", "num_hidden_layers": 3}, [1, 2]),
        ("glm", {"first_k_dense_replace": 1, "moe_layer_freq": 2, "num_hidden_layers": 6}, [2, 4]),
    ],
)
def test_sparse_layers_follow_from_the_keys_of_the_family(family: str, keys: dict[str, Any], layers: list[int]) -> None:
    assert sparse_layers(family, **keys) == layers


def test_keys_that_are_absent_have_the_meaning_of_the_family() -> None:
    assert experts("qwen3", norm_topk_prob="absent").rule.normalisation == "none"
    assert experts("glm", norm_topk_prob="absent").rule.normalisation == "add"
    assert experts("glm", norm_topk_prob=False).rule == replace(experts("glm").rule, normalisation="none", epsilon=0.0)
    assert experts("ernie", moe_norm_min=1e-6).rule.epsilon == 1e-6
    assert experts("ernie", moe_num_shared_experts="absent") == experts("ernie")
    assert experts("ernie", moe_num_shared_experts="absent", paddlenlp_version="3.0.0").shared_width == 0
    assert experts("glm", n_shared_experts="absent") == experts("glm")
    assert experts("glm", n_shared_experts=0).shared_width == 0
    assert experts("glm", n_group=None, topk_group=None).rule.num_groups == 1
    assert experts("qwen3", num_experts="absent", num_local_experts=128) == experts("qwen3")


def test_a_window_that_is_switched_on_holds_in_all_layers_of_qwen3_with_experts() -> None:
    assert parse("qwen3", sliding_window=4096).sliding_window is None
    assert parse("qwen3", sliding_window=4096, use_sliding_window=True).sliding_window == 4096


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("ernie", {"moe_num_experts": [64, 64]}, "moe_num_experts: a list is for vision-language models"),
        ("ernie", {"moe_intermediate_size": [1536, 512]}, "moe_intermediate_size: a list is for vision-language"),
        ("ernie", {"moe_layer_start_index": [1, 1]}, "moe_layer_start_index: a list is for vision-language models"),
        ("ernie", {"moe_layer_end_index": [29, 28]}, "moe_layer_end_index: a list is for vision-language models"),
        ("ernie", {"use_bias": True}, "use_bias: only False is supported with experts, got True"),
        ("ernie", {"use_moe": False}, "use_moe: only True is supported with experts, got False"),
        ("ernie", {"moe_gate_act": "sigmoid"}, "moe_gate_act: only 'softmax' is supported with experts, got 'sigmoid'"),
        ("ernie", {"moe_use_aux_free": False}, "moe_use_aux_free: only True is supported with experts"),
        ("ernie", {"moe_norm_gate_logits": False}, "moe_norm_gate_logits: only True is supported with experts"),
        ("ernie", {"moe_k": 65}, "moe_k: expected an integer in [1, 32], got 65"),
        ("ernie", {"moe_k": "absent"}, "moe_k: expected an integer in [1, 32], got None"),
        ("ernie", {"moe_num_experts": 4}, "moe_k: expected at most 4 experts, got 6"),
        ("ernie", {"moe_layer_start_index": 28}, "architectures: no layer has experts, contrary to the architecture"),
        ("qwen3", {"num_experts": 0}, "num_experts: expected an integer in [1, 1024], got 0"),
        ("qwen3", {"mlp_only_layers": [0, -1]}, "mlp_only_layers: expected a list of layers, got [0, -1]"),
        ("qwen3", {"num_hidden_layers": 1025}, "num_hidden_layers: expected at most 131072 experts in all layers, got"),
        ("qwen3", {"decoder_sparse_step": 49}, "architectures: no layer has experts"),
        ("glm", {"n_routed_experts": None}, "n_routed_experts: expected an integer in [1, 1024], got None"),
        ("glm", {"scoring_func": "softmax"}, "scoring_func: only 'sigmoid' is supported with experts, got 'softmax'"),
        ("glm", {"topk_method": "greedy"}, "topk_method: only 'noaux_tc' is supported with experts, got 'greedy'"),
        ("glm", {"n_group": 7}, "n_group: 7 does not divide 160 experts"),
        ("glm", {"n_group": 160}, "n_group: expected groups of at least 2 experts, got 1"),
        ("glm", {"n_group": 4, "topk_group": 5}, "topk_group: expected at most n_group 4, got 5"),
        ("glm", {"n_group": 40, "topk_group": 1}, "num_experts_per_tok: expected at most 4 experts of 1 groups, got 8"),
        ("glm", {"routed_scaling_factor": 0}, "routed_scaling_factor: expected a number in [1e-06, 1000000.0], got 0"),
    ],
)
def test_what_is_not_supported_or_does_not_fit_is_refused_by_its_key(
    family: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(family, **keys)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
