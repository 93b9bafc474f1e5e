# SPDX-License-Identifier: Apache-2.0
"""Latent attention (DeepSeek-V2 report, section 2.1), as a checkpoint's config.json describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastdeploy.config.checkpoint_json import check_values
from fastdeploy.config.family_defaults import FamilyDefaults, find_defaults
from fastdeploy.config.flag import Flag, switch
from fastdeploy.config.rope_config import RopeConfig
from fastdeploy.core.errors import ConfigError

_UNIT = 8  # sizes are multiples of it
_NORM_EPS = 1e-6  # transformers and DeepSeek's code build these norms with their default, whatever rms_norm_eps says
ALWAYS_INTERLEAVED = "DeepseekV2ForCausalLM"  # has no key for it
LATENT_ARCHITECTURES = (ALWAYS_INTERLEAVED, "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")


def _multiple_up_to(high: int) -> Flag:
    return Flag(
        "int",
        f"a multiple of {_UNIT} in [{_UNIT}, {high}]",
        lambda value: type(value) is int and _UNIT <= value <= high and value % _UNIT == 0,
    )


_HEAD_SIZE = _multiple_up_to(256)
LATENT_KEYS: Mapping[str, Flag] = {
    "q_lora_rank": _multiple_up_to(2**16),
    "kv_lora_rank": _multiple_up_to(1024),
    "qk_nope_head_dim": _HEAD_SIZE,
    "qk_rope_head_dim": _HEAD_SIZE,
    "v_head_dim": _HEAD_SIZE,
    "rope_interleave": switch(),
}
"""Keys of config.json that are used, and their values."""


@dataclass(frozen=True)
class LatentConfig:
    """The attention of a model whose cache holds, per token, one latent vector and one rotated key for all heads.

    Attributes:
        q_lora_rank: size of the latent vector of the queries; None if they are projected from the hidden state.
        kv_lora_rank: size of the latent vector of keys and values.
        nope_dim: size of the part of a query or key head without a rotation.
        rope_dim: size of the rotated part; all key heads share one.
        value_dim: size of a value head.
        norm_eps: of the norms of the two latent vectors.
        scale: factor of the scores.
        is_interleaved: rotated pairs are (0, 1), (2, 3), ... instead of (0, d/2), (1, d/2 + 1), ...
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float
    scale: float
    is_interleaved: bool = True

    @property
    def row_dim(self) -> int:
        """Return the number of values that the cache of a layer holds per token."""
        return self.kv_lora_rank + self.rope_dim

    def rotated_by(self, rope: RopeConfig) -> LatentConfig:
        """Return the configuration with the factor of the scores that the rotary settings ask for.

        Raises:
            ConfigError: only a fraction of the rotated part would be rotated.
        """
        if rope.rotary_dim != self.rope_dim:
            problem = f"only 1 is supported with latent attention, got {rope.rotary_dim} / {self.rope_dim}"
            raise ConfigError("partial_rotary_factor", problem)
        return replace(self, scale=self.scale * rope.score_factor)


def parse_latent(raw: Mapping[str, Any], architecture: str, where: str) -> LatentConfig | None:
    """Read the keys of an architecture with latent attention; None for the others.

    Args:
        raw: the whole config.json.
        where: the file, as messages begin with it.

    Raises:
        ConfigError: a value is not valid or contradicts another one, or PaddleNLP wrote the file; names the key.
    """
    if architecture not in LATENT_ARCHITECTURES:
        return None
    if raw.get("paddlenlp_version") is not None:
        problem = f"{architecture} in PaddleNLP's layout is not supported; use a checkpoint in that of transformers"
        raise ConfigError("paddlenlp_version", f"{where}{problem}")
    check_values(raw, LATENT_KEYS, where)
    latent = _read(raw, find_defaults(raw, architecture), architecture)
    if raw.get("head_dim") not in (None, latent.rope_dim):
        problem = f"expected qk_rope_head_dim {latent.rope_dim}, got {raw['head_dim']}"
        raise ConfigError("head_dim", f"{where}{problem}")
    return latent


def _read(raw: Mapping[str, Any], defaults: FamilyDefaults, architecture: str) -> LatentConfig:
    nope_dim, rope_dim = (int(defaults.value(raw, key)) for key in ("qk_nope_head_dim", "qk_rope_head_dim"))
    return LatentConfig(
        q_lora_rank=defaults.value(raw, "q_lora_rank"),
        kv_lora_rank=int(defaults.value(raw, "kv_lora_rank")),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=int(defaults.value(raw, "v_head_dim")),
        norm_eps=_NORM_EPS,
        scale=float(nope_dim + rope_dim) ** -0.5,
        is_interleaved=architecture == ALWAYS_INTERLEAVED or bool(defaults.value(raw, "rope_interleave")),
    )
