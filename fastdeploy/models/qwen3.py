# SPDX-License-Identifier: Apache-2.0
"""Qwen 3, dense or with experts: a norm per head on q and k."""

from __future__ import annotations

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.models.architecture import Architecture, DecoderTraits


def _traits(config: ModelConfig) -> DecoderTraits:
    return DecoderTraits(qkv_bias=config.attention_bias, output_bias=config.attention_bias, qk_norm=True)


QWEN3 = Architecture("Qwen3ForCausalLM", _traits, paddle_prefix="qwen3")
QWEN3_MOE = Architecture("Qwen3MoeForCausalLM", _traits)
