# SPDX-License-Identifier: Apache-2.0
"""Every tensor that the loaders expect has its place in a GGUF file, and others are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fastdeploy.config.model_config import parse_model_config
from fastdeploy.core.errors import ConfigError
from fastdeploy.gguf.families import FAMILIES
from fastdeploy.gguf.file import GGUFFile
from fastdeploy.gguf.header import GGUFTensor
from fastdeploy.gguf.model_config import make_config_json
from fastdeploy.gguf.tensor_names import TensorPlace, tensor_names
from fastdeploy.models.mtp_forms import find_forms
from fastdeploy.models.registry import find_architecture
from fastdeploy.models.weights import expected_shapes
from tests.gguf.gguf_files import NAMES, WHERE, gguf_path

Tensors = dict[str, GGUFTensor]


def places(name: str, edit: Callable[[Tensors], object] = lambda _: None, **changes: object) -> dict[str, TensorPlace]:
    """Return the places of a file's tensors after an edit of its table, and changes of config.json."""
    file = GGUFFile.open(gguf_path(name))
    tensors = dict(file.tensors)
    config = make_config_json(file.metadata, tensors, WHERE) | changes
    edit(tensors)
    return tensor_names(config, tensors, WHERE)


def refusal(name: str, edit: Callable[[Tensors], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        places(name, edit)
    start = f"{WHERE}: tensors do not match the metadata: "
    assert caught.value.field == "model" and caught.value.message.startswith(start)
    return caught.value.message.removeprefix(start)


@pytest.mark.parametrize("name", NAMES)
def test_names_and_shapes_are_those_that_the_loaders_expect(name: str) -> None:
    file = GGUFFile.open(gguf_path(name))
    raw = make_config_json(file.metadata, file.tensors, WHERE)
    found = {key: place.shape for key, place in tensor_names(raw, file.tensors, WHERE).items()}
    config = parse_model_config(raw, {})
    architecture = find_architecture(config)
    expected = dict(expected_shapes(config, architecture))
    for form in find_forms(found, config, architecture, "normed"):
        expected |= form.shapes(config)
    assert found == expected
    assert len(expected) > len(expected_shapes(config, architecture)) or name != "glm4moe_mtp"


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_permuted_in_q_and_k_of_llama_only(name: str) -> None:
    found = {key: place.heads for key, place in places(name).items() if place.heads is not None}
    file = GGUFFile.open(gguf_path(name))
    if file.metadata["general.architecture"] != "llama":
        assert not found
        return
    heads = {"q": file.metadata["llama.attention.head_count"], "k": file.metadata["llama.attention.head_count_kv"]}
    kinds = ["weight", "bias"] if "blk.0.attn_q.bias" in file.tensors else ["weight"]
    layers = range(file.metadata["llama.block_count"])
    assert found == {
        f"model.layers.{i}.self_attn.{part}_proj.{kind}": heads[part] for i in layers for part in "qk" for kind in kinds
    }


def test_experts_are_slices_of_one_tensor() -> None:
    found = places("qwen3moe_k")
    assert found["model.layers.0.mlp.experts.2.down_proj.weight"] == TensorPlace(
        "blk.0.ffn_down_exps.weight", (256, 32), expert=2
    )
    assert found["model.layers.0.mlp.gate.weight"] == TensorPlace("blk.0.ffn_gate_inp.weight", (3, 256))
    assert sum(place.expert is not None for place in found.values()) == 3 * 3


def test_parts_of_other_layers_have_their_names() -> None:
    glm, ernie = places("glm4moe_mtp"), places("ernie4_5_moe_groups")
    assert ernie["model.layers.1.mlp.moe_statics.e_score_correction_bias"] == TensorPlace(
        "blk.1.exp_probs_b.bias", (1, 4)
    )
    assert ernie["model.layers.1.mlp.shared_experts.up_proj.weight"].name == "blk.1.ffn_up_shexp.weight"
    assert glm["model.layers.1.mlp.gate.e_score_correction_bias"] == TensorPlace("blk.1.exp_probs_b.bias", (8,))
    assert glm["model.layers.0.post_attention_layernorm.weight"].name == "blk.0.post_attention_norm.weight"
    assert {key: place.name for key, place in glm.items() if "nextn" in place.name} == {
        "model.layers.3.eh_proj.weight": "blk.3.nextn.eh_proj.weight",
        "model.layers.3.enorm.weight": "blk.3.nextn.enorm.weight",
        "model.layers.3.hnorm.weight": "blk.3.nextn.hnorm.weight",
        "model.layers.3.shared_head.norm.weight": "blk.3.nextn.shared_head_norm.weight",
    } | {
        f"model.layers.3.{ours}.weight": f"blk.3.nextn.{theirs}.weight"
        for ours, theirs in (("embed_tokens", "embed_tokens"), ("shared_head.head", "shared_head_head"))
        if f"blk.3.nextn.{theirs}.weight" in GGUFFile.open(gguf_path("glm4moe_mtp")).tensors
    }


def test_a_layer_for_multi_token_prediction_uses_what_it_lacks_of_the_model() -> None:
    def edit(tensors: Tensors) -> None:
        for name in ("shared_head_norm", "embed_tokens", "shared_head_head"):
            tensors.pop(f"blk.3.nextn.{name}.weight", None)

    found = places("glm4moe_mtp", edit)
    assert found["model.layers.3.shared_head.norm.weight"] == TensorPlace("output_norm.weight", (32,))
    assert "model.layers.3.embed_tokens.weight" not in found and "model.layers.3.shared_head.head.weight" not in found


def test_a_layer_for_multi_token_prediction_must_be_whole() -> None:
    problem = refusal("glm4moe_mtp", lambda tensors: tensors.pop("blk.3.nextn.eh_proj.weight"))
    assert problem == "1 missing (blk.3.nextn.eh_proj.weight)"


@pytest.mark.parametrize("name", NAMES)
def test_each_tensor_of_a_file_is_needed(name: str) -> None:
    optional = {"rope_freqs.weight", *(f"blk.3.nextn.{part}.weight" for part in ("embed_tokens", "shared_head_head"))}
    file = GGUFFile.open(gguf_path(name))
    config = make_config_json(file.metadata, file.tensors, WHERE)
    for missing in set(file.tensors) - optional - {"blk.3.nextn.shared_head_norm.weight"}:
        tensors = {key: tensor for key, tensor in file.tensors.items() if key != missing}
        with pytest.raises(ConfigError, match="1 missing") as caught:
            tensor_names(config, tensors, WHERE)
        assert missing in caught.value.message


@pytest.mark.parametrize(
    "name",
    ["blk.0.attn_qkv.weight", "blk.2.attn_norm.weight", "blk.0.attn_q.scale", "output.bias", "cls.output.weight"],
)
def test_surplus_tensors_are_refused_by_name(name: str) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[name] = tensors["output_norm.weight"]

    assert refusal("llama_k", edit) == f"1 unexpected ({name})"


def test_names_of_tensors_do_not_break_the_line() -> None:
    norm = GGUFFile.open(gguf_path("llama_k")).tensors["output_norm.weight"]
    assert refusal("llama_k", lambda tensors: tensors.update({"a\nb": norm})) == r"1 unexpected ('a\nb')"


def test_factors_of_frequencies_are_surplus_where_the_family_has_none() -> None:
    factors = GGUFFile.open(gguf_path("llama_k")).tensors["rope_freqs.weight"]
    assert "rope_freqs" in refusal("qwen2_k", lambda tensors: tensors.update({"rope_freqs.weight": factors}))


def test_shapes_that_contradict_the_metadata_are_refused_with_both() -> None:
    def edit(tensors: Tensors) -> None:
        for name, shape in (("blk.0.attn_q.weight", (64, 256)), ("output_norm.weight", (1, 2, 256))):
            tensors[name] = replace(tensors[name], shape=shape)

    problem = refusal("llama_k", edit)
    assert problem == (
        "2 of wrong shape (output_norm.weight is [1, 2, 256], expected [256], "
        "blk.0.attn_q.weight is [64, 256], expected [32, 256])"
    )


def test_leading_dimensions_of_one_may_be_there_or_not() -> None:
    def edit(tensors: Tensors) -> None:
        bias = tensors["blk.1.exp_probs_b.bias"]
        tensors[bias.name] = replace(bias, shape=(4,) if bias.shape == (1, 4) else (1, 4))

    assert places("ernie4_5_moe_groups", edit) == places("ernie4_5_moe_groups")


@pytest.mark.parametrize(("kinds", "interval", "last"), [("dsd", 1, 1), ("dsds", 2, 3), ("dss", 1, 2)])
def test_layers_with_experts_of_ernie_are_those_that_have_a_router(kinds: str, interval: int, last: int) -> None:
    file = GGUFFile.open(gguf_path("ernie4_5_moe_groups"))  # its layers are a dense and a sparse one
    tensors = {name: tensor for name, tensor in file.tensors.items() if not name.startswith("blk.")}
    for index, kind in enumerate(kinds):
        block = f"blk.{'ds'.index(kind)}."
        for name, tensor in file.tensors.items():
            if name.startswith(block):
                tensors[f"blk.{index}.{name.removeprefix(block)}"] = tensor
    metadata = dict(file.metadata)
    metadata |= {"ernie4_5-moe.block_count": len(kinds), "ernie4_5-moe.interleave_moe_layer_step": interval}
    config = make_config_json(metadata, tensors, WHERE)
    assert config["moe_layer_end_index"] == last
    names = tensor_names(config, tensors, WHERE)
    assert [f"model.layers.{i}.mlp.gate.weight" in names for i in range(len(kinds))] == [kind == "s" for kind in kinds]


def test_long_lists_of_names_are_cut() -> None:
    problem = refusal("llama_rare", lambda tensors: tensors.clear())
    assert "29 missing (token_embd.weight" in problem and problem.endswith(", and 5 more)")


def test_families_are_those_whose_tensors_have_loaders() -> None:
    config = parse_model_config(make_config_json(*_table("llama_k"), WHERE), {})
    for family in FAMILIES.values():
        assert find_architecture(replace(config, architecture=family.architecture)).name == family.architecture


def _table(name: str) -> tuple[dict[str, object], Tensors]:
    file = GGUFFile.open(gguf_path(name))
    return dict(file.metadata), dict(file.tensors)
