# SPDX-License-Identifier: Apache-2.0
"""What config.json says about a checkpoint quantized with GPTQ, as AutoGPTQ, GPTQModel and AutoRound write it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastdeploy.config.checkpoint_json import check_values
from fastdeploy.config.coded.awq_config import check_group_size, check_words, first_of
from fastdeploy.config.coded.module_rules import DYNAMIC, FIELD, INSTEAD, RULE_KEYS, ModuleRules
from fastdeploy.config.flag import integer, switch, text
from fastdeploy.core.errors import ConfigError

METHOD = "gptq"
_V1, _V2 = "gptq", "gptq_v2"
_BITS = (4, 8)
_MODULE_KEYS = {
    "bits": integer(1, 32),
    "group_size": integer(-1, 2**31 - 1),
    **dict.fromkeys(("sym", "desc_act"), switch()),
}
_KEYS = {
    **RULE_KEYS,
    **_MODULE_KEYS,
    **dict.fromkeys(("checkpoint_format", "format", "pack_dtype", "rotation"), text()),
    "is_marlin_format": switch(),
}


@dataclass(frozen=True)
class GPTQScheme:
    """How a module is quantized.

    Attributes:
        group_size: inputs that share a scale; -1: all inputs of an output.
        is_symmetric: whether every zero is half of the number of codes; None if the tensors tell.
        is_reordered: `desc_act`: whether inputs were quantized in the order of their activations.
    """

    bits: Literal[4, 8]
    group_size: int
    is_symmetric: bool | None
    is_reordered: bool


@dataclass(frozen=True)
class GPTQConfig:
    """How modules are quantized.

    Attributes:
        stores_zeros_minus_one: whether the tensors are of the first format, `gptq`.
    """

    raw: Mapping[str, Any]
    where: str
    stores_zeros_minus_one: bool
    rules: ModuleRules

    def scheme_of(self, module: str) -> GPTQScheme:
        """Return how a module is quantized."""
        return _scheme({**self.raw, **self.rules.overrides(module)}, self.where, FIELD)


def parse_gptq(raw: Mapping[str, Any], where: str) -> GPTQConfig:
    """Check the `quantization_config` of a checkpoint.

    Args:
        raw: the object.
        where: the file, as messages begin with it.

    Raises:
        ConfigError: a value is not valid, or bits or a layout are not supported.
    """
    check_values(raw, _KEYS, where, FIELD)
    layout = str(first_of(raw, "checkpoint_format", "format", default=_V1)).lower()
    if raw.get("is_marlin_format"):
        layout = "marlin"
    if layout not in (_V1, _V2):
        raise ConfigError(
            f"{FIELD}.checkpoint_format",
            f"{where}GPTQ in the layout {layout!r:.60} is not supported; expected {_V1}, {_V2}, {INSTEAD}",
        )
    if raw.get("rotation"):
        raise ConfigError(
            f"{FIELD}.rotation", f"{where}GPTQ with rotated weights is not supported; expected none, {INSTEAD}"
        )
    check_words(raw, where)
    _scheme(raw, where, FIELD)
    for pattern, overrides in (raw.get(DYNAMIC) or {}).items():
        place = f"{FIELD}.{DYNAMIC}.{pattern:.60}"
        check_values(overrides, _MODULE_KEYS, where, place)
        _scheme({**raw, **overrides}, where, place)
    return GPTQConfig(raw, where, layout == _V1, ModuleRules.from_config(raw, where))


def _scheme(values: Mapping[str, Any], where: str, place: str) -> GPTQScheme:
    bits = values.get("bits")
    if bits not in _BITS:
        found = "without bits" if bits is None else f"with {bits} bits"
        expected = ", ".join(map(str, _BITS))
        raise ConfigError(f"{place}.bits", f"{where}GPTQ {found} is not supported; expected {expected}, {INSTEAD}")
    size = first_of(values, "group_size", default=128)
    check_group_size(size, where, place)
    return GPTQScheme(8 if bits == 8 else 4, size, values.get("sym"), bool(values.get("desc_act")))
