# SPDX-License-Identifier: Apache-2.0
"""Formats to which weights are quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from fastdeploy.config.coded.fp8_config import FP8
from fastdeploy.config.flag import Flag, check_fields, choice
from fastdeploy.config.refused_methods import REFUSED_METHODS
from fastdeploy.core.errors import ConfigError, ErrorCollector, did_you_mean

FORMATS = ("none", "wint8", "wint4", "wint4_min", "w8a8", "w4a8", "w4a8_min")
GGUF = "gguf"
OWN_FORMATS = (GGUF, "awq", "gptq", "compressed-tensors", FP8)
"""The codes that such a checkpoint has; those in FP8 are widened."""
ALL_FORMATS = (*FORMATS, *OWN_FORMATS)
_CACHE_FORMAT, _CACHE_PART = "kvcache", "kv_cache_quant_type"  # FastDeploy 2.x's names for a quantized KV cache
_EIGHT_BITS = {"wint4": "wint8", "wint4_min": "wint8", "w4a8": "w8a8", "w4a8_min": "w8a8"}
"""Format of four bits -> the format of the parts in which four bits cost more quality per byte saved."""
_MTP_HEAD = "w4a8"
_OTHER_NAMES = {"awq_marlin": "awq", "gptq_marlin": "gptq"}  # of vLLM, for kernels that read the same files
_METHOD, MIXED = "quantization", "mix_quant"  # FastDeploy 2.x's key, and its value for a format per kind of layer
_MIXED_PARTS = ("dense_quant_type", "moe_quant_type")
_OFFLINE = ("is_quantized", "is_moe_quantized")


@dataclass(frozen=True)
class QuantizationConfig:
    """Weight formats, as a flag or a checkpoint gives them; `for_model` tells what they mean for a model.

    Embeddings, norms and the gates of routers are not quantized.

    Attributes:
        attention: the linear layers of attention.
        mlp: dense feed-forward blocks, and the experts that every row uses.
        experts: the experts that a router chooses from; None if none were given.
        head: the vocabulary head, tied or not.
        name: the format that was given for all parts, which then have those of a model without experts; else empty.
    """

    attention: Annotated[str, choice(*ALL_FORMATS)] = "none"
    mlp: Annotated[str, choice(*ALL_FORMATS)] = "none"
    experts: Annotated[str | None, choice(*ALL_FORMATS)] = None
    head: Annotated[str, choice(*ALL_FORMATS)] = "none"
    name: str = ""

    def __post_init__(self) -> None:
        check_fields(self, "quantization.")

    @classmethod
    def from_value(cls, value: str | Mapping[str, Any] | QuantizationConfig) -> QuantizationConfig:
        """Make it from a mapping of parts to formats, from one format for all parts, or from FastDeploy's mapping.

        Raises:
            ConfigError: an unknown format, part or key.
        """
        if isinstance(value, QuantizationConfig):
            return value
        if isinstance(value, Mapping):
            if _METHOD in value:
                return _from_fastdeploy(value)
            parts = cls(**_known_parts(value))
            return parts if parts.is_given else cls(name="none")
        if value == _CACHE_FORMAT:
            raise ConfigError("quantization", f"{value!r} is for the KV cache: use --kv-cache-dtype int8")
        name = _known_format("quantization", value, ", or a JSON mapping of parts")
        return cls(attention=name, mlp=name, head=_EIGHT_BITS.get(name, name), name=name)

    @property
    def is_none(self) -> bool:
        """Return whether no part is quantized."""
        return all(format in ("none", None) for format in self._parts.values())

    @property
    def own_formats(self) -> set[str]:
        """Return the formats of parts that have the codes of the checkpoint."""
        return {format for format in self._parts.values() if format in OWN_FORMATS}

    @property
    def has_own_codes(self) -> bool:
        """Return whether a part has the codes of the checkpoint."""
        return bool(self.own_formats)

    @property
    def is_given(self) -> bool:
        """Return whether anything was given, be it `none`."""
        return self != UNQUANTIZED

    def for_codes(self, method: str, *, are_widened: bool, name: str) -> QuantizationConfig:
        """Return the formats for a checkpoint, in which parts that ask for codes which are widened are not quantized.

        Args:
            method: how its weights are stored as codes, one of OWN_FORMATS; else empty.
            are_widened: whether none of these codes are kept.
            name: of the checkpoint.

        Raises:
            ConfigError: a part asks for codes that the checkpoint does not have.
        """
        for format in self.own_formats - {method}:
            problem = f"{format}: {name} has no weights that are quantized so"
            raise ConfigError("quantization", f"{problem}; expected one of {', '.join(FORMATS)}")
        if not are_widened:
            return self
        parts = {part: "none" for part, format in self._parts.items() if format in OWN_FORMATS}
        return replace(self, **parts, name="none" if self.name in OWN_FORMATS else self.name)

    def for_model(self, has_experts: bool) -> QuantizationConfig:
        """Return the format of each part of a model.

        One format for all parts means that format, but for four bits: the head, and on models with experts everything
        but the experts, then has eight.

        Raises:
            ConfigError: there is a format for experts, but the model has none.
        """
        if not has_experts:
            if self.experts is not None:
                raise ConfigError("quantization.experts", "the model has no experts; expected attention, mlp, head")
            return replace(self, name="")
        if not self.name:
            return replace(self, experts=self.experts or "none")
        rest = _EIGHT_BITS.get(self.name, self.name)
        return QuantizationConfig(attention=rest, mlp=rest, experts=self.name, head=rest)

    def for_draft_model(self) -> QuantizationConfig:
        """Return what a draft model takes over from its target: all but formats for experts and the target's codes."""
        return UNQUANTIZED if self.has_own_codes else replace(self, experts=None)

    def for_mtp_layers(self, dtype: str) -> QuantizationConfig:
        """Return the default formats of a model's layers for multi-token prediction.

        Their head has four bits: with a large vocabulary, the head takes most of the time of a draft pass, and drafts
        are verified anyway.

        Args:
            dtype: of the model; only bfloat16 can be quantized.
        """
        return replace(self, head=_MTP_HEAD) if dtype == "bfloat16" else self

    def to_value(self) -> str | dict[str, str]:
        """Return what `from_value` makes this from."""
        if self.name or not self.is_given:
            return self.name or "none"
        return {name: format for name, format in self._parts.items() if format is not None}

    def __str__(self) -> str:
        """Return the format of each part, or of all if they have the same or were given one."""
        parts = {name: format for name, format in self._parts.items() if format is not None}
        if self.name or len(set(parts.values())) == 1:
            return self.name or self.head
        return ", ".join(f"{name} {format}" for name, format in parts.items())

    @property
    def _parts(self) -> dict[str, str | None]:
        return {name: getattr(self, name) for name in _part_names()}


