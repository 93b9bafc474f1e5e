# SPDX-License-Identifier: Apache-2.0
"""The method that a drafting model is for is read off its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastdeploy.config.drafting_checkpoint import infer_method
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.errors import ConfigError


def write_tensors(file: Path, *names: str) -> None:
    header = json.dumps({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.mark.parametrize("model", ["demo", "demo/draft", "facebook/opt-125m", "/nowhere"])
def test_whole_models_and_what_cannot_be_read_are_draft_models(model: str) -> None:
    assert infer_method(model) == "draft_model"


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


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, "mlp_speculator"),
        ({"model_type": "mlp_speculator"}, "mlp_speculator"),
        ({"architectures": ["EagleLlamaForCausalLM"], "model_type": "llama"}, "eagle"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["MedusaModel"]}, "medusa"),
    ],
)
def test_other_methods_are_refused_by_their_name(tmp_path: Path, config: dict[str, object], method: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"^speculative_config.method: '{method}' is not available yet"):
        parse_speculative_config({"model": str(tmp_path), "num_speculative_tokens": 2})


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]", b"\xff\0\0\0\0\0\0\0{"])
def test_damaged_files_are_left_to_the_loader(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "config.json").write_bytes(content)
    assert infer_method(str(tmp_path)) == "draft_model"


@pytest.mark.parametrize(
    ("names", "method"),
    [
        (("fc.weight", "layers.0.self_attn.q_proj.weight", "embed_tokens.weight"), "eagle"),
        (("model.fc.weight", "model.layers.0.mlp.up_proj.weight"), "eagle"),
        (("fc.weight", "midlayer.self_attn.q_proj.weight", "d2t", "t2d", "norm.weight", "lm_head.weight"), "eagle3"),
        (("0.0.linear.weight", "0.0.linear.bias", "0.1.weight", "1.0.linear.weight"), "medusa"),
        (("medusa_head.0.0.linear.weight",), "medusa"),
    ],
)
def test_published_heads_are_known_by_their_tensors(tmp_path: Path, names: tuple[str, ...], method: str) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tensors(tmp_path / "model.safetensors", *names)
    with pytest.raises(ConfigError, match=f"^speculative_config.method: '{method}' is not available yet"):
        parse_speculative_config({"model": str(tmp_path), "num_speculative_tokens": 2})
