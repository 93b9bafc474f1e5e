# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding, as a checkpoint's config.json describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log
from typing import Any, Literal, cast, get_args

from fastdeploy.config.checkpoint_json import ROPE_KEYS, check_values
from fastdeploy.config.family_defaults import FamilyDefaults
from fastdeploy.core.errors import ConfigError

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "freq_factors"]
SUPPORTED_ROPE_KINDS: tuple[RopeKind, ...] = get_args(RopeKind)
_PADDLENLP_KINDS = {"dynamic_ntk": "dynamic", "ntk": "default"}  # ntk: with a larger base


@dataclass(frozen=True)
class RopeConfig:
    """What the table of cosines and sines depends on, except for the number of positions.

    Attributes:
        kind: how inverse frequencies follow from the base.
        theta: base of the frequencies.
        rotary_dim: number of leading dimensions of a head that are rotated, even.
        max_position_embeddings: context length of config.json, beyond which kind dynamic scales.
        factor: scaling factor of the context; 1 for kind default.
        original_max_positions: context length of the pretraining, for llama3 and yarn.
        low_freq_factor, high_freq_factor: llama3's band, in rotations within the original context.
        beta_fast, beta_slow: yarn's band, in rotations within the original context.
        truncate: yarn rounds its band to whole dimensions.
        attention_factor: yarn's multiplier of cosines and sines; 1 for other kinds.
        freq_factors: divisor of each inverse frequency, for kind freq_factors.
        score_factor: multiplier of the scores of latent attention; other families do not use it.
    """

    kind: RopeKind
    theta: float
    rotary_dim: int
    max_position_embeddings: int
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    freq_factors: tuple[float, ...] = ()
    score_factor: float = field(default=1.0, repr=False)  # repr names the checkpoint, LatentConfig.scale holds it

    @property
    def max_context_len(self) -> int:
        """Return the longest context that the checkpoint supports, with scaling."""
        if self.kind in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.factor)
        if self.kind == "yarn":
            return max(self.max_position_embeddings, int(self.original_max_positions * self.factor))
        return self.max_position_embeddings


def parse_rope(
    raw: Mapping[str, Any],
    *,
    head_dim: int,
    max_position_embeddings: int,
    defaults: FamilyDefaults,
    where: str = "",
) -> RopeConfig:
    """Read the rotary settings of config.json as transformers 4, transformers 5 or PaddleNLP writes them.

    Args:
        raw: the whole config.json, whose values outside of the object for rotary embeddings have been checked.
        head_dim: size of an attention head, or of the rotated part of one that has two parts.
        max_position_embeddings: context length of config.json.
        defaults: of the family.
        where: the file, as messages begin with it.

    Raises:
        ConfigError: a kind is not supported, or a value is missing or not valid.
    """
    params = _rope_parameters(raw)
    check_values(params, ROPE_KEYS, where, "rope_scaling")
    kind = _rope_kind(params)
    partial = float(_first(params.get("partial_rotary_factor"), defaults.value(raw, "partial_rotary_factor")))
    rotary_dim = _rotary_dim(head_dim, partial)
    base = float(_first(params.get("rope_theta"), defaults.value(raw, "rope_theta")))
    if base <= 1.0:
        raise ConfigError("rope_theta", f"expected a base above 1, got {base}")
    is_ntk = kind == "default" and raw.get("rope_scaling_type") == "ntk"
    if rotary_dim == 2 and (is_ntk or kind == "dynamic"):
        raise ConfigError("rope_scaling", "a larger base needs more than two rotated dimensions")
    if is_ntk:
        return _ntk_rope(base, rotary_dim, max_position_embeddings, _factor(params, "ntk", 1.0))
    freq_factors = _freq_factors(params, kind, rotary_dim)
    if kind in ("default", "freq_factors"):
        return RopeConfig(kind, base, rotary_dim, max_position_embeddings, freq_factors=freq_factors)
    original = _first(
        raw.get("original_max_position_embeddings"),
        params.get("original_max_position_embeddings"),
        max_position_embeddings,
    )
    factor = _factor(params, kind, max_position_embeddings / original)
    if kind == "llama3" and _number(params, kind, "low_freq_factor") >= _number(params, kind, "high_freq_factor"):
        raise ConfigError("rope_scaling", "expected a low_freq_factor below the high_freq_factor")
    return RopeConfig(
        kind,
        base,
        rotary_dim,
        max_position_embeddings,
        factor=factor,
        original_max_positions=int(original),
        low_freq_factor=_number(params, kind, "low_freq_factor") if kind == "llama3" else 1.0,
        high_freq_factor=_number(params, kind, "high_freq_factor") if kind == "llama3" else 4.0,
        beta_fast=float(params.get("beta_fast") or 32.0),
        beta_slow=float(params.get("beta_slow") or 1.0),
        truncate=bool(params.get("truncate", True)),
        attention_factor=_yarn_attention_factor(params, factor) if kind == "yarn" else 1.0,
        score_factor=_magnitude(factor, float(params.get("mscale_all_dim") or 0.0)) ** 2,
    )


