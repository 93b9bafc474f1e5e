# SPDX-License-Identifier: Apache-2.0
"""Formats to which weights are quantized at load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from fastdeploy.config.flag import Flag, check_fields, choice
from fastdeploy.core.errors import ConfigError, did_you_mean

FORMATS = ("none", "wint8", "wint4", "w8a8", "w4a8")
_CACHE_FORMAT, _CACHE_PART = "kvcache", "kv_cache_quant_type"  # FastDeploy 2.x's names for a quantized KV cache
_HEADS = {"wint4": "wint8", "w4a8": "w8a8"}  # per byte saved, four bits cost more quality in the head than in layers


@dataclass(frozen=True)
class QuantizationConfig:
    """The formats of the linear layers of attention, of the MLPs and of the vocabulary head, tied or not.

    The embedding and the norms are not quantized.
    """

    attention: Annotated[str, choice(*FORMATS)] = "none"
    mlp: Annotated[str, choice(*FORMATS)] = "none"
    head: Annotated[str, choice(*FORMATS)] = "none"

    def __post_init__(self) -> None:
        check_fields(self, "quantization.")

    @classmethod
    def from_value(cls, value: str | Mapping[str, Any] | QuantizationConfig) -> QuantizationConfig:
        """Make it from a mapping of parts to formats, or from one format for all parts.

        With a format of four bits for all parts, the head has eight.

        Raises:
            ConfigError: an unknown format or part.
        """
        if isinstance(value, QuantizationConfig):
            return value
        if isinstance(value, Mapping):
            return cls(**_known_parts(value))
        if value == _CACHE_FORMAT:
            raise ConfigError("quantization", f"{value!r} is for the KV cache: use --kv-cache-dtype int8")
        name, value = value, value.lower()
        if value not in FORMATS:
            raise ConfigError(
                "quantization",
                f"expected one of {', '.join(FORMATS)}, or a JSON mapping of parts, got {name!r}"
                f"{did_you_mean(value, FORMATS)}",
            )
        return cls(attention=value, mlp=value, head=_HEADS.get(value, value))

    @property
    def is_none(self) -> bool:
        """Return whether no part is quantized."""
        return self == UNQUANTIZED

    def __str__(self) -> str:
        """Return the format of each part, or of all if they have the same."""
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        if len(set(parts.values())) == 1:
            return self.head
        return ", ".join(f"{name} {format}" for name, format in parts.items())


UNQUANTIZED = QuantizationConfig()


def quantization_format(**keys: Any) -> Flag:
    """Accept what `QuantizationConfig.from_value` accepts."""

    def is_valid(value: Any) -> bool:
        try:
            QuantizationConfig.from_value(value)
        except ConfigError:
            return False
        return True

    return Flag("str_or_json", f"one of {', '.join(FORMATS)}, or a mapping of parts to them", is_valid, **keys)


def _known_parts(value: Mapping[str, Any]) -> dict[str, str]:
    known = [part.name for part in fields(QuantizationConfig)]
    for name in value:
        if name == _CACHE_PART:
            raise ConfigError(f"quantization.{name}", "is not a part of the weights: use --kv-cache-dtype int8")
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"quantization.{name}", f"unknown part, expected {', '.join(known)}{hint}")
    return {name: str(format).lower() for name, format in value.items()}
