# SPDX-License-Identifier: Apache-2.0
"""Architectures by their name in config.json."""

from __future__ import annotations

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.architecture import Architecture
from fastdeploy.models.ernie4_5 import ERNIE4_5
from fastdeploy.models.llama import LLAMA
from fastdeploy.models.qwen2 import QWEN2
from fastdeploy.models.qwen3 import QWEN3

ARCHITECTURES: dict[str, Architecture] = {arch.name: arch for arch in (LLAMA, QWEN2, QWEN3, ERNIE4_5)}


def find_architecture(config: ModelConfig) -> Architecture:
    """Return the architecture that the configuration names.

    Raises:
        ConfigError: it is not supported; the message lists the supported ones.
    """
    try:
        return ARCHITECTURES[config.architecture]
    except KeyError:
        supported = ", ".join(ARCHITECTURES)
        raise ConfigError(
            "architectures", f"'{config.architecture}' is not supported (supported: {supported})"
        ) from None
