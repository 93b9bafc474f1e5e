# SPDX-License-Identifier: Apache-2.0
"""Llama 2 and 3."""

from __future__ import annotations

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.models.architecture import Architecture, DecoderTraits


def _traits(config: ModelConfig) -> DecoderTraits:
    return DecoderTraits(qkv_bias=config.attention_bias, output_bias=config.attention_bias, mlp_bias=config.mlp_bias)


LLAMA = Architecture("LlamaForCausalLM", _traits, paddle_prefix="llama")
