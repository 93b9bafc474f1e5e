# SPDX-License-Identifier: Apache-2.0
"""ERNIE 4.5: interleaved rotary pairs, and one option for all biases."""

from __future__ import annotations

from dataclasses import replace

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.models.architecture import Architecture, DecoderTraits


def _traits(config: ModelConfig) -> DecoderTraits:
    bias = config.use_bias
    return DecoderTraits(qkv_bias=bias, output_bias=bias, mlp_bias=bias, interleaved_rotary=True)


ERNIE4_5 = Architecture(
    "Ernie4_5ForCausalLM",
    _traits,
    paddle_prefix="ernie",
    has_grouped_qkv=False,
)
ERNIE4_5_MOE = replace(
    ERNIE4_5,
    name="Ernie4_5_MoeForCausalLM",
    correction_bias="moe_statics.e_score_correction_bias",
    correction_bias_ndim=2,
)
