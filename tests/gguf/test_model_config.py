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
from tests.gguf.gguf_files import (
    NAMES,
    WHERE,
    WITH_REFERENCE,
    config_json,
    gguf_path,
    reference,
    without_attention,
)


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
    for head_dim in (16, 98, 196):
        for rotary_dim in range(2, head_dim + 1, 2):
            lengths = {"attention.key_length": head_dim, "attention.value_length": head_dim}
            config = without_attention(name, **lengths, **{"rope.dimension_count": rotary_dim})
            assert parse_model_config(config, {}).rope.rotary_dim == rotary_dim


def test_absent_keys_mean_what_llama_cpp_takes_them_for() -> None:
    optional = ("attention.key_length", "attention.value_length", "attention.head_count_kv", "rope.freq_base")
    config = without_attention("qwen2_q8_0", **dict.fromkeys(optional))
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
