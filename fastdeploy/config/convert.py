# SPDX-License-Identifier: Apache-2.0
"""Converts a flag's value to its type: a string of the command line, or a typed value of YAML or `LLM`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from fastdeploy.config.flag import Flag, FlagClass
from fastdeploy.core.errors import ConfigError, unset_variable

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_TOKEN_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def convert(flag: Flag, raw: Any, shown: str) -> Any:
    """Return the value in the flag's type.

    Args:
        shown: the flag's name, for errors.

    Raises:
        ConfigError: the value has another type or is out of range; a secret value is not shown.
    """
    got = "a value that is not shown" if flag.is_secret else repr(raw)
    converter, expected = KINDS[flag.kind]
    try:
        value = converter(raw)
    except (ValueError, TypeError) as error:
        detail = f": {error}" if flag.kind == "json" else ""
        detail += "" if flag.is_secret else unset_variable(raw)
        raise ConfigError(shown, f"expected {expected}, got {got}{detail}") from None
    if flag.flag_class is not FlagClass.HONOURED and not flag.is_valid(value):
        raise ConfigError(shown, f"expected {flag.expected}, got {got}")
    if isinstance(value, str) and value.lower() in flag.refused_values:
        raise ConfigError(f"{shown} {value}", f"is refused: {flag.refused_values[value.lower()]}")
    return flag.aliases.get(value, value) if isinstance(value, str) else value


def _to_int(raw: Any) -> int:
    if isinstance(raw, bool) or not isinstance(raw, (int, str)):
        raise TypeError
    return int(raw)


def _to_float(raw: Any) -> float:
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        raise TypeError
    value = float(raw)
    if value != value:
        raise ValueError
    return value


def _to_bool(raw: Any) -> bool:
    text = str(raw).lower()
    if isinstance(raw, (bool, str)) and text in _TRUE + _FALSE:
        return text in _TRUE
    raise ValueError


def _to_str(raw: Any) -> str:
    if isinstance(raw, bool) or not isinstance(raw, (str, int, float, Path)):
        raise TypeError
    return str(raw)


def _to_bytes(raw: Any) -> int:
    found = re.fullmatch(r"(\d+)([kmg]?i?)b?", str(raw).strip().lower())
    if isinstance(raw, (bool, float)) or not found or found.group(2) not in _UNITS:
        raise ValueError
    return int(found.group(1)) * _UNITS[found.group(2)]


def _to_tokens(raw: Any) -> int:
    """Return a number of tokens; small letters are powers of 1,000, capital ones of 1,024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT])", raw.strip()) if isinstance(raw, str) else None
    if found is None:
        return _to_int(raw)
    count = Decimal(found.group(1)) * _TOKEN_UNITS[found.group(2)]
    if count != int(count):
        raise ValueError
    return int(count)


def _to_tokens_or_auto(raw: Any) -> int | Literal["auto"]:
    """Return a number of tokens, or `auto`, for which vLLM also takes -1."""
    return "auto" if raw in ("auto", "-1", -1) else _to_tokens(raw)


def _to_json(raw: Any) -> Any:
    value = json.loads(raw, object_pairs_hook=_without_repeats) if isinstance(raw, str) else raw
    if not isinstance(value, Mapping):
        raise TypeError(f"a JSON {type(value).__name__} is not a mapping")
    return value


def _to_str_or_json(raw: Any) -> Any:
    """Return a mapping for a mapping or the JSON of one, else a string."""
    if isinstance(raw, Mapping) or (isinstance(raw, str) and raw.lstrip().startswith("{")):
        return _to_json(raw)
    return _to_str(raw)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's mapping; refuse repeated keys, of which json would keep the last value."""
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"the key {key!r} is repeated")
        mapping[key] = value
    return mapping


def _to_strings(raw: Any) -> tuple[str, ...]:
    """Return the items, with those of strings that are JSON lists."""
    items: list[str] = []
    for item in raw if isinstance(raw, (list, tuple)) else [raw]:
        if isinstance(item, str) and item.startswith("["):
            items += _to_strings(json.loads(item))
        else:
            items.append(_to_str(item))
    return tuple(items)


def _to_ports(raw: Any) -> str:
    """Return port numbers separated by commas; a file may have a number or a list instead."""
    items = [str(item).strip() for part in raw for item in str(part).split(",")] if isinstance(raw, list) else None
    items = items or [item.strip() for item in _to_str(raw).split(",")]
    if not all(item.isdecimal() and 1 <= int(item) <= 65535 for item in items):
        raise ValueError
    return ",".join(items)


KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "str": (_to_str, "a string"),
    "int": (_to_int, "an integer"),
    "float": (_to_float, "a number"),
    "bool": (_to_bool, "true or false"),
    "bytes": (_to_bytes, "a number of bytes such as 536870912 or 512Mi"),
    "tokens": (_to_tokens, "a number of tokens such as 4096, 8k (8,000) or 8K (8,192)"),
    "tokens_or_auto": (_to_tokens_or_auto, "auto, or a number of tokens such as 4096, 8k (8,000) or 8K (8,192)"),
    "json": (_to_json, "a JSON mapping"),
    "str_or_json": (_to_str_or_json, "a name or a JSON mapping"),
    "ports": (_to_ports, "ports in [1, 65535], separated by commas"),
    "list": (_to_strings, "strings, or a JSON list of them"),
}
