# SPDX-License-Identifier: Apache-2.0
"""The tiny GGUF files of tests/golden/gguf, which scripts/make_gguf_files.py writes, and their references."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy.gguf.file import GGUFFile
from fastdeploy.gguf.model_config import make_config_json

WHERE = "folder/model.gguf"
FOLDER = Path(__file__).resolve().parent.parent / "golden" / "gguf"
NAMES = sorted(path.stem for path in FOLDER.glob("*.gguf"))
WITH_REFERENCE = sorted(path.stem for path in FOLDER.glob("*.npz"))


def gguf_path(name: str) -> Path:
    """Return a file by its name without ending."""
    return FOLDER / f"{name}.gguf"


def reference(name: str) -> dict[str, Any]:
    """Return what transformers computed: tokens, rows, logprobs, and the config.json of its model."""
    with np.load(FOLDER / f"{name}.npz") as values:
        found: dict[str, Any] = dict(values)
    found["config"] = json.loads(str(found["config"]))
    return found


def config_json(name: str, **changes: Any) -> dict[str, Any]:
    """Return config.json of a file with other metadata, of which None removes a key."""
    file = GGUFFile.open(gguf_path(name))
    return make_config_json(changed(file, changes), file.tensors, WHERE)


def without_attention(name: str, **changes: Any) -> dict[str, Any]:
    """Return config.json of a file without the tensors that show how many heads of which size there are."""
    file = GGUFFile.open(gguf_path(name))
    tensors = {key: tensor for key, tensor in file.tensors.items() if ".attn_" not in key}
    return make_config_json(changed(file, changes), tensors, WHERE)


def changed(file: GGUFFile, changes: dict[str, Any]) -> dict[str, Any]:
    """Return metadata with changes; a key without a namespace is the architecture's."""
    architecture = file.metadata["general.architecture"]
    metadata = dict(file.metadata)
    for key, value in changes.items():
        metadata[key if key.startswith(("general.", "tokenizer.")) else f"{architecture}.{key}"] = value
    return {key: value for key, value in metadata.items() if value is not None}
