# SPDX-License-Identifier: Apache-2.0
"""GLM 4.5: norms of q and k heads in some models, and no bias after the attention. GLM 4.7 Flash: latent attention."""

from __future__ import annotations

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.models.architecture import Architecture, DecoderTraits
from fastdeploy.models.deepseek import latent_traits


def _traits(config: ModelConfig) -> DecoderTraits:
    return DecoderTraits(qkv_bias=config.attention_bias, qk_norm=config.use_qk_norm)


GLM4_MOE = Architecture(
    "Glm4MoeForCausalLM",
    _traits,
    correction_bias="gate.e_score_correction_bias",
    has_nextn_layers=True,
)

GLM4_MOE_LITE = Architecture(
    "Glm4MoeLiteForCausalLM",
    latent_traits,
    correction_bias="gate.e_score_correction_bias",
    has_nextn_layers=True,
)
