# SPDX-License-Identifier: Apache-2.0
"""Downloads a checkpoint with the client of a hub."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from fastdeploy.core.errors import ConfigError

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
    """

    title: str
    package: str
    module: str
    name_argument: str
    default_branch: str

    def client(self) -> Callable[..., object]:
        """Return `snapshot_download`; raise ImportError if the client is missing or too old."""
        try:
            found: Callable[..., object] = importlib.import_module(self.module).snapshot_download
        except AttributeError as error:
            raise ImportError(str(error)) from None
        return found


HUBS = {
    "HUGGINGFACE": Hub("the Hugging Face hub", "huggingface_hub", "huggingface_hub", "repo_id", "main"),
    "MODELSCOPE": Hub("ModelScope", "modelscope", "modelscope.hub.snapshot_download", "model_id", "master"),
    "AISTUDIO": Hub("AI Studio", "aistudio-sdk>=0.3", "aistudio_sdk.snapshot_download", "repo_id", "master"),
}


def download(name: str, revision: str, source: str, field: str = "model") -> str:
    """Return the local directory of a hub's repository, after downloading what is missing.

    Args:
        name: name of the repository, such as `owner/model`.
        revision: branch, tag or commit; empty for the hub's default branch.
        source: key of HUBS.
        field: the flag that gave the name, for errors.

    Raises:
        ConfigError: the source is unknown, its client is not installed, or the download failed.
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
    try:
        return str(snapshot_download(**{hub.name_argument: name}, revision=branch, allow_patterns=_PATTERNS))
    except Exception as error:  # each client has its own errors for bad names, missing repositories, no network
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            field,
            f"{name} is not a local directory, and the download of its revision {branch} from {hub.title} "
            f"(FD_MODEL_SOURCE={source}) failed: {reason}",
        ) from None
