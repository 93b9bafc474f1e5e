# SPDX-License-Identifier: Apache-2.0
"""Qwen 2 and 2.5: q, k and v always have biases."""

from __future__ import annotations

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.models.architecture import Architecture, DecoderTraits


def _traits(_config: ModelConfig) -> DecoderTraits:
    return DecoderTraits(qkv_bias=True)


QWEN2 = Architecture("Qwen2ForCausalLM", _traits, paddle_prefix="qwen2")