UNQUANTIZED = QuantizationConfig()


def quantization_format(**keys: Any) -> Flag:
    """Accept what `QuantizationConfig.from_value` accepts."""

    def is_valid(value: Any) -> bool:
        try:
            QuantizationConfig.from_value(value)
        except ConfigError:
            return False
        return True

    return Flag("str_or_json", f"one of {', '.join(ALL_FORMATS)}, or a mapping of parts to them", is_valid, **keys)


def _part_names() -> list[str]:
    return [part.name for part in fields(QuantizationConfig) if part.name != "name"]


def _known_format(field: str, value: Any, or_else: str = "", known: Sequence[str] = ALL_FORMATS) -> str:
    """Return a format in small letters.

    Args:
        or_else: what else the message names as expected.
        known: the formats that are valid.
    """
    name = _usual_name(value) if isinstance(value, str) else ""
    if name in REFUSED_METHODS:
        raise ConfigError(field, f"{value!r:.120} is not supported; use {REFUSED_METHODS[name]}")
    if name not in known:
        hint = did_you_mean(name, known)
        raise ConfigError(field, f"expected one of {', '.join(known)}{or_else}, got {value!r:.120}{hint}")
    return name


def _known_parts(value: Mapping[str, Any]) -> dict[str, str]:
    known = _part_names()
    problems = ErrorCollector()
    for name in value:
        with problems.collecting():
            if name == _CACHE_PART:
                _refuse_cache_part()
            if name not in known:
                hint = did_you_mean(name, (*known, _METHOD))
                raise ConfigError(f"quantization.{name}", f"unknown part, expected {', '.join(known)}{hint}")
    problems.raise_all()
    return {name: _usual_name(str(format)) for name, format in value.items()}


def _usual_name(format: str) -> str:
    return _OTHER_NAMES.get(format.lower(), format.lower())


def _from_fastdeploy(value: Mapping[str, Any]) -> QuantizationConfig:
    """Read a mapping with FastDeploy 2.x's keys: `quantization`, and two formats if that is mix_quant.

    Raises:
        ConfigError: a format or key is unknown, or the mapping says that the weights are quantized already.
    """
    keys = {name: item for name, item in value.items() if item is not None}
    method = keys.pop(_METHOD, None)
    if keys.pop(_CACHE_PART, None) is not None:
        _refuse_cache_part()
    for name in _OFFLINE:
        if keys.pop(name, False) is not False:
            raise ConfigError(f"quantization.{name}", "weights quantized offline by FastDeploy are not supported")
    known = _MIXED_PARTS if method == MIXED else ()
    for name in keys:
        if name not in known:
            expected = ", ".join((_METHOD, *known))
            raise ConfigError(
                f"quantization.{name}", f"unknown key beside {_METHOD} {method!r:.60}, expected {expected}"
            )
    if method != MIXED:
        if not isinstance(method, str):
            raise ConfigError(f"quantization.{_METHOD}", f"expected {MIXED} or a format, got {method!r:.120}")
        return QuantizationConfig.from_value(method)
    dense, experts = (_known_format(f"quantization.{name}", keys.get(name), known=FORMATS) for name in _MIXED_PARTS)
    return QuantizationConfig(attention=dense, mlp=dense, experts=experts, head=dense)


def _refuse_cache_part() -> None:
    raise ConfigError(f"quantization.{_CACHE_PART}", "is not a part of the weights: use --kv-cache-dtype int8")
