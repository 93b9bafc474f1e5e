# SPDX-License-Identifier: Apache-2.0
"""From what a user wrote to the type of a flag; YAML and `LLM` bring typed values, the command line brings strings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastdeploy.config.flag import Flag

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def convert(flag: Flag, raw: Any) -> Any:
    """Return the value in the flag's type.

    Raises:
        ValueError: what was expected and what came, without the value if it is a secret.
    """
    got = "a value that is not shown" if flag.is_secret else repr(raw)
    try:
        value = _CONVERTERS[flag.kind](raw)
    except (ValueError, TypeError) as error:
        detail = f": {error}" if flag.kind == "json" else ""
        raise ValueError(f"expected {_EXPECTED[flag.kind]}, got {got}{detail}") from None
    if flag.low is not None and value < flag.low:
        raise ValueError(f"expected at least {flag.low}, got {got}")
    if flag.high is not None and value > flag.high:
        raise ValueError(f"expected at most {flag.high}, got {got}")
    return value


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


def _to_json(raw: Any) -> Any:
    value = json.loads(raw, object_pairs_hook=_without_repeats) if isinstance(raw, str) else raw
    if not isinstance(value, Mapping):
        raise TypeError(f"a JSON {type(value).__name__} is no mapping")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's mapping; of a key that stands twice, JSON itself would keep the last value."""
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"the key {key!r} stands twice")
    return dict(pairs)


def _to_list(raw: Any) -> list[str]:
    """Return the items; a string that is a JSON list stands for its items."""
    items: list[str] = []
    for item in raw if isinstance(raw, (list, tuple)) else [raw]:
        if isinstance(item, str) and item.startswith("["):
            items += _to_list(json.loads(item))
        else:
            items.append(_to_str(item))
    return items


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "str": _to_str,
    "int": _to_int,
    "float": _to_float,
    "bool": _to_bool,
    "bytes": _to_bytes,
    "json": _to_json,
    "list": _to_list,
}
_EXPECTED = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "bytes": "a number of bytes such as 536870912 or 512Mi",
    "json": "a JSON mapping",
    "list": "strings, or a JSON list of them",
}
