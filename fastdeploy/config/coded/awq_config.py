# SPDX-License-Identifier: Apache-2.0
"""What config.json says about a checkpoint quantized with AWQ, as AutoAWQ, GPTQModel and AutoRound write it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastdeploy.config.checkpoint_json import check_values
from fastdeploy.config.coded.module_rules import DYNAMIC, FIELD, INSTEAD, RULE_KEYS, ModuleRules
from fastdeploy.config.flag import integer, switch, text
from fastdeploy.core.errors import ConfigError

METHOD = "awq"
WHOLE_ROWS = -1  # as a group_size
_LAYOUT, _BITS = "gemm", 4
_SIZES = ("group_size", "q_group_size")
_KEYS = {
    **RULE_KEYS,
    **dict.fromkeys(("bits", "w_bit"), integer(1, 32)),
    **dict.fromkeys(_SIZES, integer(-1, 2**31 - 1)),
    **dict.fromkeys(("version", "format", "checkpoint_format", "backend", "pack_dtype"), text()),
    "zero_point": switch(),
}


@dataclass(frozen=True)
class AWQConfig:
    """How modules are quantized.

    Attributes:
        group_size: inputs that share a scale, unless the rules say something else; WHOLE_ROWS: all of an output.
        has_zero_points: whether zeros may be others than 8.
    """

    group_size: int
    has_zero_points: bool
    rules: ModuleRules

    def group_size_of(self, module: str) -> int:
        """Return the number of inputs of a module that share a scale."""
        return int(first_of(self.rules.overrides(module), "group_size", default=self.group_size))


def parse_awq(raw: Mapping[str, Any], where: str) -> AWQConfig:
    """Check the `quantization_config` of a checkpoint.

    Args:
        raw: the object; `w_bit` and `q_group_size` are AutoAWQ's own names.
        where: the file, as messages begin with it.

    Raises:
        ConfigError: a value is not valid, or bits or a layout are not supported.
    """
    check_values(raw, _KEYS, where, FIELD)
    _check_sizes(raw, where, FIELD)
    for pattern, overrides in (raw.get(DYNAMIC) or {}).items():
        check_values(overrides, _KEYS, where, f"{FIELD}.{DYNAMIC}.{pattern:.60}")
        _check_sizes(overrides, where, f"{FIELD}.{DYNAMIC}.{pattern:.60}")
    layout = str(first_of(raw, "version", "format", "checkpoint_format", default=_LAYOUT)).lower()
    if raw.get("backend") == "llm-awq":
        layout = "llm-awq"
    if layout != _LAYOUT:
        raise ConfigError(
            f"{FIELD}.version",
            f"{where}AWQ in the layout {layout!r:.60} is not supported; expected {_LAYOUT}, {INSTEAD}",
        )
    check_words(raw, where)
    return AWQConfig(
        first_of(raw, *_SIZES, default=128), raw.get("zero_point") is not False, ModuleRules.from_config(raw, where)
    )


def _check_sizes(raw: Mapping[str, Any], where: str, place: str) -> None:
    bits = first_of(raw, "bits", "w_bit", default=_BITS)
    if bits != _BITS:
        raise ConfigError(f"{place}.bits", f"{where}AWQ with {bits} bits is not supported; expected {_BITS}, {INSTEAD}")
    check_group_size(first_of(raw, *_SIZES, default=128), where, place)


def first_of(raw: Mapping[str, Any], *keys: str, default: Any) -> Any:
    """Return the value of the first key that has one."""
    return next((raw[key] for key in keys if raw.get(key) is not None), default)


def check_group_size(size: int, where: str, place: str) -> None:
    """Raise ConfigError if no input shares a scale."""
    if size == 0:
        raise ConfigError(f"{place}.group_size", f"{where}expected {WHOLE_ROWS} or a number of inputs, got 0")


def check_words(raw: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if codes are packed into other words than those of 32 bits."""
    words = first_of(raw, "pack_dtype", default="int32")
    if words != "int32":
        raise ConfigError(f"{FIELD}.pack_dtype", f"{where}expected int32, got {words!r:.60}")
