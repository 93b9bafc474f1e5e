# SPDX-License-Identifier: Apache-2.0
"""Fetches a checkpoint by its name through the client of the hub that FD_MODEL_SOURCE names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from fastdeploy.core.errors import ConfigError

DEFAULT_REVISIONS = ("", "main", "master", "default")  # each hub has its own name for it
_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.vocab", "*.tiktoken", "*.jinja"]


@dataclass(frozen=True)
class Hub:
    """A hub's client.

    Attributes:
        title: the hub as people call it.
        package: what to install.
        module: holds the client's `snapshot_download`.
        name_argument: of that function, for the name of the repository.
        default_branch: what DEFAULT_REVISIONS mean.
    """

    title: str
    package: str
    module: str
    name_argument: str
    default_branch: str

    def client(self) -> Callable[..., object]:
        """Return `snapshot_download`; raise ImportError if the client is not installed, or too old."""
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
    """Return the local folder of a hub's repository, fetching what is missing.

    Args:
        name: of the repository, such as `owner/model`.
        revision: branch, tag or commit; empty for the hub's default branch.
        source: key of HUBS.
        field: the flag that gave the name, for errors.

    Raises:
        ConfigError: an unknown source, a client that is not installed, or whatever the client could not do.
    """
    if source not in HUBS:
        raise ConfigError("FD_MODEL_SOURCE", f"expected one of {', '.join(HUBS)}, got {source!r}")
    hub = HUBS[source]
    try:
        snapshot_download = hub.client()
    except ImportError:
        raise ConfigError(
            field,
            f"{name} is not a local directory, and to look for it at {hub.title} (FD_MODEL_SOURCE={source}) "
            f"install its client: pip install '{hub.package}'",
        ) from None
    branch = hub.default_branch if revision in DEFAULT_REVISIONS else revision
    try:
        return str(snapshot_download(**{hub.name_argument: name}, revision=branch, allow_patterns=_PATTERNS))
    except Exception as error:  # clients raise many kinds: bad name, no network, no such repository
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            field,
            f"{name} is not a local directory, and {hub.title} (FD_MODEL_SOURCE={source}) "
            f"did not deliver its revision {branch}: {reason}",
        ) from None
