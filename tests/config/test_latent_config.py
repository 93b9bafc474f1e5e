# SPDX-License-Identifier: Apache-2.0
"""The keys of config.json that describe latent attention, and the experts of the families that have it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.experts_config import ExpertsConfig, RouterRule
from fastdeploy.config.family_defaults import FamilyDefaults
from fastdeploy.config.latent_config import LATENT_ARCHITECTURES, LatentConfig
from fastdeploy.config.model_config import ModelConfig, parse_model_config
from fastdeploy.config.rope_config import parse_rope
from fastdeploy.core.errors import ConfigError
from fastdeploy.engine.description import digest_checkpoint
from fastdeploy.models import registry
from tests.config.published_latent import GLM_LITE, PUBLISHED, V2, V2_LITE, V3
from tests.models.model_driver import GOLDEN

V2_SCALE, V3_SCALE = 0.1147213867929261, 0.1352337788608801  # DeepseekV2Attention.scaling and V3's in transformers 5.24
DEEPSEEK_V2 = LatentConfig(1536, 512, 128, 64, 128, 1e-6, V2_SCALE, True)
DEEPSEEK_V3 = replace(DEEPSEEK_V2, scale=V3_SCALE)
GLM_FLASH = LatentConfig(768, 512, 192, 64, 256, 1e-6, 0.0625, True)
OF_V2 = ExpertsConfig(160, 1536, 3072, False, RouterRule(6, "softmax", 8, 3, scale=16.0), (False, *(True,) * 59))
OF_LITE = ExpertsConfig(64, 1408, 2816, False, RouterRule(6, "softmax"), (False, *(True,) * 26))
OF_V3 = ExpertsConfig(
    *(256, 2048, 2048, True, RouterRule(8, "sigmoid", 8, 4, "two_largest", "add", 1e-20, 2.5)),
    (*(False,) * 3, *(True,) * 58),
)
OF_GLM = ExpertsConfig(
    *(64, 1536, 1536, True, RouterRule(4, "sigmoid", 1, 1, "two_largest", "add", 1e-20, 1.8)),
    (False, *(True,) * 46),
)
EXPECTED: dict[str, tuple[LatentConfig, ExpertsConfig, int]] = {
    "DeepSeek-V2": (DEEPSEEK_V2, OF_V2, 163840),
    "DeepSeek-V2-Chat": (DEEPSEEK_V2, OF_V2, 163840),
    "DeepSeek-V2.5": (DEEPSEEK_V3, OF_V2, 163840),
    "DeepSeek-V2-Lite": (replace(DEEPSEEK_V2, q_lora_rank=None), OF_LITE, 163840),
    "DeepSeek-V3": (DEEPSEEK_V3, OF_V3, 163840),
    "DeepSeek-V3.1": (DEEPSEEK_V3, OF_V3, 163840),
    "DeepSeek-R1": (DEEPSEEK_V3, OF_V3, 163840),
    "DeepSeek-R1-0528": (DEEPSEEK_V3, OF_V3, 163840),
    "GLM-4.7-Flash": (GLM_FLASH, OF_GLM, 202752),
    "GLM-4.7-Flash, saved by transformers 5": (GLM_FLASH, OF_GLM, 202752),
}
FAMILIES = {"v2": V2, "v2_lite": V2_LITE, "v3": V3, "glm": GLM_LITE}
YARN = V3["rope_scaling"]


def raw(family: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**FAMILIES[family], **changes}.items() if value != "absent"}


def parse(family: str, **changes: Any) -> ModelConfig:
    return parse_model_config(raw(family, **changes), {})


def latent(family: str, **changes: Any) -> LatentConfig:
    found = parse(family, **changes).latent
    assert found is not None
    return found


def experts(family: str, **changes: Any) -> ExpertsConfig:
    found = parse(family, **changes).experts
    assert found is not None
    return found


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_models_are_read_as_transformers_reads_them(name: str) -> None:
    config = parse_model_config(PUBLISHED[name], {})
    attention, of_layers, context = EXPECTED[name]
    assert config.latent is not None
    assert config.latent.scale == pytest.approx(attention.scale, rel=1e-14)
    assert replace(config.latent, scale=attention.scale) == attention
    assert config.experts == of_layers
    assert (config.num_kv_heads, config.head_dim) == (1, 576)
    assert (config.rope.rotary_dim, config.rope.attention_factor) == (64, 1.0)
    assert config.max_context_len == context
    assert config.notes == ()


def test_the_layer_for_mtp_is_no_layer_of_the_decoder() -> None:
    assert [parse(family).num_layers for family in ("v3", "glm")] == [61, 47]
    assert all(parse(family, num_nextn_predict_layers=2).num_layers == parse(family).num_layers for family in FAMILIES)


def test_other_architectures_have_no_latent_attention_whatever_keys_there_are() -> None:
    config = parse("glm", architectures=["Glm4MoeForCausalLM"], head_dim=128)
    assert config.latent is None and (config.num_kv_heads, config.head_dim) == (20, 128)
    assert parse("v3", architectures=["LlamaForCausalLM"], kv_lora_rank=7, head_dim=128).latent is None


def test_heads_are_not_limited_to_the_sizes_of_grouped_query_attention() -> None:
    assert parse("v2", kv_lora_rank=1024, qk_rope_head_dim=256).head_dim == 1280
    assert parse("v3", hidden_size=7168, num_attention_heads=96, num_key_value_heads=96).num_heads == 96


@pytest.mark.parametrize(
    ("rope", "square"),
    [
        ({**YARN, "mscale_all_dim": 0.707}, 1.5896261651208736),
        ({**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}, 1.8738542070926265),
        ({**YARN, "mscale_all_dim": 0}, 1.0),
        ({**YARN, "mscale_all_dim": None}, 1.0),
        ({**YARN, "factor": 1.0}, 1.0),
        ({**YARN, "attention_factor": 1.7}, 1.8738542070926265),
        ({"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}, 1.0),
        ({"type": "default", "mscale_all_dim": 1.0}, 1.0),
        ({"type": "linear", "factor": 40.0}, 1.0),
        (None, 1.0),
    ],
)
def test_yarn_scales_the_scores_by_the_square_of_its_magnitude(rope: Any, square: float) -> None:
    for family in ("v2", "v3", "glm"):
        sizes = latent(family)
        plain = float(sizes.nope_dim + sizes.rope_dim) ** -0.5
        assert latent(family, rope_scaling=rope).scale == pytest.approx(square * plain, rel=1e-12)


def test_models_without_latent_attention_keep_their_names_of_a_checkpoint() -> None:
    given = {"rope_scaling": YARN}
    rope = parse_rope(given, head_dim=64, max_position_embeddings=163840, defaults=FamilyDefaults())
    assert rope.score_factor > 1.5 and "score_factor" not in repr(rope)
    assert "latent" not in repr(ModelConfig.from_pretrained(GOLDEN / "qwen3"))


def test_another_latent_attention_is_another_checkpoint(tmp_path: Path) -> None:
    digests = set()
    for number, changes in enumerate(
        ({}, {"rope_interleave": False}, {"qk_nope_head_dim": 64}, {"rope_scaling": {**YARN, "mscale_all_dim": 0.5}})
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(raw("v3", **changes)))
        digests.add(digest_checkpoint(ModelConfig.from_pretrained(folder, reads_weights=False), "dummy"))
    assert len(digests) == 4


def test_pairs_are_neighbours_unless_the_files_of_v3_or_glm_say_otherwise() -> None:
    for family in ("v3", "glm"):
        assert latent(family).is_interleaved and latent(family, rope_interleave=True).is_interleaved
        assert not latent(family, rope_interleave=False).is_interleaved
    config = parse("v2", rope_interleave=False)
    assert config.latent is not None and config.latent.is_interleaved
    (note,) = config.notes
    assert note.startswith("rope_interleave false has no effect")


def test_the_number_of_key_heads_has_no_effect() -> None:
    assert parse("v3", num_key_value_heads=None).notes == parse("v3", num_key_value_heads="absent").notes == ()
    config = parse("v3", num_key_value_heads=1)
    assert replace(config, notes=()) == replace(parse("v3"), notes=())
    (note,) = config.notes
    assert note.startswith("num_key_value_heads 1 has no effect")


def test_a_head_dim_is_the_rotated_part() -> None:
    assert parse("v3", head_dim=64) == parse("v3", head_dim=None) == parse("v3")
    assert latent("glm", head_dim=32, qk_rope_head_dim=32).rope_dim == 32


def test_groups_count_only_if_the_method_of_v2_is_limited_to_them() -> None:
    assert experts("v2", topk_method="greedy").rule == RouterRule(6, "softmax", scale=16.0)
    assert experts("v2_lite", n_group=8, topk_group=3) == experts("v2_lite", topk_method="absent") == OF_LITE
    limited = experts("v2_lite", topk_method="group_limited_greedy", n_group=8, topk_group=3).rule
    assert (limited.num_groups, limited.num_kept_groups, limited.group_score) == (8, 3, "largest")


def test_types_of_layers_are_accepted_where_they_repeat_the_other_keys() -> None:
    kinds = ["dense"] * 2 + ["sparse"] * 45
    assert sum(experts("glm", first_k_dense_replace=2, mlp_layer_types=kinds).sparse_layers) == 45
    assert experts("glm", mlp_layer_types=None) == OF_GLM
    kinds = ["dense", "dense", "sparse", "dense", "sparse"]
    changes = {"first_k_dense_replace": 1, "moe_layer_freq": 2, "num_hidden_layers": 5}
    assert experts("glm", mlp_layer_types=kinds, **changes).sparse_layers == (False, False, True, False, True)
    assert experts("v3", **changes).sparse_layers == experts("v2", **changes).sparse_layers


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(
        (family, {key: value}, f"{key}: expected a multiple of 8 in [8, {high}], got {value}")
        for family in ("v2", "v3", "glm")
        for key, high in (
            ("q_lora_rank", 65536),
            ("kv_lora_rank", 1024),
            ("qk_nope_head_dim", 256),
            ("qk_rope_head_dim", 256),
            ("v_head_dim", 256),
        )
        for value in (0, 4, 12, high + 8, -8, 64.0, True, [64])
    ),
    ("v3", {"q_lora_rank": "none"}, "q_lora_rank: expected a multiple of 8 in [8, 65536], got 'none'"),
    ("v3", {"rope_interleave": 1}, "rope_interleave: expected true or false, got 1"),
    ("v2", {"head_dim": 192}, "head_dim: expected qk_rope_head_dim 64, got 192"),
    ("glm", {"head_dim": 256}, "head_dim: expected qk_rope_head_dim 64, got 256"),
    ("v3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: only 1 is supported with latent attention, got 32"),
    (
        "glm",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        "partial_rotary_factor: only 1 is supported with latent attention, got 16 / 64",
    ),
    ("v3", {"rope_scaling": {**YARN, "mscale_all_dim": "1"}}, "rope_scaling: rope_scaling.mscale_all_dim: expected a"),
    ("v3", {"paddlenlp_version": "3.0.0"}, "paddlenlp_version: DeepseekV3ForCausalLM in PaddleNLP's layout is not"),
    ("v2", {"norm_topk_prob": True}, "norm_topk_prob: only False is supported with experts, got True"),
    ("v2", {"mlp_bias": True}, "mlp_bias: only False is supported with experts, got True"),
    ("v2", {"scoring_func": "sigmoid"}, "scoring_func: only 'softmax' is supported with experts, got 'sigmoid'"),
    (
        "v2",
        {"topk_method": "noaux_tc"},
        "topk_method: only 'greedy' and 'group_limited_greedy' are supported with experts, got 'noaux_tc'",
    ),
    ("v2", {"topk_method": 3}, "topk_method: only 'greedy' and 'group_limited_greedy' are supported"),
    ("v2", {"n_group": None}, "n_group: expected an integer in [1, 1024], got None"),
    ("v2", {"topk_group": "absent"}, "topk_group: expected an integer in [1, 1024], got None"),
    ("v2", {"topk_group": 9}, "topk_group: expected at most n_group 8, got 9"),
    ("v2_lite", {"moe_layer_freq": [0, 1]}, "moe_layer_freq: expected an integer in [1, 4096], got [0, 1]"),
    ("v2_lite", {"moe_layer_freq": 27}, "architectures: no layer has experts, contrary to the architecture"),
    *(
        (family, {"n_routed_experts": None}, "n_routed_experts: expected an integer in [1, 1024], got None")
        for family in FAMILIES
    ),
    ("v3", {"scoring_func": "softmax"}, "scoring_func: only 'sigmoid' is supported with experts, got 'softmax'"),
    ("v3", {"topk_method": "greedy"}, "topk_method: only 'noaux_tc' is supported with experts, got 'greedy'"),
    ("v3", {"topk_method": "group_limited_greedy"}, "topk_method: only 'noaux_tc' is supported with experts"),
    ("v3", {"n_group": 7}, "n_group: 7 does not divide 256 experts"),
    ("glm", {"scoring_func": "softmax"}, "scoring_func: only 'sigmoid' is supported with experts, got 'softmax'"),
    ("glm", {"mlp_layer_types": ["sparse"] * 47}, "mlp_layer_types: expected 'dense' for the first 1 of 47 layers"),
    ("glm", {"mlp_layer_types": ["dense"] + ["sparse"] * 47}, "mlp_layer_types: expected 'dense' for the first 1 of"),
    ("glm", {"mlp_layer_types": "dense"}, "mlp_layer_types: expected 'dense' for the first 1 of 47 layers"),
    ("glm", {"first_k_dense_replace": 2, "mlp_layer_types": ["dense"] + ["sparse"] * 46}, "mlp_layer_types: expected"),
    ("v3", {"index_topk": 2048}, "architectures: 'DeepseekV3ForCausalLM' needs latent attention with an indexer"),
    ("v3", {"model_type": "kimi_k2"}, "architectures: 'DeepseekV3ForCausalLM' of model_type 'kimi_k2' needs a token"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_not_supported_or_contradicts_itself_is_refused_by_its_key(number: int) -> None:
    family, changes, message = REFUSED[number]
    with pytest.raises(ConfigError) as caught:
        parse(family, **changes)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_an_int8_cache_is_refused_by_its_flag(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw(family)))
    assert ModelConfig.from_pretrained(tmp_path, reads_weights=False).latent is not None
    with pytest.raises(ConfigError, match=r"^kv_cache_dtype: int8 is not supported yet with the latent attention of "):
        ModelConfig.from_pretrained(tmp_path, reads_weights=False, kv_cache_dtype="int8")


def test_a_device_without_the_operators_is_refused_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "missing_kernels", list)
    operators = "route, experts_up, experts_down, append_latent_attention, project_heads"
    for family, architecture in zip(("v2", "v3", "glm"), LATENT_ARCHITECTURES, strict=True):
        with pytest.raises(ConfigError, match=f"^architectures: {architecture} needs {operators}, which cpu does not"):
            registry.check_device(parse(family))
    with pytest.raises(ConfigError, match="needs route, experts_up, experts_down, which"):
        registry.check_device(parse("glm", architectures=["Glm4MoeForCausalLM"], head_dim=128))
