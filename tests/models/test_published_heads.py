# SPDX-License-Identifier: Apache-2.0
"""Heads with the names and shapes of published files are found for their targets; the files hold only zeros."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.head_config import HEAD_METHODS
from fastdeploy.config.model_config import ModelConfig, parse_model_config
from fastdeploy.config.row_head_config import MLPSpeculatorSizes
from fastdeploy.models.heads.load_eagle import find_head
from fastdeploy.models.heads.load_row_head import find_row_head
from tests.config.published_heads import HEADS, Head, write_head

HEAD_DIM = 128
WITH_LAYERS = {  # name -> vocabulary and layers of the target
    "yuhuili/EAGLE-LLaMA3-Instruct-8B": (128_256, 32),
    "yuhuili/EAGLE-Vicuna-13B-v1.3": (32_000, 40),
    "an EAGLE head converted for vLLM": (128_256, 32),
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": (128_256, 32),
    "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3": (128_256, 32),
    "EAGLE 3 for a wider target": (128_256, 40),
}
WITHOUT_LAYERS = {
    "ibm-ai-platform/llama3-8b-accelerator": 128_256,
    "ibm-ai-platform/llama3-70b-accelerator": 128_256,
    "FasterDecoding/medusa-vicuna-7b-v1.3": 32_000,
    "Medusa of vLLM": 32_000,
}
FORMATS = ("model.safetensors", "pytorch_model.bin")


def target(hidden_size: int, vocab_size: int, num_layers: int) -> ModelConfig:
    """Return a target of this size."""
    sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size, "num_hidden_layers": num_layers}
    heads = {"num_attention_heads": hidden_size // HEAD_DIM, "max_position_embeddings": 8192}
    config = {"architectures": ["LlamaForCausalLM"], "intermediate_size": 4 * hidden_size, "hidden_act": "silu"}
    return parse_model_config({**config, **sizes, **heads}, {}, dtype="bfloat16")


def layer_keys(head: Head, vocab_size: int) -> dict[str, Any]:
    """Return the keys of config.json that say the sizes of the tensors."""
    shapes = {name.removeprefix("model.").replace("midlayer", "layers.0"): s for name, s in head.shapes.items()}
    rows = {part: shapes[f"layers.0.self_attn.{part}_proj.weight"][0] // HEAD_DIM for part in "qk"}
    return {
        "hidden_size": shapes["fc.weight"][0],
        "intermediate_size": shapes["layers.0.mlp.gate_proj.weight"][0],
        "num_hidden_layers": 1,
        "num_attention_heads": rows["q"],
        "num_key_value_heads": rows["k"],
        "vocab_size": vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
    }


@pytest.mark.parametrize("file", FORMATS)
@pytest.mark.parametrize("name", WITH_LAYERS)
def test_a_published_head_of_eagle_is_found_for_its_target(name: str, file: str, tmp_path: Path) -> None:
    head, (vocab_size, num_layers) = HEADS[name], WITH_LAYERS[name]
    keys = layer_keys(head, vocab_size)
    width = 5120 if "wider" in name else keys["hidden_size"]
    more: dict[str, Any] = {"draft_vocab_size": 32_000, "target_hidden_size": width} if head.method == "eagle3" else {}
    written = {**head.config, **keys, **more}
    if "transformer_layer_config" in head.config:
        written = {**head.config, **more, "transformer_layer_config": {**keys, "model_type": "llama"}}
    write_head(tmp_path, replace(head, config=written), file)
    found = find_head(str(tmp_path), head.method, target(width, vocab_size, num_layers))
    assert head.method in HEAD_METHODS
    assert found.has_fc_bias == ("fc.bias" in head.shapes)
    assert found.has_reduced_vocabulary == ("d2t" in head.shapes)
    assert len(found.taps) == (head.shapes["fc.weight"][1] // width if head.method == "eagle3" else 0)


@pytest.mark.parametrize("file", FORMATS)
@pytest.mark.parametrize("name", WITHOUT_LAYERS)
def test_a_published_head_without_layers_is_found_for_its_target(name: str, file: str, tmp_path: Path) -> None:
    head, vocab_size = HEADS[name], WITHOUT_LAYERS[name]
    keys: dict[str, Any] = {}
    if head.method == "mlp_speculator":
        is_tied = "speculator.proj.2.weight" not in head.shapes
        keys = {"emb_dim": 4096, "inner_dim": 3072, "vocab_size": vocab_size, "tie_weights": is_tied}
    write_head(tmp_path, replace(head, config={**head.config, **keys}), file)
    found = find_row_head(str(tmp_path), head.method, target(4096, vocab_size, 32))
    assert found.num_drafts == head.num_drafts
    assert isinstance(found, MLPSpeculatorSizes) == (head.method == "mlp_speculator")
