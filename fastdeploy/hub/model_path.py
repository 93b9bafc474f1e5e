# SPDX-License-Identifier: Apache-2.0
"""Finds the directory of a model."""

from __future__ import annotations

from pathlib import Path

from fastdeploy.config.env import read_env
from fastdeploy.config.model_config import local_model_path
from fastdeploy.core.errors import ConfigError
from fastdeploy.hub.clients import DEFAULT_REVISIONS, download


def resolve_model_path(name: str, revision: str = "", field: str = "model") -> str:
    """Return the directory of a model: a local one, a demonstration model, or a name on the hub of FD_MODEL_SOURCE.

    Demonstration models are `demo`, `demo/draft` and `demo/moe`.

    Args:
        revision: branch, tag or commit on the hub; empty for its default branch.
        field: the flag that gave the name, for errors.

    Raises:
        ConfigError: there is no such model, a local model is given a revision, or the hub cannot be reached.
    """
    path = local_model_path(name)
    if path is not None:
        if revision not in DEFAULT_REVISIONS:
            raise ConfigError("revision", f"{revision!r} needs the name of a hub's model; {name} is a local directory")
        return str(path)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        raise ConfigError(field, f"{name}: GGUF checkpoints are not supported")
    if path.exists() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ConfigError(field, f"{name} is not a directory")
    return download(name, revision, read_env().model_source, field)
