# SPDX-License-Identifier: Apache-2.0
"""Downloads a checkpoint with the client of a hub."""

from __future__ import annotations

import glob
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fastdeploy.config.torch_files import find_torch_files, torch_weight_names
from fastdeploy.core.errors import ConfigError
from fastdeploy.hub.gguf_choice import check_file_name, download_patterns, models_among, named_model, refuse_choice

DEFAULT_REVISIONS = ("", "main", "master", "default")  # names of a hub's default branch
_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.vocab", "*.tiktoken", "*.jinja"]


@dataclass(frozen=True)
class Hub:
    """A hub's client.

    Attributes:
        title: name of the hub.
        package: what to install for the client.
        module: module of the client's `snapshot_download`.
        name_argument: argument of that function for the name of the repository.
        default_branch: the hub's own name of its default branch.
        list_files: returns the paths of the files of a repository in a revision.
    """

    title: str
    package: str
    module: str
    name_argument: str
    default_branch: str
    list_files: Callable[[str, str], list[str]]

    def client(self) -> Callable[..., object]:
        """Return `snapshot_download`; raise ImportError if the client is missing or too old."""
        try:
            found: Callable[..., object] = importlib.import_module(self.module).snapshot_download
        except AttributeError as error:
            raise ImportError(str(error)) from None
        return found


def _files_of_hugging_face(name: str, revision: str) -> list[str]:
    return list(importlib.import_module("huggingface_hub").list_repo_files(name, revision=revision))


def _files_of_modelscope(name: str, revision: str) -> list[str]:
    api = importlib.import_module("modelscope.hub.api").HubApi()
    return [file["Path"] for file in api.get_model_files(name, revision=revision, recursive=True)]


def _files_of_ai_studio(name: str, revision: str) -> list[str]:
    files, _ = importlib.import_module("aistudio_sdk.snapshot_download").get_model_files(name, revision)
    return [file["path"] for file in files]


HUBS = {
    "HUGGINGFACE": Hub(
        "the Hugging Face hub", "huggingface_hub", "huggingface_hub", "repo_id", "main", _files_of_hugging_face
    ),
    "MODELSCOPE": Hub(
        "ModelScope",
        "modelscope",
        "modelscope.hub.snapshot_download",
        "model_id",
        "master",
        _files_of_modelscope,
    ),
    "AISTUDIO": Hub(
        "AI Studio",
        "aistudio-sdk>=0.3",
        "aistudio_sdk.snapshot_download",
        "repo_id",
        "master",
        _files_of_ai_studio,
    ),
}


def download(
    name: str, revision: str, source: str, field: str = "model", gguf_file: str = "", takes_torch: bool = False
) -> Path:
    """Return the local directory of a hub's repository, or a GGUF file of it, after downloading what is missing.

    Args:
        name: name of the repository, such as `owner/model`.
        revision: branch, tag or commit; empty for the hub's default branch.
        source: key of HUBS.
        field: the flag that gave the name, for errors.
        gguf_file: path of a GGUF file in the repository, which is then all that is downloaded, with its other parts.
        takes_torch: whether PyTorch files are downloaded, without the state of a training, if there is no safetensors
            file.

    Raises:
        ConfigError: the source is unknown, its client is not installed, the download failed, or the repository has no
            such file, or only GGUF files and none is chosen.
    """
    if source not in HUBS:
        raise ConfigError("FD_MODEL_SOURCE", f"expected one of {', '.join(HUBS)}, got {source!r}")
    hub = HUBS[source]
    try:
        snapshot_download = hub.client()
    except ImportError:
        raise ConfigError(
            field,
            f"{name} is not a local directory; to download it from {hub.title} (FD_MODEL_SOURCE={source}), "
            f"install the hub's client: pip install '{hub.package}'",
        ) from None
    branch = hub.default_branch if revision in DEFAULT_REVISIONS else revision
    if gguf_file:
        check_file_name(gguf_file)

    def fetch(patterns: list[str]) -> Path:
        return Path(str(snapshot_download(**{hub.name_argument: name}, revision=branch, allow_patterns=patterns)))

    try:
        folder = fetch(download_patterns(gguf_file) if gguf_file else _PATTERNS)
        has_weights = _has_weights(folder, gguf_file)
        takes_torch = takes_torch and not gguf_file and not has_weights
        wanted = _downloaded_torch_files(folder) if takes_torch else []  # found without asking the hub, as when offline
        files = [] if has_weights or wanted else hub.list_files(name, branch)
        if takes_torch and not models_among(files):
            wanted = wanted or torch_weight_names(files)
        if wanted:
            return fetch([glob.escape(file) for file in wanted])
    except Exception as error:  # each client has its own errors for bad names, missing repositories, no network
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            field,
            f"{name} is not a local directory, and the download of its revision {branch} from {hub.title} "
            f"(FD_MODEL_SOURCE={source}) failed: {reason}",
        ) from None
    if gguf_file:
        return named_model(folder, gguf_file, files, name)
    if models_among(files):
        refuse_choice(f"{name} has no *.safetensors; choose a GGUF file with --gguf-file", files)
    return folder


def _has_weights(folder: Path, gguf_file: str) -> bool:
    """Return whether what was to be downloaded is there."""
    return (folder / gguf_file).is_file() if gguf_file else any(folder.glob("*.safetensors"))


def _downloaded_torch_files(folder: Path) -> list[str]:
    """Return the names of the PyTorch files that were downloaded; none if one of them is missing."""
    try:
        return [file.name for file in find_torch_files(folder)]
    except ConfigError:
        return []
