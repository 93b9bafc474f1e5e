# SPDX-License-Identifier: Apache-2.0
"""What config.json says about single modules of a checkpoint quantized with AWQ or GPTQ, by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastdeploy.config.flag import Flag
from fastdeploy.core.errors import ConfigError

FIELD = "quantization_config"
INSTEAD = "or plain weights, which --quantization packs into fewer bits"
NOT_CONVERTED, DYNAMIC = "modules_to_not_convert", "dynamic"
_NEGATIVE, _POSITIVE = "-:", "+:"  # how patterns of `dynamic` begin; one without either is positive
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"
RULE_KEYS: Mapping[str, Flag] = {
    NOT_CONVERTED: Flag(
        "json",
        "a list of strings",
        lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    ),
    DYNAMIC: Flag(
        "json",
        "an object of objects",
        lambda value: isinstance(value, Mapping) and all(isinstance(item, Mapping) for item in value.values()),
    ),
}


@dataclass(frozen=True)
class ModuleRules:
    """Modules that are not quantized, or in another way than the rest.

    Attributes:
        not_converted: `modules_to_not_convert`: regular expressions for the beginning of a name up to a dot, or texts
            with which a name ends, as transformers takes them.
        dynamic: GPTQModel's `dynamic`: keys of the configuration that differ for modules whose names begin with a
            match; of several patterns the first one counts.
    """

    not_converted: tuple[str, ...] = ()
    dynamic: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def from_config(cls, raw: Mapping[str, Any], where: str) -> ModuleRules:
        """Read the keys of a `quantization_config` whose types have been checked with RULE_KEYS.

        Raises:
            ConfigError: a pattern is no regular expression.
        """
        rules = cls(tuple(raw.get(NOT_CONVERTED) or ()), dict(raw.get(DYNAMIC) or {}))
        for key, patterns in ((NOT_CONVERTED, rules.not_converted), (DYNAMIC, rules.dynamic)):
            for pattern in patterns:
                try:
                    re.compile(_expression(pattern))
                except (re.error, OverflowError, RecursionError) as error:
                    message = f"{where}{pattern!r:.120} is no regular expression: {error!s:.120}"
                    raise ConfigError(f"{FIELD}.{key}", message) from None
        return rules

    def plain_by(self, module: str) -> str | None:
        """Return the key that says that a module is not quantized, if one does."""
        if any(
            re.match(f"(?:{pattern}){_BOUNDARY}", module) or module.endswith(pattern) for pattern in self.not_converted
        ):
            return NOT_CONVERTED
        return DYNAMIC if (self._pattern_for(module) or "").startswith(_NEGATIVE) else None

    def overrides(self, module: str) -> Mapping[str, Any]:
        """Return the keys of the configuration that differ for a module."""
        pattern = self._pattern_for(module)
        return {} if pattern is None else self.dynamic[pattern]

    def _pattern_for(self, module: str) -> str | None:
        return next((pattern for pattern in self.dynamic if re.match(_expression(pattern), module)), None)


def _expression(pattern: str) -> str:
    return pattern[2:] if pattern.startswith((_NEGATIVE, _POSITIVE)) else pattern
