# SPDX-License-Identifier: Apache-2.0
"""Finds the directory of a model."""

from __future__ import annotations

from pathlib import Path

from fastdeploy.config.env import read_env
from fastdeploy.config.model_config import local_model_path
from fastdeploy.core.errors import ConfigError, unset_variable
from fastdeploy.gguf.folder import gguf_folder
from fastdeploy.hub import gguf_choice, smollm2
from fastdeploy.hub.clients import DEFAULT_REVISIONS, download


def resolve_model_path(
    name: str, revision: str = "", field: str = "model", gguf_file: str = "", takes_torch: bool = False
) -> str:
    """Return the directory of a model: a local one, a demonstration model, or a name on the hub of FD_MODEL_SOURCE.

    Demonstration models are `demo`, its parts such as `demo/draft`, and `smollm2`, which is downloaded once. That of a
    GGUF file is a folder in the cache directory with what the file says about the model.

    Args:
        revision: branch, tag or commit on the hub; empty for its default branch.
        field: the flag that gave the name, for errors.
        gguf_file: path of a GGUF file in the directory or repository.
        takes_torch: whether PyTorch files are downloaded from a hub if there is no safetensors file.

    Raises:
        ConfigError: there is no such model, a local model is given a revision, or the hub cannot be reached.
    """
    path = find_local_model(name, field, gguf_file)
    if revision not in DEFAULT_REVISIONS and (path is not None or name == smollm2.NAME):
        kind = "a local directory" if path is not None and path.is_dir() else "a GGUF file"
        raise ConfigError("revision", f"{revision!r} needs the name of a hub's model; {name} is {kind}")
    return str(folder_of(_fetch(name, revision, field, gguf_file, takes_torch) if path is None else path))


def folder_of(path: Path) -> Path:
    """Return the directory that is read for what `find_local_model` finds.

    Raises:
        ConfigError: it is a GGUF file that is not valid, or whose model is not supported.
    """
    if path.is_dir():
        return path
    is_smollm2 = path == smollm2.SMOLLM2.path
    return gguf_folder(path, smollm2.SMOLLM2.sampling) if is_smollm2 else gguf_folder(path)


def local_folder(name: str, gguf_file: str = "") -> str | None:
    """Return the directory that is read for a local model, or None if there is none; raises as both functions here."""
    path = find_local_model(name, gguf_file=gguf_file)
    return None if path is None else str(folder_of(path))


def find_local_model(name: str, field: str = "model", gguf_file: str = "") -> Path | None:
    """Return the directory or the GGUF file of a model that is there, or None if it may be downloaded.

    Raises:
        ConfigError: it is neither there nor a name of something to download, or several GGUF files could be meant.
    """
    folder = local_model_path(name)
    if folder is not None:
        named = gguf_choice.named_model(folder, gguf_file) if gguf_file else gguf_choice.only_model(folder, field)
        return named or folder
    path = Path(name).expanduser()
    is_file = gguf_choice.is_gguf_file(path, field)
    if gguf_file and (is_file or name == smollm2.NAME):
        raise ConfigError(gguf_choice.FLAG, f"{name} is a GGUF file itself, got {gguf_file!r}")
    if is_file:
        return path
    if name == smollm2.NAME:
        return smollm2.SMOLLM2.path if smollm2.SMOLLM2.is_cached else None
    if not path.exists() and (hint := unset_variable(name)):
        raise ConfigError(field, f"{name} is not the name of a model{hint}")
    is_path = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if path.exists() or is_path or (name.endswith(gguf_choice.SUFFIX) and not gguf_file):
        raise ConfigError(field, f"{name} is neither a directory nor a GGUF file")
    return None


def _fetch(name: str, revision: str, field: str, gguf_file: str, takes_torch: bool) -> Path:
    """Return the directory or the GGUF file of a model that is not local, after downloading it."""
    if name == smollm2.NAME:
        return smollm2.fetch(smollm2.SMOLLM2, field)
    return download(name, revision, read_env().model_source, field, gguf_file, takes_torch)
