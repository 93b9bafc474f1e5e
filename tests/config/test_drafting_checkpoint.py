# SPDX-License-Identifier: Apache-2.0
"""The method that a drafting model is for is read off its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.drafting_checkpoint import infer_method, infer_method_of, number_of_drafts
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.errors import ConfigError
from tests.config.published_heads import HEADS, LLAMA, Head, write_head

FILES = ("model.safetensors", "pytorch_model.bin", "head.pt")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", HEADS)
def test_published_heads_are_known_by_their_tensors(tmp_path: Path, name: str, file: str) -> None:
    folder = write_head(tmp_path, HEADS[name], file)
    assert infer_method_of(folder) == infer_method(str(folder)) == HEADS[name].method
    assert number_of_drafts(folder, HEADS[name].method) == HEADS[name].num_drafts


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, "mlp_speculator"),
        ({"model_type": "mlp_speculator"}, "mlp_speculator"),
        ({"architectures": ["EagleLlamaForCausalLM"], "model_type": "llama"}, "eagle"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["MedusaModel"]}, "medusa"),
        ({"speculators_model_type": "mtp"}, "mtp"),
        ({"speculators_model_type": "dspark", "architectures": ["Eagle3Speculator"]}, "dspark"),
        ({"model_type": ["medusa"], "speculators_model_type": None}, "medusa"),
        ({}, "draft_model"),
    ],
)
def test_without_readable_tensors_the_config_decides(tmp_path: Path, config: dict[str, Any], method: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert infer_method_of(tmp_path) == method


def test_a_kind_that_config_json_names_decides_where_the_tensors_do_not(tmp_path: Path) -> None:
    other = Head("eagle", {"fusion_fc.weight": (4096, 8192)}, {"speculators_model_type": "eagle"})
    assert infer_method_of(write_head(tmp_path, other)) == "eagle"


@pytest.mark.parametrize("kind", ["dflash2", "dels_spec", 3, ["eagle3"], "x" * 10_000])
def test_other_kinds_of_speculators_are_refused_by_name(tmp_path: Path, kind: Any) -> None:
    head = HEADS["DFlash of speculators"]
    write_head(tmp_path, Head(head.method, head.shapes, {**head.config, "speculators_model_type": kind}))
    with pytest.raises(ConfigError, match=r"speculators_model_type: expected one of eagle, .*, mtp, got ") as caught:
        infer_method_of(tmp_path)
    assert repr(kind)[:20] in str(caught.value) and len(str(caught.value)) < 600


def test_whether_a_name_on_a_hub_is_a_head_is_not_known_before_its_download() -> None:
    assert infer_method("yuhuili/EAGLE-LLaMA3.1-Instruct-8B") is None
    assert infer_method("/nowhere") is None


@pytest.mark.parametrize("model", ["demo", "demo/draft"])
def test_whole_models_are_draft_models(model: str) -> None:
    assert infer_method(model) == "draft_model"


def test_a_folder_with_a_gguf_file_is_a_draft_model_whatever_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "imatrix.bin").write_bytes(b"no container")
    assert infer_method(str(tmp_path)) == "draft_model"


def test_a_pytorch_file_that_is_refused_is_named_while_the_method_is_inferred(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02}.")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is a bare pickle"):
        infer_method(str(tmp_path))


@pytest.mark.parametrize(
    ("method", "config", "message"),
    [
        ("mlp_speculator", {"n_predict": 0}, "n_predict: .*config.json: expected an integer in .*, got 0"),
        ("mlp_speculator", {"n_predict": "3"}, "n_predict: .*config.json: expected an integer in .*, got '3'"),
        (
            "eagle3",
            {"speculators_config": {"proposal_methods": [{"speculative_tokens": -1}]}},
            "speculators_config.proposal_methods.speculative_tokens: .*config.json: expected an integer in .*, got -1",
        ),
    ],
)
def test_a_number_of_drafts_that_is_none_is_refused(
    tmp_path: Path, method: str, config: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        number_of_drafts(tmp_path, method)


@pytest.mark.parametrize(
    "config",
    [
        {"speculators_config": None},
        {"speculators_config": {"proposal_methods": []}},
        {"speculators_config": {"proposal_methods": [{"speculative_tokens": None}]}},
        {"speculators_config": {"proposal_methods": [{}]}},
        {"speculators_config": {"proposal_methods": {"speculative_tokens": 3}}},
        {"n_predict": 3},
        LLAMA,
    ],
)
def test_a_folder_that_says_no_number_of_drafts_has_none(tmp_path: Path, config: dict[str, Any]) -> None:
    assert number_of_drafts(tmp_path, "eagle3") is None
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert number_of_drafts(tmp_path, "eagle3") is None
    assert number_of_drafts(tmp_path, "medusa") is None


def write_tensors(file: Path, *names: str) -> None:
    header = json.dumps({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.mark.parametrize(
    "names",
    [
        ("model.mtp_emb_norm.0.weight", "lm_head.weight"),
        ("ernie.mtp_block.0.mlp.up_proj.weight",),
        ("model.layers.61.eh_proj.weight", "model.layers.61.mlp.up_proj.weight", "model.embed_tokens.weight"),
    ],
)
def test_a_folder_of_the_layer_alone_is_for_mtp(tmp_path: Path, names: tuple[str, ...]) -> None:
    write_tensors(tmp_path / "model.safetensors", *names)
    config = parse_speculative_config({"model": str(tmp_path), "num_speculative_tokens": 2})
    assert (config.method, config.num_model_steps) == ("mtp", 2)


@pytest.mark.parametrize("mark", ["model.mtp_emb_norm.0.weight", "model.layers.1.eh_proj.weight"])
def test_a_checkpoint_that_holds_a_layer_too_is_a_draft_model(tmp_path: Path, mark: str) -> None:
    write_tensors(tmp_path / "a.safetensors", mark)
    write_tensors(tmp_path / "b.safetensors", "model.layers.0.mlp.up_proj.weight")
    assert infer_method(str(tmp_path)) == "draft_model"


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]", b"\xff\0\0\0\0\0\0\0{"])
def test_damaged_files_are_left_to_the_loader(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "config.json").write_bytes(content)
    assert infer_method(str(tmp_path)) == "draft_model"
