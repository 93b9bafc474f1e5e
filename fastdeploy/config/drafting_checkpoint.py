# SPDX-License-Identifier: Apache-2.0
"""Infers the speculation method from the checkpoint of a drafting model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastdeploy.config.model_config import local_model_path

PLANNED_METHODS = ("eagle3", "eagle", "medusa", "hydra", "mlp_speculator")  # eagle3 first: it contains eagle
ERNIE_MARK = ".mtp_"  # in the name of every tensor of ERNIE's layer for multi-token prediction
_LAYER = re.compile(r".*\.layers\.\d+\.")  # DeepSeek's layer for multi-token prediction is one of these with an eh_proj


def infer_method(model: str) -> str:
    """Return the method that drafts with `model`, by its config.json and the names of its tensors.

    A model on a hub, which is not downloaded here, and an unreadable one are taken for draft models; loading them
    reports what is wrong.
    """
    folder = local_model_path(model)
    return "draft_model" if folder is None else infer_method_of(folder)


def infer_method_of(folder: Path) -> str:
    """Return the method that drafts with the checkpoint in `folder`."""
    config = _read_json(folder / "config.json")
    kind = f"{config.get('architectures')} {config.get('model_type')}".lower().replace("_", "")
    for method in PLANNED_METHODS:
        if method.replace("_", "") in kind:
            return method
    names = list(_tensor_names(folder))
    layers = {match.group() for match in map(_LAYER.match, names) if match}
    for_mtp = {layer for layer in layers if f"{layer}eh_proj.weight" in names}
    has_mtp = for_mtp or any(ERNIE_MARK in name for name in names)
    return "mtp" if has_mtp and layers == for_mtp else "draft_model"


def _tensor_names(folder: Path) -> Iterator[str]:
    """Yield the names in the headers of the folder's safetensors files."""
    for file in sorted(folder.glob("*.safetensors")):
        yield from _read_json(file, has_length=True)


def _read_json(file: Path, has_length: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file, or after its length in the first 8 bytes; empty if there is none."""
    try:
        with file.open("rb") as stream:
            value = json.loads(stream.read(int.from_bytes(stream.read(8), "little") if has_length else -1))
    except (OSError, ValueError, OverflowError, MemoryError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
