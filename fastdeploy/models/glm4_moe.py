# SPDX-License-Identifier: Apache-2.0
"""GLM 4.5: norms of q and k heads in some models, and no bias after the attention."""

from __future__ import annotations

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.models.architecture import Architecture, DecoderTraits


def _traits(config: ModelConfig) -> DecoderTraits:
    return DecoderTraits(qkv_bias=config.attention_bias, qk_norm=config.use_qk_norm)


GLM4_MOE = Architecture(
    "Glm4MoeForCausalLM",
    _traits,
    correction_bias="gate.e_score_correction_bias",
    has_nextn_layers=True,
)
