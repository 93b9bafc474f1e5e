# SPDX-License-Identifier: Apache-2.0
"""A model of random weights with latent attention and the demonstration model's tokenizer, which can be served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import paddle
from safetensors.paddle import load_file, save_file

from fastdeploy.hub.model_path import resolve_model_path
from tests.models.latent_forms import write_form
from tests.models.mtp_training import draw

MAX_CONTEXT = 1024
_LAST, _MTP = "model.layers.1.", "model.layers.2."


def save_latent_model(
    folder: Path, max_context: int = MAX_CONTEXT, has_mtp_layer: bool = False, form: str = "groups of V3"
) -> Path:
    """Write a model of a form of `tests.models.latent_forms`.

    Its layer for multi-token prediction has the weights of its last layer, beside random ones.
    """
    write_form(folder, form, vocab_size=4096, max_position_embeddings=max_context)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(Path(resolve_model_path("demo")) / file, folder)
    if has_mtp_layer:
        _add_mtp_layer(folder)
    return folder


def _add_mtp_layer(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    tensors = load_file(folder / "model.safetensors")
    paddle.seed(3)
    hidden = config["hidden_size"]
    layer = {name.replace(_LAST, _MTP): tensor for name, tensor in tensors.items() if name.startswith(_LAST)}
    layer[f"{_MTP}eh_proj.weight"] = draw([hidden, 2 * hidden]).astype("bfloat16")
    for name in ("enorm", "hnorm", "shared_head.norm"):
        layer[f"{_MTP}{name}.weight"] = tensors["model.norm.weight"]
    save_file(tensors | layer, folder / "model.safetensors", {"format": "pt"})