def _rotary_dim(head_dim: int, partial: float) -> int:
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim > head_dim or rotary_dim % 2:
        raise ConfigError(
            "partial_rotary_factor", f"{partial} of head_dim {head_dim} is not an even number of dimensions"
        )
    return rotary_dim


def _freq_factors(params: Mapping[str, Any], kind: RopeKind, rotary_dim: int) -> tuple[float, ...]:
    """Return the divisor of each inverse frequency, which only kind freq_factors has.

    The key and the kind are our own, for GGUF files: these store the factors that llama3 computes instead of its keys.
    """
    factors = params.get("freq_factors")
    if (factors is not None) != (kind == "freq_factors"):
        problem = "needs the list 'freq_factors'" if factors is None else "has no 'freq_factors'"
        raise ConfigError("rope_scaling", f"rope type '{kind}' {problem}")
    factors = factors or ()
    if kind == "freq_factors" and len(factors) != rotary_dim // 2:
        expected = f"{rotary_dim // 2} freq_factors for {rotary_dim} rotated dimensions"
        raise ConfigError("rope_scaling", f"expected {expected}, got {len(factors)}")
    return tuple(map(float, factors))


def _first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)


def _rope_parameters(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `rope_scaling` (transformers 4), else `rope_parameters` (transformers 5), else PaddleNLP's two keys.

    In transformers 5, `rope_scaling` replaces the whole of `rope_parameters`.
    """
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    params = raw.get(key) or {}
    if not params and raw.get("rope_scaling_type") is not None:
        kind = raw["rope_scaling_type"]
        return {"rope_type": _PADDLENLP_KINDS.get(kind, kind), "factor": raw.get("rope_scaling_factor")}
    if not isinstance(params, Mapping):
        raise ConfigError(key, f"expected an object, got {type(params).__name__}")
    nested = sorted(name for name, value in params.items() if isinstance(value, Mapping))
    if nested:
        raise ConfigError(key, f"settings for each kind of layer ({', '.join(nested)}) are not supported")
    return params


def _ntk_rope(base: float, rotary_dim: int, max_position_embeddings: int, factor: float) -> RopeConfig:
    """Return PaddleNLP's `ntk`: for every context the base that kind dynamic has for the longest one."""
    theta = base * factor ** (rotary_dim / (rotary_dim - 2))
    return RopeConfig("default", theta, rotary_dim, int(max_position_embeddings * factor))


def _rope_kind(params: Mapping[str, Any]) -> RopeKind:
    kind = _first(params.get("rope_type"), params.get("type"), "default")
    if kind not in SUPPORTED_ROPE_KINDS:
        supported = ", ".join(SUPPORTED_ROPE_KINDS)
        raise ConfigError("rope_scaling", f"rope type '{kind}' is not supported (supported: {supported})")
    return cast(RopeKind, kind)


def _number(params: Mapping[str, Any], kind: str, key: str) -> float:
    value = params.get(key)
    if value is None:
        raise ConfigError("rope_scaling", f"rope type '{kind}' needs a number '{key}'")
    return float(value)


def _factor(params: Mapping[str, Any], kind: str, ratio: float) -> float:
    """Return the scaling factor; for yarn, null stands for the ratio of the two context lengths."""
    if kind == "yarn" and params.get("factor", 0) is None:
        return ratio
    return _number(params, kind, "factor")


def _yarn_attention_factor(params: Mapping[str, Any], factor: float) -> float:
    """Return the multiplier of cosines and sines: Peng et al. 2023 (YaRN), section 3.4, with DeepSeek's two mscales."""
    explicit = params.get("attention_factor")
    if explicit is not None:
        return float(explicit)
    mscale, mscale_all = params.get("mscale"), params.get("mscale_all_dim")
    if mscale and mscale_all:
        return _magnitude(factor, float(mscale)) / _magnitude(factor, float(mscale_all))
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * log(factor) + 1.0 if factor > 1.0 else 1.0
