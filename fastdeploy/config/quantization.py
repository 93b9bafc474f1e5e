# SPDX-License-Identifier: Apache-2.0
"""Which weights are quantized at load, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fastdeploy.config.flag import Flag
from fastdeploy.core.errors import ConfigError

FORMATS = ("none", "wint8", "wint4", "w8a8", "w4a8")
_CACHE_FORMAT, _CACHE_PART = "kvcache", "kv_cache_quant_type"  # FastDeploy 2.x's names for a quantized KV cache
_HEADS = {"wint4": "wint8", "w4a8": "w8a8"}  # four bits in the head cost more quality than in all layers per byte saved


@dataclass(frozen=True)
class QuantizationConfig:
    """The format of each part's weights; the embedding and the norms stay as they are.

    Attributes:
        attention: the linear layers around attention.
        mlp: those of the feed-forward blocks.
        head: the vocabulary head, tied or not.
    """

    attention: str = "none"
    mlp: str = "none"
    head: str = "none"

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            if value not in FORMATS:
                raise ConfigError(f"quantization.{part.name}", f"expected one of {', '.join(FORMATS)}, got {value!r}")

    @classmethod
    def from_value(cls, value: str | Mapping[str, Any] | QuantizationConfig) -> QuantizationConfig:
        """Return what a format's name, or a mapping of parts to formats, stands for.

        A name gives its format to every part, except that the head takes eight bits beside layers of four.

        Raises:
            ConfigError: an unknown format or part.
        """
        if isinstance(value, QuantizationConfig):
            return value
        if isinstance(value, Mapping):
            return cls(**_known_parts(value))
        if value == _CACHE_FORMAT:
            raise ConfigError("quantization", f"{value!r} speaks of the KV cache: use --kv-cache-dtype int8")
        if value not in FORMATS:
            raise ConfigError(
                "quantization", f"expected one of {', '.join(FORMATS)}, or a JSON mapping of parts, got {value!r}"
            )
        return cls(attention=value, mlp=value, head=_HEADS.get(value, value))

    @property
    def is_none(self) -> bool:
        """Whether every part keeps the model's own type."""
        return self == UNQUANTIZED

    def __str__(self) -> str:
        """Name every part's format; one name where they agree."""
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
            raise ConfigError(f"quantization.{name}", "is no part of the weights: use --kv-cache-dtype int8")
        if name not in known:
            raise ConfigError(f"quantization.{name}", f"unknown part, expected {', '.join(known)}")
    return {name: str(format) for name, format in value.items()}
