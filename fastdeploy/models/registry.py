# SPDX-License-Identifier: Apache-2.0
"""Architectures by their name in config.json."""

from __future__ import annotations

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.architecture import Architecture
from fastdeploy.models.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from fastdeploy.models.ernie4_5 import ERNIE4_5, ERNIE4_5_MOE
from fastdeploy.models.glm4_moe import GLM4_MOE, GLM4_MOE_LITE
from fastdeploy.models.llama import LLAMA
from fastdeploy.models.qwen2 import QWEN2
from fastdeploy.models.qwen3 import QWEN3, QWEN3_MOE
from fastdeploy.ops.registry import missing_kernels, selected_backend

_OF_DEEPSEEK = (DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE)
ARCHITECTURES: dict[str, Architecture] = {
    arch.name: arch for arch in (LLAMA, QWEN2, QWEN3, QWEN3_MOE, ERNIE4_5, ERNIE4_5_MOE, GLM4_MOE, *_OF_DEEPSEEK)
}
_EXPERT_OPERATORS = ("route", "experts_up", "experts_down")
_LATENT_OPERATORS = ("append_latent_attention", "project_heads")


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


def check_device(config: ModelConfig) -> None:
    """Check that the selected backend can run a model.

    Raises:
        ConfigError: it has no kernel for an operator of the model, or its kernels do not take the model's sizes.
    """
    backend = selected_backend()
    of_experts = _EXPERT_OPERATORS if config.experts is not None else ()
    of_attention = _LATENT_OPERATORS if config.latent is not None else ()
    missing = missing_kernels((*of_experts, *of_attention))
    if missing:
        message = f"{config.architecture} needs {', '.join(missing)}, which {backend.device} does not have yet"
        raise ConfigError("architectures", message)
    backend.check_model(config)
