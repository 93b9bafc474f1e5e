# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2, and DeepSeek-V3 with R1: latent attention and experts."""

from __future__ import annotations

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.models.architecture import Architecture, DecoderTraits


def latent_traits(config: ModelConfig) -> DecoderTraits:
    """Return the options of models with latent attention, whose projections from and to hidden states may be biased."""
    assert config.latent is not None, "these architectures have latent attention"
    return DecoderTraits(output_bias=config.attention_bias, interleaved_rotary=config.latent.is_interleaved)


DEEPSEEK_V2 = Architecture("DeepseekV2ForCausalLM", latent_traits)
DEEPSEEK_V3 = Architecture(
    "DeepseekV3ForCausalLM",
    latent_traits,
    correction_bias="gate.e_score_correction_bias",
    has_nextn_layers=True,
)
